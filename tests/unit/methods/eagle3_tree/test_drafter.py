# SPDX-License-Identifier: Apache-2.0
"""Every branch of a tree is what the head would draft as a chain along it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.methods.eagle3_tree.heads import LAYOUTS
from tests.unit.methods.eagle3_tree.world import VOCAB, World
from vllm_specplug.drafting import level_drafter
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_levels import read_trees
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.kernels import build_best_first, tree_builder_triton

NORMS = {f"midlayer.self_attn.{n}_norm.weight": 1 + torch.rand(8) for n in "qk"}
BIASES = {"midlayer.self_attn.q_proj.bias": torch.randn(32)} | {
    f"midlayer.self_attn.{n}_proj.bias": torch.randn(16) for n in "kvo"
}


@pytest.mark.parametrize(
    ("layout", "head"),
    [
        # Scaled angles are those of block heads, which have the same rotary embedding.
        *((layout, {}) for layout in LAYOUTS if not layout.startswith("modelopt")),
        ("speculators", {"norm_before_fc": True}),
        ("specforge", {"norm_before_residual": True}),
        ("specforge", {"norm_output": True}),
        ("specforge", {"extra": NORMS}),
        ("specforge", {"extra": BIASES}),
        ("specforge", {"partial_rotary_factor": 0.5}),
        ("specforge", {"rope_parameters": {"partial_rotary_factor": 0.25}}),
    ],
)
def test_each_branch_equals_the_chain_along_it(
    layout: str, head: dict[str, Any], tmp_path: Path
) -> None:
    world = World(tmp_path, layout, head=head)
    world.commit_all()
    trees = world.drafter.propose(world.requests([16, 9, 16, 12], 8))
    world.check(trees)
    assert [tree.num_nodes for tree in trees] == [16, 9, 16, 12]
    assert max(tree.max_depth for tree in trees) > 2


def _built_on_the_host(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *given, num_nodes = arguments
    *parts, counts = build_best_first(*given)
    return *(F.pad(part, (0, num_nodes - part.shape[1])) for part in parts), counts


@pytest.mark.parametrize("expand", [16, 3])
@pytest.mark.parametrize(
    "layout",
    ["specforge", "speculators_window", "speculators_layers", "specforge_peagle",
     "speculators_peagle", "yuhuili"],
)  # fmt: skip
def test_trees_of_a_device_are_those_of_the_host(
    layout: str, expand: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_builder_triton, "build_best_first_triton", _built_on_the_host)
    monkeypatch.setattr(level_drafter, "FRONTIER_WIDTH", expand)
    host, device = (World(tmp_path, layout, device_cache=d) for d in (False, True))
    for world in (host, device):
        world.commit_all()
    # Each within its own depth, too.
    for depths in ([16] * 4, [4, 2, 3, 1]):
        requests = host.requests([16, 9, 16, 12], 8)
        requests.depths[:] = depths
        given = DeviceRequests.of(requests, 16, torch.device("cpu"))
        trees = read_trees(device.drafter.propose_on_device(given))
        device.check(trees)
        for ours, theirs in zip(trees, host.drafter.propose(requests), strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            assert ours.parent_indices.tolist() == theirs.parent_indices.tolist()
            assert torch.allclose(torch.tensor(ours.scores), torch.tensor(theirs.scores), atol=1e-4)


def test_rows_of_a_device_are_in_no_order(tmp_path: Path) -> None:
    """What was not accepted repeats its root's row, and has no slot."""
    ordered, shuffled = (World(tmp_path, device_cache=True) for _ in range(2))
    for world in (ordered, shuffled):
        world.commit_all()
    states = ordered.drafter._roots
    aux = [torch.randn(6, 16) for _ in range(3)]
    rows = torch.tensor([0, 3, 0, 0, 4, 5])
    seen: list[Any] = []
    shuffled.drafter.cache.write = lambda *given: seen.append(given)  # type: ignore[method-assign]
    shuffled.drafter.observe(
        CommittedTokens(
            aux, rows, torch.arange(6), torch.tensor([7, 8, -1, -1, 9, 10]),
            last_rows=torch.tensor([3, 5]), next_token_ids=torch.zeros(6, dtype=torch.int64),
        )
    )  # fmt: skip
    taken = CommittedTokens(aux, torch.tensor([3, 5]), torch.zeros(2), torch.zeros(2))
    expected = ordered.drafter.target_states(ordered.drafter.target_outputs(taken))
    torch.testing.assert_close(shuffled.drafter._roots, expected)
    assert len(seen) == 1 and len(states) == 4


