# SPDX-License-Identifier: Apache-2.0
"""Trees over latent caches against plain decoding, float32; see test_latent.py."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.latent import BACKEND, VOCAB, latent_target
from tests.e2e.option_checks import greedy, seeded
from tests.e2e.pair import Counts, Pair, pair
from tests.e2e.target_checks import WINDOW_PROMPTS
from tests.e2e.tiny import make_tokenswift_heads

ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, **BACKEND}
# More than there is room for: prompts come in beside trees.
PROMPTS = [*WINDOW_PROMPTS, *([9, *p] for p in WINDOW_PROMPTS)]


def engines(method: str = "oracle", **options: Any) -> Pair:
    return pair(method, **{"model": latent_target(), **ENGINE, **options})


def compared(made: Pair, **options: Any) -> Counts:
    """Greedy and seeded, drafted for and not, ending at different steps."""
    params = [
        make(max_tokens=24 + 3 * i, detokenize=False)
        for i, make in enumerate([greedy, lambda **kw: seeded(1, **kw)] * 8)
    ]
    params[3].extra_args = {"specplug_tree_budget": 0}
    return made.compare(PROMPTS, params, **options)[1]


@contextmanager
def changed(module: Any, name: str, change: Callable[..., Any]) -> Iterator[None]:
    """`module.name` replaced by `change(stock, *args)`."""
    stock = getattr(module, name)
    setattr(module, name, lambda *args: change(stock, *args))
    try:
        yield
    finally:
        setattr(module, name, stock)


def lines_for_trees() -> Any:
    from vllm_specplug.vllm_attention import latent

    def spans(stock: Any, requests: Any) -> Any:
        return stock([(i, replace(r, mask=None)) for i, r in requests])

    return changed(latent, "spans_of", spans)


def nothing_moves() -> Any:
    from vllm_specplug.vllm_v2 import latent_backend as backend

    return changed(backend, "move_latents", lambda stock, *args: None)


def check_greedy_and_seeded() -> None:
    """DeepSeek-V2's shape; vLLM never expands a context for it."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

    def unexpected(*args: Any) -> None:
        raise AssertionError("a context was expanded")

    made = engines()
    with changed(MLACommonBaseImpl, "_compute_prefill_context", unexpected):
        counts = compared(made, least_accepted=100)
    assert counts.skipping > 20, counts


def check_lines_for_trees_and_lost_compaction_show() -> None:
    made = engines()
    for wrong in (lines_for_trees, nothing_moves):
        with wrong(), pytest.raises(AssertionError, match="differs"):
            compared(made)
    # Nothing of it is left behind.
    compared(made, least_accepted=100)


def check_drafts_that_do_not_read_the_cache() -> None:
    """TokenSwift's heads read hidden states alone, its n-grams text."""
    with tempfile.TemporaryDirectory() as folder:
        heads = str(make_tokenswift_heads(Path(folder) / "heads", VOCAB))
        for source in ("heads", "ngrams"):
            options = {"model": heads, "draft_source": source}
            made = engines("tokenswift", model=latent_target(sharp=False), speculative=options)
            params = greedy(max_tokens=160, detokenize=False, ignore_eos=True)
            made.compare(WINDOW_PROMPTS, params, least_accepted=20)
