# SPDX-License-Identifier: Apache-2.0
"""A target beside the trainer gives what stored features give, and nothing is stored."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.conftest import LAYERS, greedy_sequences
from tests.unit.train.heads import Job, write_greedy_answers
from vllm_specplug.methods.longspec.train import features as longspec
from vllm_specplug.train.answers import Answer, write_answers
from vllm_specplug.train.features import FeatureStore, read_split, write_shard
from vllm_specplug.train.online import OnlineFeatures
from vllm_specplug.train.target import TargetWeights

HELD = 4
MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def target_float32(target_model: nn.Module, target_folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def answers(target_float32: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_greedy_answers(
        tmp_path_factory.mktemp("answers"), target_float32, 16, shard_size=6
    )


@pytest.fixture
def jobs(
    answers: Path, target_float32: nn.Module, make_job: MakeJob, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], tuple[Job, Job]]:  # fmt: skip
    """`jobs(kind)` is a run over stored features, and the same with the target beside it; both of a
    target in float32."""
    monkeypatch.setattr(TargetWeights, "load", lambda *_: target_float32)
    # Their positions are drawn, with other generators.
    monkeypatch.setattr(longspec, "draw_offset", lambda *_: (4, 7))

    def make(kind: str) -> tuple[Job, Job]:
        folders = tmp_path / "stored", tmp_path / "held"
        parts, _ = read_split(answers, HELD, 0.7)
        for name, aside, rest in parts:
            for folder, rows, offset in ((folders[0], rest, (4, 7)), (folders[1], aside, (0, 0))):
                if rows and kind == "longspec":
                    offsets = [offset] * len(rows)
                    longspec.write_kv_shard(folder / name, rows, offsets, target_float32)
                elif rows:
                    write_shard(folder / name, rows, target_float32, LAYERS)
        stored = make_job(kind, "a").changed(features=folders[0], heldout=folders[1])
        layers = ",".join(map(str, LAYERS)) if kind in ("jetspec", "eagle3") else ""
        online = stored.changed(
            features=None, heldout=None, answers=answers, heldout_answers=HELD, layers=layers,
            out=tmp_path / "b",
        )  # fmt: skip
        return stored, online

    return make


@pytest.mark.parametrize("kind", ["jetspec", "eagle3", "longspec", "gru by KL"])
def test_losses_equal_those_of_stored_features(kind: str, jobs: Any) -> None:
    """The weights stay, so that a difference of rounding does not grow over the steps.

    Other sequences are run together, so states differ in the last bits of float32. Of the steps
    that read no state whose rounding to bfloat16 this changes, the losses are equal.
    """
    frozen = {"learning_rate": 1e-30, "adam_learning_rate": 1e-30}
    stored, online = (job.changed(**frozen) for job in jobs(kind))
    losses, facts = stored.train()
    beside, found = online.train()
    assert len(set(losses)) == 12
    assert beside == pytest.approx(losses, rel=1e-3)
    equal = [a == pytest.approx(b, rel=1e-6) for a, b in zip(beside, losses, strict=True)]
    assert sum(equal) >= 9
    for name in ("sequences", "by_source", "answer_tokens"):
        assert found["data"][name] == facts["data"][name]
    assert found["heldout"] == facts["heldout"] and facts["heldout"]["sequences"] == HELD


def test_a_loss_of_tokens_does_not_run_the_target(
    jobs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetWeights, "load_frozen", lambda *_: pytest.fail("the target runs"))
    stored, online = jobs("gru")
    losses, facts = stored.train()
    beside, found = online.train()
    assert beside == losses and len(set(losses)) == 12
    assert found["heldout"] == facts["heldout"]


def test_a_resumed_run_reads_the_same_sequences(jobs: Any, tmp_path: Path) -> None:
    _, whole = jobs("jetspec")
    losses, _ = whole.train()
    whole.changed(out=tmp_path / "split", max_minutes=1e-9).train()
    split = whole.changed(out=tmp_path / "split", resume=True)
    with pytest.raises(ValueError, match=f"heldout_answers = 2, but the checkpoint has {HELD}"):
        split.changed(heldout_answers=2).train()
    resumed, _ = split.train()
    assert resumed == losses[1:]


def test_only_chosen_sequences_are_run_and_batched(target_float32: nn.Module, tmp_path) -> None:
    sequences = greedy_sequences(target_float32, 5, 1)
    store = OnlineFeatures(tmp_path, sequences, target_float32, LAYERS)
    ran: list[int] = []
    hook = target_float32.model.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda _m, _a, kw: ran.append(len(kw["input_ids"])), with_kwargs=True
    )
    texts = [store.text(index) for index in (4, 0, 2)]
    assert ran == []
    made = store.with_states(texts)
    hook.remove()
    assert ran == [3]
    for text, sequence in zip(texts, made, strict=True):
        assert torch.equal(text.tokens, sequence.tokens)
        alone = store[text.index]
        torch.testing.assert_close(sequence.aux, alone.aux, rtol=0.01, atol=1e-3)
        assert not sequence.aux.is_inference() and not sequence.aux.requires_grad


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heldout": None}, "--features, legal: --features with --heldout, or --answers"),
        ({"answers": Path("x")}, "--features and --heldout and --answers, legal"),
        ({"features": None, "heldout": None}, "no data, legal"),
        ({"layers": "0,2"}, "--layers 0,2, legal: only with --answers"),
        ({"heldout_answers": 3}, "--heldout-answers 3, legal: only with --answers"),
    ],
)
def test_a_run_has_one_kind_of_data(make_job: MakeJob, changes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_job("jetspec", **changes)


def test_answers_that_cannot_be_split_are_named_before_the_target_is_read(
    jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, online = jobs("jetspec")
    monkeypatch.setattr(TargetWeights, "load", lambda *_: pytest.fail("the target was read"))
    with pytest.raises(ValueError, match="holds no finished answers"):
        online.changed(answers=tmp_path).train()
    with pytest.raises(ValueError, match="leaves none to train on"):
        online.changed(heldout_answers=16).train()
    write_answers(tmp_path / "sampled", [Answer("x", (3,), tuple(range(4, 20)), 0.7, True)])
    with pytest.raises(ValueError, match="no greedy answer to hold out"):
        online.changed(answers=tmp_path / "sampled").train()


def test_what_processes_cannot_share_is_refused(jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, online = jobs("jetspec")
    with pytest.raises(ValueError, match="--shard-target with 1 process, legal: several"):
        online.changed(shard_target=True).train()
    with pytest.raises(ValueError, match="--shard-target True, legal: only with --answers"):
        stored.changed(shard_target=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="accelerate's FSDP = true, legal: false"):
        stored.train()


@pytest.mark.parametrize("kind", ["stored", "online"])
def test_a_dry_run_tells_what_is_needed_and_writes_nothing(kind: str, jobs: Any) -> None:
    stored, online = jobs("jetspec")
    dry = online.changed(dry_run=True)
    store = dry.start(dry.run, dry.recipe).training.store
    states = FeatureStore(stored.run.features).shards
    assert store.stored_bytes() == sum(part.aux.nbytes + part.hidden.nbytes for part in states)
    job = (stored if kind == "stored" else online).changed(dry_run=True)
    assert job.train() == ([], {})
    (told,) = job.lines
    beside = r"\nweights of the target on each process: 0\.00 GiB\n"
    assert bool(re.search(beside, told)) == (kind == "online")
    assert ("stored features would take 0.00 GB more" in told) == (kind == "online")
    assert re.search(r"\nthe output folder takes 0\.00 GB", told)
    assert re.search(r"\npeak of each process's host memory: \d+\.\d GiB$", told)
    assert re.search(r"an epoch is about \d+ steps; --total-steps 12 is .* s per step", told)
    assert not job.run.out.exists()


def test_a_run_beside_a_target_without_weights_is_refused(
    jobs: Any, target_folder: Path, tmp_path: Path
) -> None:
    target = tmp_path / "config only"
    target.mkdir()
    (target / "config.json").write_text((target_folder / "config.json").read_text())
    _, online = jobs("jetspec")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        online.changed(target=target, dry_run=True).train()