@pytest.mark.parametrize("layout", ["speculators_window", "speculators_layers"])
def test_what_a_context_lacks_is_noticed(layout: str, tmp_path: Path) -> None:
    """Without its window, or where later layers' keys attend too little of the context, the
    comparison with the reference fails."""
    world = World(tmp_path, layout)
    attend = world.cache.context_attention
    world.cache.context_attention = lambda rows, positions, slots: attend(  # type: ignore[method-assign]
        rows, (positions - 1).clamp_min(0), slots
    )
    world.commit_all()
    if layout == "speculators_window":
        assert world.cache.windows == [6]
        world.cache.windows = [None]
    tree = world.drafter.propose(world.requests([8] * 4, 8))[-1]
    with pytest.raises(AssertionError):
        world.check([tree], first=3)


def test_a_head_with_a_mask_token_runs_once(tmp_path: Path) -> None:
    world = World(tmp_path, "specforge_peagle")
    world.commit_all()
    run, rows = world.drafter.head.forward, []
    world.drafter._run = lambda *args: (
        rows.append(len(args[0])) or run(world.embed[args[0]], *args[1:])
    )
    trees = world.drafter.propose(world.requests([16] * 4, 8))
    assert rows == [4 * 4] and max(tree.max_depth for tree in trees) > 2
    # With other masks, the comparison with the reference fails.
    world.drafter.head.mask_state = 2 * world.drafter.head.mask_state
    tree = world.drafter.propose(world.requests([16] * 4, 8))[3]
    with pytest.raises(AssertionError):
        world.check([tree], first=3)


def test_roots_are_those_of_the_last_step(tmp_path: Path) -> None:
    """Whose batch has another order than earlier ones."""
    world = World(tmp_path)
    steps = [[(1, 0, 3), (3, 0, 30)], [(3, 30, 31), (1, 3, 5)], [(0, 0, 1), (2, 0, 19)],
             [(0, 0, 1), (1, 5, 6), (2, 18, 19), (3, 31, 32)]]  # fmt: skip
    for step in steps:
        world.commit(step)
    world.check(world.drafter.propose(world.requests([16] * 4, 8)))


def test_requests_that_want_no_forward_get_none(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.commit_all()
    asked = world.requests([8] * 4, 8)
    asked.forward_depths[:] = [0, 2, 0, 1]
    trees = world.drafter.propose(asked)
    assert [tree.max_depth for tree in trees] == [0, 2, 0, 1]
    world.check(trees)


def test_drafts_never_stop_an_engine(tmp_path: Path) -> None:
    """Warm-up drafts for requests that nothing was committed for; prompts hold tokens past the
    vocabulary; texts reach the model's end."""
    world = World(tmp_path, max_model_len=34)
    world.cache.key.zero_(), world.cache.value.zero_()
    asked = world.requests([8] * 4, 8)
    for change in (None, 0, VOCAB + 1):
        for tokens in world.tokens if change else ():
            tokens[:-1:3] = change
        if change is not None:
            world.commit_all()
        trees = world.drafter.propose(asked)
        assert all(tree.fault(VOCAB) is None and tree.num_nodes for tree in trees)
    assert trees[-1].num_nodes == 8
