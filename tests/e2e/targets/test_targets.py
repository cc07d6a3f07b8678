# SPDX-License-Identifier: Apache-2.0
"""Targets of other families than Llama against plain decoding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.e2e.families import (
    VOCAB,
    WINDOW_PROMPTS,
    around_windows,
    diverges,
    engine_of,
    num_groups,
)
from tests.e2e.pair import (
    Pair,
    both_schedulers,
    changed,
    core_of,
    pair,
    scheduled,
    sequences_of,
    watch_drafts,
    watch_prefix_hits,
)
from tests.e2e.requests import PROMPTS, greedy, seeded
from tests.e2e.tiny import make_head
from vllm_specplug.vllm_attention import tree_rows
from vllm_specplug.vllm_attention.cpu import TreeCPUAttentionBackendImpl

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]


@contextmanager
def tree_attention(change: Callable[..., Any]) -> Iterator[None]:
    """Tree rows attend by `change(stock, *args, features)` in the place of the kernel."""
    stock = tree_rows.tree_attn
    attention = patch.object(
        tree_rows, "tree_attn", lambda *args, features: change(stock, *args, features)
    )
    # Layers prepared once hold their features and call the kernel themselves.
    unprepared = patch.object(
        TreeCPUAttentionBackendImpl, "attend_rows", tree_rows.TreeAttentionMixin.attend_rows
    )
    with attention, unprepared:
        yield


def without(**neutral: Any) -> Any:
    """Tree rows that leave a feature out."""

    def attend(stock: Any, *args: Any) -> None:
        *args, features = args  # type: ignore[assignment]
        stock(*args, features=replace(features, **neutral))

    return tree_attention(attend)


def windows_from_slots() -> Any:
    """Tree rows whose windows are counted from their slots, not from their positions."""
    from vllm_specplug.kernels.masks import words_to_bool
    from vllm_specplug.kernels.reference import dense_attention

    def attend(stock: Any, query: Any, keys: Any, values: Any, output: Any, meta: Any,
               scale: float, layout: Any, features: Any) -> None:  # fmt: skip
        for request, start, rows, context, first in meta.plan.t().tolist():
            slots = torch.arange(context + rows)
            seen = torch.ones(rows, context + rows, dtype=torch.bool)
            seen[:, context:] = words_to_bool(meta.mask_words[first : first + rows], rows)
            if features.window:
                seen &= torch.arange(context, context + rows)[:, None] - slots < features.window
            size = layout.block_size
            at = meta.block_table[request].long()[slots // size] * size + slots % size
            at_rows = slice(start, start + rows)
            group = query.shape[1] // keys.shape[1]
            out = dense_attention(
                query[at_rows], *layout.gather(keys, values, at), scale, group, seen,
                features=replace(features, window=0),
            )  # fmt: skip
            output[at_rows] = out

    return tree_attention(attend)


def moved_for_each_layer(made: Pair) -> Any:
    """Accepted paths are moved once for each layer that reads them."""
    groups = made.runner.state.target_groups()
    layers = [(group.index, list(group.caches.values())) for group in groups]
    return patch.object(made.runner.tree_backend, "groups", layers)


def of_one_group(made: Pair) -> Any:
    """Accepted paths of every group are moved by the slots of the first one."""
    return changed(
        made.runner.tree_backend,
        "compact",
        lambda stock, trees, walk, slots: stock(trees, walk, slots[:1].expand_as(slots)),
    )


def test_windows_and_sinks() -> None:
    made = pair("oracle", **engine_of("GptOss"))
    around_windows(made)
    with without(sinks=None):
        diverges(made)


def test_windows_and_full_attention_in_groups() -> None:
    """Gemma-3: windows and full attention in KV cache groups of their own."""
    for made in both_schedulers(**engine_of("Gemma3Text")):
        assert num_groups(made) > 1
        assert around_windows(made).skipping > 10
        with windows_from_slots():
            diverges(made)
    for wrong in (without(window=0), of_one_group(made)):
        with wrong:
            diverges(made)


def test_windows_shorter_than_a_tree_is_deep() -> None:
    made = scheduled(True, **engine_of("Mistral"))
    assert around_windows(made).skipping > 10
    with windows_from_slots():
        diverges(made)


def test_windows_and_soft_caps() -> None:
    made = pair("oracle", **engine_of("Gemma2"))
    around_windows(made)
    with without(soft_cap=0.0):
        diverges(made)


def test_alibi() -> None:
    made = pair("oracle", **engine_of("Bloom"))
    around_windows(made)
    with without(alibi_slopes=None):
        diverges(made)


def test_prefix_hits_at_window_borders() -> None:
    """Also on blocks of generated text, which compaction wrote."""
    params = greedy(max_tokens=50, detokenize=False)
    for made in both_schedulers(**engine_of("Gemma3Text"), tree={"enable_prefix_caching": True}):
        first, _ = made.compare(WINDOW_PROMPTS[3:], params)
        hits = watch_prefix_hits(made.tree)
        for cut in (0, 1, 33):
            hits.clear()
            longer = [tokens[: len(tokens) - cut] for tokens in sequences_of(first)]
            made.compare(longer, greedy(max_tokens=12, detokenize=False))
            assert len(hits) == len(longer) and max(hits.values()) >= 128, hits
            assert min(hits.values()) >= 32, hits


def test_blocks_that_left_a_window_are_never_touched() -> None:
    """A freed block is filled with numbers that would show in any output, and holds them until
    somebody is given it."""
    made = pair("oracle", **engine_of("Gemma3Text"))
    pool = core_of(made.tree).scheduler.kv_cache_manager.block_pool
    caches = [layer.kv_cache for layer in made.runner.state.layers.values()
              if hasattr(layer, "kv_cache")]  # fmt: skip
    poisoned: set[int] = set()
    freed, checked = pool.free_blocks, 0
    given = pool.get_new_blocks

    def free_blocks(blocks: Any, *args: Any, **kwargs: Any) -> None:
        blocks = list(blocks)
        freed(blocks, *args, **kwargs)
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                poisoned.add(block.block_id)
                for cache in caches:
                    cache[block.block_id] = 1e4

    def get_new_blocks(count: int, *args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        blocks = given(count, *args, **kwargs)
        for block in blocks:
            if block.block_id in poisoned:
                checked += 1
                assert all(bool((cache[block.block_id] == 1e4).all()) for cache in caches)
                poisoned.remove(block.block_id)
        return blocks

    with patch.multiple(pool, free_blocks=free_blocks, get_new_blocks=get_new_blocks):
        around_windows(made)
        around_windows(made)
        # The check is empty unless blocks were freed while their requests ran.
        assert checked > 20, checked
        with without(window=0):
            diverges(made)


def test_draft_layers_beside_windows() -> None:
    """A head's own layers keep the whole context, in a group beside the target's windows."""
    folder = Path(tempfile.mkdtemp(prefix="specplug-windows-"))
    engine = engine_of("Mistral")
    head = make_head(folder / "head", VOCAB)
    drafts: list[dict[Any, Any]] = []
    for tree in ({}, {"disable_hybrid_kv_cache_manager": True}):
        made = pair("jetspec", **engine, speculative={"model": str(head)}, tree=tree)
        assert (num_groups(made) > 1) == (made.runner.step.draft_group > 0) == (not tree)
        params = greedy(max_tokens=40, detokenize=False)
        with watch_drafts(made.tree) as seen:
            made.compare(WINDOW_PROMPTS, params, least_accepted=0)
        drafts.append({known: drafted[:2] for known, drafted in seen.items()})
    # With one group for all layers the same cache is read by the one block table there is.
    assert drafts[0] == drafts[1] and len(drafts[0]) > 30


@pytest.mark.parametrize("family", ["GPT2", "OPT", "GPTNeoX"])
def test_other_bodies_positions_and_lm_heads(family: str) -> None:
    """See `families.SIZES`."""
    params = [greedy(detokenize=False), seeded(3, detokenize=False)]
    prompts = [p for p in PROMPTS for _ in params]
    pair("oracle", **engine_of(family)).compare(
        prompts, [p.clone() for _ in PROMPTS for p in params]
    )


def test_layers_that_read_anothers_keys() -> None:
    """Gemma 3n: a cache that several layers read is moved once."""
    made = scheduled(False, **engine_of("Gemma3nText"))
    groups = made.runner.state.target_groups()
    assert [(len(g.caches), len(g.own_caches)) for g in groups] == [(2, 1), (2, 1)]
    assert around_windows(made).skipping > 10
    with moved_for_each_layer(made):
        diverges(made)


def test_heads_of_several_shapes() -> None:
    """Gemma 4: layers without a window have heads of another size, and another number of them."""
    for made in both_schedulers(**engine_of("Gemma4Text")):
        caches = made.runner.state.target_caches().values()
        assert {(cache.shape[1], cache.shape[3]) for cache in caches} == {(2, 64), (1, 128)}
        assert around_windows(made).skipping > 10
        with moved_for_each_layer(made):
            diverges(made)
    with without(window=0):
        diverges(made)
