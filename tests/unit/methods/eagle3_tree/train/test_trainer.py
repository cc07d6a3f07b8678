# SPDX-License-Identifier: Apache-2.0
"""Training meets what drafting meets; a run learns, resumes bit for bit and leaves a head."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.methods.eagle3_tree.world import LENGTHS, World
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.train.evaluate import (
    SequenceDrafter,
    evaluate_eagle3,
)
from vllm_specplug.methods.eagle3_tree.train.run import Eagle3Run, train_eagle3
from vllm_specplug.methods.eagle3_tree.train.trainer import Eagle3Recipe, pack, run_anchors
from vllm_specplug.train.features import FeatureSequence, FeatureStore
from vllm_specplug.train.level_trees import TreePolicy
from vllm_specplug.train.loop import LoopOptions
from vllm_specplug.train.target import TargetWeights

RECIPE = Eagle3Recipe(
    total_steps=12, warmup_steps=2, anchors_per_step=48, anchors_per_sequence=16, steps=3,
    learning_rate=5e-3,
)  # fmt: skip


def sequence_of(world: World, r: int, prompt_len: int = 1) -> FeatureSequence:
    tokens = world.tokens[r]
    return FeatureSequence(
        tokens, prompt_len, torch.cat(world.aux[r], -1), torch.randn(len(tokens), 16), "kind/x"
    )


@pytest.mark.parametrize("layout", ["specforge", "specforge_eagle31", "speculators"])
def test_runs_of_an_anchor_are_drafts_along_the_answer(layout: str, tmp_path: Path) -> None:
    """Run k equals the head of the equations as a chain along the next k tokens."""
    world = World(tmp_path, layout)
    head, _ = load_eagle3_head(tmp_path, {"hidden_size": 16, "vocab_size": 40,
                                          "num_hidden_layers": 8})  # fmt: skip
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
    head, _ = load_eagle3_head(tmp_path, {"hidden_size": 16, "vocab_size": 40,
                                          "num_hidden_layers": 8})  # fmt: skip
    for r, n in enumerate(LENGTHS):
        drafter = SequenceDrafter(
            head, sequence_of(world, r), world.embed, world.lm_head, world.ids
        )
        tree = drafter.draft(n - 1, TreePolicy(16, depth=4))
        assert tree.token_ids.tolist() == served[r].token_ids.tolist()
        assert tree.parent_indices.tolist() == served[r].parent_indices.tolist()


def test_acceptance_counts_what_the_answer_follows(tmp_path: Path) -> None:
    world = World(tmp_path)
    sequence = sequence_of(world, 3)
    head, _ = load_eagle3_head(tmp_path, {"hidden_size": 16, "vocab_size": 40,
                                          "num_hidden_layers": 8})  # fmt: skip
    whole = TreePolicy(4000, depth=2, width=12, expand_width=12)
    report = evaluate_eagle3(
        head, [sequence], world.embed, world.lm_head, world.ids, {"whole": whole}
    )
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


@pytest.fixture
def run(target_folder: Path, feature_folders: tuple[Path, Path]) -> Eagle3Run:
    train, held = feature_folders
    return Eagle3Run(str(target_folder), str(train), str(held), draft_vocab_size=48)


def loop_in(folder: Path, **changes: bool) -> LoopOptions:
    return LoopOptions(out=str(folder), eval_every=1000, save_every=1000, **changes)


def test_the_loss_falls_and_the_head_loads(run: Eagle3Run, tmp_path: Path) -> None:
    losses: list[float] = []
    facts = train_eagle3(
        run, replace(RECIPE, total_steps=40), loop_in(tmp_path), lambda text: None,
        lambda step, numbers: losses.append(numbers["loss"]),
    )  # fmt: skip
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    config = TargetWeights(run.target).config
    head, extras = load_eagle3_head(tmp_path / "head", config)
    assert head.config.target_layer_ids == FeatureStore(run.features).target_layer_ids
    assert extras.lm_head is not None and len(extras.lm_head) == 48
    assert facts["heldout"]["mean_acceptance_length"]["best_first/8"] >= 1.0


def test_a_resumed_run_continues_bit_for_bit(run: Eagle3Run, tmp_path: Path) -> None:
    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "head" / "model.safetensors")

    quiet = lambda text: None  # noqa: E731
    train_eagle3(run, RECIPE, loop_in(tmp_path / "whole"), quiet)
    # The rate's constant part does not depend on the number of steps.
    flat = replace(RECIPE, decay_share=0.0)
    train_eagle3(run, replace(flat, total_steps=6), loop_in(tmp_path / "cut"), quiet)
    with pytest.raises(ValueError, match="--resume"):
        train_eagle3(run, RECIPE, loop_in(tmp_path / "cut"), quiet)
    train_eagle3(run, RECIPE, loop_in(tmp_path / "cut", resume=True), quiet)
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "cut")[name]), name


def test_a_head_is_continued_and_refused_for_other_layers(run: Eagle3Run, tmp_path: Path) -> None:
    train_eagle3(run, replace(RECIPE, total_steps=2), loop_in(tmp_path / "a"), lambda text: None)
    again = replace(run, init_from=str(tmp_path / "a" / "head"))
    facts = train_eagle3(
        again, replace(RECIPE, total_steps=1), loop_in(tmp_path / "b"), lambda text: None
    )
    assert facts["init_from"]["progress"]["step"] == 2
    assert facts["shape"]["draft_vocab_size"] == 48
    config = tmp_path / "a" / "head" / "config.json"
    assert FeatureStore(run.features).target_layer_ids == (0, 2)
    other = {"target_layer_ids": [0, 1], "eagle_aux_hidden_state_layer_ids": None}
    config.write_text(json.dumps({**json.loads(config.read_text()), **other}))
    with pytest.raises(ValueError, match="--init-from"):
        train_eagle3(again, RECIPE, loop_in(tmp_path / "c"), lambda text: None)
