# SPDX-License-Identifier: Apache-2.0
"""Layers with a recurrent state: which are served, and how a step's rows are told to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_specplug.kernels import DeltaUpdates, StateTrees, commit_states
from vllm_specplug.tree.step_trees import NO_NODE, ROOT, StepTrees
from vllm_specplug.vllm_attention.state_rows import (
    PendingLayer,
    StateBlocks,
    StateStep,
    warmup_step,
)
from vllm_specplug.vllm_attention.tree_rows import RequestRows
from vllm_specplug.vllm_v2.state_trees import accepted_lengths, last_state_rows, state_step
from vllm_specplug.vllm_worker.target.state_layers import (
    StateLayers,
    check_state_blocks,
    prepare_state_layers,
)


def test_layers_are_served_by_their_class() -> None:
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    assert prepare_state_layers({"attention": object()}, "ngram_tree") == StateLayers()
    layer = MambaMixer2.__new__(MambaMixer2)
    with pytest.raises(ValueError, match=r"'ngram_tree' .*'layers\.3'.*MambaMixer2.*Use a target"):
        prepare_state_layers({"layers.3": layer}, "ngram_tree")


def cache_groups(mode: str, size: int) -> Any:
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=size, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode=mode
    )
    group = SimpleNamespace(kv_cache_spec=spec)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=object()), group])


def test_no_path_may_fill_two_blocks() -> None:
    check_state_blocks(cache_groups("align", 17), 16, "ngram_tree")
    check_state_blocks(cache_groups("none", 16), 16, "ngram_tree")
    message = r"'ngram_tree': num_speculative_tokens=16 .* 16 tokens.*enable_prefix_caching=False"
    with pytest.raises(ValueError, match=message):
        check_state_blocks(cache_groups("align", 16), 16, "ngram_tree")


def test_a_full_block_keeps_the_state_at_its_end() -> None:
    """Wherever in a path that is; blocks of 8 tokens, slots by request and block."""
    torch.manual_seed(0)
    # Below the root: 0 -> 1 -> 3, and 2 aside. A path fills the block at 5, 6, 7 or 8 tokens.
    parents = [-1, 0, 1, 0, 2]
    table = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8], [0, 9]], dtype=torch.int32)
    contexts, lengths = torch.tensor([4, 5, 6, 7, 7]), torch.tensor([3, 3, 0, 3, 3])
    full_at = [4, 2, None, 0, None]
    count, rows = len(contexts), len(parents)
    step = StateStep(
        [RequestRows(i * rows, i * rows, (i + 1) * rows, 1) for i in range(count)],
        torch.tensor([p if p < 0 else p + i * rows for i in range(count) for p in parents]),
    )
    trees = StateTrees(step.starts, step.parents, torch.tensor([2, 4, 5, 8, 9]))
    heads, key, value, width = 2, 4, 16, 4
    updates = DeltaUpdates(
        torch.randn(count * rows, 1, key), torch.randn(count * rows, heads, value),
        torch.rand(count * rows, heads),
    )  # fmt: skip
    conv, states = torch.randn(10, width - 1, 3), torch.randn(10, heads, key, value)
    inputs = torch.randn(count * rows, 3)

    def committed(row: int, tree: int) -> tuple[torch.Tensor, torch.Tensor]:
        alone = states.clone()
        last = (step.starts[:-1]).clone()
        last[tree] = row
        commit_states(alone, updates, trees, last)
        known = torch.cat((conv[trees.slots].flatten(0, 1), inputs))
        slot = trees.slots[tree]
        return alone[slot], known[trees.windows(width)[row, 1:]]

    last_rows = step.starts[:-1] + torch.tensor([4, 4, 0, 4, 4])
    expected = {}
    for tree, full in enumerate(full_at):
        start = int(step.starts[tree])
        expected[int(trees.slots[tree])] = committed(int(last_rows[tree]), tree)
        if full is not None:
            expected[int(table[tree, 0])] = committed(start + full, tree)
    kept = states.clone()
    own = conv.clone(), states
    step.pending.append(PendingLayer(*own, inputs, updates, trees, StateBlocks(table, 8)))
    step.commit(last_rows, contexts, lengths)
    for slot in range(10):
        state, window = expected.get(slot, (kept[slot], conv[slot]))
        assert torch.equal(states[slot], state) and torch.equal(own[0][slot], window), slot


# Of four requests: (rows before the root, tokens before, parents, accepted nodes). A prompt that
# goes on, a tree behind the end of a prompt, a request without drafts, a tree.
BATCH: list[tuple[int, int, list[int], list[int]]] = [
    (5, 0, [], []),
    (2, 7, [-1, -1, 1], [1, 2]),
    (0, 9, [], []),
    (0, 4, [-1, 0, 0, -1], []),
]
PARENTS = [-1, 0, 0, 2, -1, 4, 5, 5, 4]


@pytest.mark.parametrize(
    ("rows", "requests", "sizes"), [(2, 8, [2]), (9, 8, [9]), (24, 8, [8, 8, 8]), (40, 2, [20, 20])]
)
def test_warmup_rows_are_trees(rows: int, requests: int, sizes: list[int]) -> None:
    step = warmup_step(rows, requests, tree_rows=9)
    assert step.starts.diff().tolist() == sizes and step.linear is None
    assert step.rows.tolist() == list(range(rows)) and not step.fresh.any()
    for start, size in zip(step.starts.tolist(), sizes, strict=False):
        assert step.parents[start] == -1
        children = torch.bincount(step.parents[start + 1 : start + size] - start)
        assert children.max() <= 2 and children.sum() == size - 1


def test_a_steps_trees_are_those_of_requests_with_drafts() -> None:
    starts, ends, parents, above, lengths, paths = [0], [0], [], [], [], []
    for before, _, tree, accepted in BATCH:
        root = starts[-1]
        starts.append(root + 1 + len(tree))
        ends.append(ends[-1] + before + 1 + len(tree))
        parents += [ROOT, *(root + 1 + p for p in tree)]
        above += [root, *(root + 1 + p for p in tree)]
        lengths.append(len(accepted))
        paths.append([root, *(root + 1 + n for n in accepted), *[root] * (4 - len(accepted))])
    # A node that broke a rule: it hangs below the root and is never reached.
    parents[-1] = NO_NODE
    batch: Any = SimpleNamespace(
        num_reqs=4, query_start_loc_np=np.array(ends), cu_num_logits_np=np.array(starts),
        num_computed_tokens_np=np.array([computed for _, computed, _, _ in BATCH]),
    )  # fmt: skip
    contexts = torch.tensor([before + computed for before, computed, _, _ in BATCH])
    rows: Any = SimpleNamespace(contexts=contexts)
    trees: Any = StepTrees(rows, torch.tensor(parents), None, torch.tensor(above))  # type: ignore[arg-type]
    walk: Any = SimpleNamespace(path_rows=torch.tensor(paths), lengths=torch.tensor(lengths))
    step = state_step(batch, trees)
    assert step.starts.tolist() == [0, 4, 9]
    assert step.parents.tolist() == PARENTS
    assert step.requests.tolist() == [1, 3]
    assert step.rows.tolist() == [8, 9, 10, 11, 13, 14, 15, 16, 17]
    assert last_state_rows(batch, walk).tolist() == [3, 4]
    assert [x.tolist() for x in accepted_lengths(batch, trees, walk)] == [[9, 4], [2, 0]]
    linear = step.linear
    assert linear is not None
    # The single row that continues a state first, then the prompts.
    assert linear.rows.tolist() == [12, 0, 1, 2, 3, 4, 5, 6, 7]
    assert (linear.requests.tolist(), linear.num_decodes) == ([2, 0, 1], 1)
    assert linear.starts.tolist() == [0, 1, 7, 9]
    assert linear.has_state.tolist() == [True, False, True]
