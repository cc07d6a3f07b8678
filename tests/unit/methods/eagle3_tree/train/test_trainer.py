# SPDX-License-Identifier: Apache-2.0
"""Training meets what drafting meets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.methods.eagle3_tree.published import SMALL
from tests.unit.methods.eagle3_tree.world import World
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.train.objective import (
    Eagle3Objective,
    pack,
    run_anchors,
)
from vllm_specplug.methods.eagle3_tree.train.options import Eagle3Recipe
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.target import TargetWeights
from vllm_specplug.train.vocabulary import DraftTables


def tables_of(world: World) -> DraftTables:
    return DraftTables(world.embed, world.lm_head, world.ids)


def sequence_of(world: World, r: int, prompt_len: int = 1) -> FeatureSequence:
    tokens = world.tokens[r]
    return FeatureSequence(
        tokens, prompt_len, torch.cat(world.aux[r], -1), torch.randn(len(tokens), 16), "kind/x"
    )


NORMS = {f"midlayer.self_attn.{n}_norm.weight": 1 + torch.rand(8) for n in "qk"}


@pytest.mark.parametrize(
    ("layout", "head_changes"),
    [("specforge", {}), ("specforge_eagle31", {}), ("speculators", {"norm_before_fc": True}),
     ("specforge", {"extra": NORMS})],
)  # fmt: skip
def test_runs_of_an_anchor_are_drafts_along_the_answer(
    layout: str, head_changes: dict[str, Any], tmp_path: Path
) -> None:
    """Run k equals the head of the equations as a chain along the next k tokens."""
    world = World(tmp_path, layout, head=head_changes)
    head, _ = load_eagle3_head(tmp_path, SMALL)
    chosen = [torch.tensor([0, 4]), torch.tensor([3, 16, 17]), torch.tensor([29])]
    batch = pack([sequence_of(world, r) for r in (1, 2, 3)], chosen, steps=3)
    with torch.no_grad():
        outputs = run_anchors(head, batch, world.embed)
    column = 0
    for r, rows in zip((1, 2, 3), chosen, strict=True):
        tokens = world.tokens[r]
        for row in rows.tolist():
            for step in range(3):
                inside = row + 2 + step < len(tokens)
                assert bool(batch.inside[step, column]) == inside
                if not inside:
                    continue
                branch = tokens[row + 2 : row + 2 + step].tolist()
                expected = world.reference.along(
                    tokens[: row + 2], branch, world.aux[r], world.embed
                )
                torch.testing.assert_close(outputs[step, column], expected, atol=2e-4, rtol=1e-3)
                assert int(batch.labels[step, column]) == int(tokens[row + 2 + step])
                teacher = batch.teacher[step, column]
                assert teacher.shape == (16,)
            column += 1


def test_heldout_chains_are_the_runs_of_their_anchors(tmp_path: Path) -> None:
    world = World(tmp_path)
    head, _ = load_eagle3_head(tmp_path, SMALL)
    tokens, anchors = world.tokens[3], torch.tensor([5, 20, len(world.tokens[3]) - 2])
    objective = Eagle3Objective(Eagle3Recipe(steps=3))
    with torch.no_grad():
        drafts = objective.drafts(head, sequence_of(world, 3), anchors, tables_of(world))
    found = set()
    for anchor, chain in zip(anchors.tolist(), drafts.tolist(), strict=True):
        for step, draft in enumerate(chain[: len(tokens) - 1 - anchor]):
            branch = tokens[anchor + 1 : anchor + 1 + step].tolist()
            state = world.reference.along(tokens[: anchor + 1], branch, world.aux[3], world.embed)
            assert draft == int((world.lm_head @ state).argmax())
            found.add(draft)
    assert len(found) > 1


@pytest.mark.parametrize("save_lm_head", [True, False])
def test_the_lm_head_is_written_unless_left_out(save_lm_head: bool, make_job) -> None:
    job = make_job("eagle3", total_steps=1, save_lm_head=save_lm_head)
    job.train()
    extras = load_eagle3_head(job.head, TargetWeights(job.run.target).config)[1]
    assert (extras.lm_head is None) != save_lm_head
