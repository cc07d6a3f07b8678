# SPDX-License-Identifier: Apache-2.0
"""Training meets what drafting meets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.methods.eagle3_tree.published import SMALL
from tests.unit.methods.eagle3_tree.world import LENGTHS, World
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.train.evaluate import (
    SequenceDrafter,
    evaluate_eagle3,
)
from vllm_specplug.methods.eagle3_tree.train.objective import pack, run_anchors
from vllm_specplug.train.features import FeatureSequence
from vllm_specplug.train.level_trees import TreePolicy
from vllm_specplug.train.target import TargetWeights
from vllm_specplug.train.vocabulary import DraftTables


def tables_of(world: World) -> DraftTables:
    return DraftTables(world.embed, world.lm_head, world.ids)


def sequence_of(world: World, r: int, prompt_len: int = 1) -> FeatureSequence:
    tokens = world.tokens[r]
    return FeatureSequence(
        tokens, prompt_len, torch.cat(world.aux[r], -1), torch.randn(len(tokens), 16), "kind/x"
    )


@pytest.mark.parametrize("layout", ["specforge", "specforge_eagle31", "speculators"])
def test_runs_of_an_anchor_are_drafts_along_the_answer(layout: str, tmp_path: Path) -> None:
    """Run k equals the head of the equations as a chain along the next k tokens."""
    world = World(tmp_path, layout)
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


def test_simulated_trees_are_those_that_serving_drafts(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.commit_all()
    served = world.drafter.propose(world.requests([16] * 4, [8] * 4))
    head, _ = load_eagle3_head(tmp_path, SMALL)
    for r, n in enumerate(LENGTHS):
        drafter = SequenceDrafter(head, sequence_of(world, r), tables_of(world))
        tree = drafter.draft(n - 1, TreePolicy(16, depth=4))
        assert tree.token_ids.tolist() == served[r].token_ids.tolist()
        assert tree.parent_indices.tolist() == served[r].parent_indices.tolist()


def test_acceptance_counts_what_the_answer_follows(tmp_path: Path) -> None:
    world = World(tmp_path)
    sequence = sequence_of(world, 3)
    head, _ = load_eagle3_head(tmp_path, SMALL)
    whole = TreePolicy(4000, depth=2, width=12, expand_width=12)
    report = evaluate_eagle3(head, [sequence], tables_of(world), {"whole": whole})
    # A tree of the whole draft vocabulary accepts exactly the tokens that are in it.
    known, tokens = set(world.ids.tolist()), sequence.tokens.tolist()
    anchor, rounds, accepted = 1, 0, 0
    while anchor + 1 < len(tokens):
        count = 0
        while (
            count < 2 and anchor + 1 + count < len(tokens) and tokens[anchor + 1 + count] in known
        ):
            count += 1
        anchor, rounds, accepted = anchor + count + 1, rounds + 1, accepted + count
    counts = report.total["whole"]
    assert (counts.rounds, counts.accepted) == (rounds, accepted)


@pytest.mark.parametrize("save_lm_head", [True, False])
def test_the_lm_head_is_written_unless_left_out(save_lm_head: bool, make_job) -> None:
    job = make_job("eagle3", total_steps=1, save_lm_head=save_lm_head)
    job.train()
    extras = load_eagle3_head(job.head, TargetWeights(job.run.target).config)[1]
    assert (extras.lm_head is None) != save_lm_head
