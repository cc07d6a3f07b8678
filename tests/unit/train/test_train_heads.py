# SPDX-License-Identifier: Apache-2.0
"""Every head learns, resumes bit for bit, and is left loadable with its provenance."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

from tests.unit.train.heads import KINDS, Job
from vllm_specplug.drafting.checkpoint_files import WEIGHTS_NAME
from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.dels.checkpoint import load_local_head
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head, save_eagle3_head
from vllm_specplug.methods.eagle3_tree.head import Eagle3Head
from vllm_specplug.methods.longspec.checkpoint import load_longspec_head
from vllm_specplug.methods.tokenswift.head import load_heads
from vllm_specplug.train import run as run_module
from vllm_specplug.train.cli import train_app
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.history import add_to_history
from vllm_specplug.train.target import TargetWeights
from vllm_specplug.train.trainer import Trainer
from vllm_specplug.train.vocabulary import vocabulary_of

LOADERS: dict[str, Callable[..., Any]] = {
    "jetspec": load_block_head, "dflash": load_block_head, "dspark": load_dspark_head,
    "eagle3": load_eagle3_head, "longspec": load_longspec_head, "tokenswift": load_heads,
    "gru": load_local_head, "gru by KL": load_local_head, "markov": load_local_head,
}  # fmt: skip
# Of the first steps' loss, how much the last ones may have.
MOST = dict.fromkeys(("dspark", "gru", "gru by KL", "markov"), 0.95)
# Block 4 of a bidirectional head, in proportion to 4 at 8.
COMPLETED = {"jetspec": {"position_gamma": 4.0}, "dflash": {"position_gamma": 2.0}}
MakeJob = Callable[..., Job]


def interrupt_at(limit: int) -> Callable[[int, dict[str, float]], None]:
    def on_step(step: int, _numbers: dict[str, float]) -> None:
        if step == limit:
            raise KeyboardInterrupt

    return on_step


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_the_head_loads_with_its_provenance(kind: str, make_job) -> None:
    job = make_job(kind, total_steps=40)
    losses, facts = job.train()
    assert len(losses) == 40
    assert sum(losses[-5:]) < MOST.get(kind, 0.8) * sum(losses[:5])
    config = json.loads((job.run.target / "config.json").read_text())
    assert LOADERS[kind](job.head, config)
    record = json.loads((job.head / "provenance.json").read_text())
    assert record["progress"] == facts["progress"] and record["progress"]["step"] == 40
    data = record["data"]
    assert (data["sequences"], data["by_source"]) == (12, {"kind0": 6, "kind1": 6})
    assert data["answer_tokens"] == 12 * 24
    assert record["recipes"] == [{"from_step": 0, **asdict(job.recipe), **COMPLETED.get(kind, {})}]
    assert record["versions"]["torch"] == torch.__version__
    assert record["heldout"] == facts["heldout"] and record["heldout"]["sequences"] >= 3
    assert job.lines[-1].startswith("step 40: ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_in_both_dtypes(
    kind: str, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs differ in the dtype of forwards."""
    last = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(run_module, "forward_dtype", Mock(return_value=dtype))
        job = make_job(kind, str(dtype), total_steps=2)
        assert job.trainer().tables.lm_head.dtype == dtype
        losses, facts = job.train()
        assert facts["heldout"]["sequences"] >= 3
        last.append(losses[-1])
    assert last[0] != last[1]
    assert last[0] == pytest.approx(last[1], rel=0.02)


@pytest.mark.parametrize("kind", ["jetspec", "dspark", "eagle3", "longspec", "tokenswift"])
def test_a_command_trains_with_the_options_given_and_shows_progress(
    kind: str, make_job: MakeJob
) -> None:
    """`test_train_cli` has the other commands."""
    job = make_job(kind)
    folders = [
        f"--{name}={getattr(job.run, name)}" for name in ("target", "features", "heldout", "out")
    ]
    options = ["--total-steps=1", "--draft-vocab-size=48", "--weight-decay=0.2", "--no-compile"]
    result = CliRunner().invoke(train_app, [kind, *folders, *options])
    assert result.exit_code == 0, result.output
    assert re.search(r"loss \d.* slots/s .* 100% .* 1/1 .*\n", result.output)
    facts = json.loads((job.head / "provenance.json").read_text())
    (recipe,) = facts["recipes"]
    assert (recipe["total_steps"], recipe["weight_decay"]) == (1, 0.2)
    assert facts["shape"]["draft_vocab_size"] == 48
    again = CliRunner().invoke(train_app, [kind, *folders, *options])
    assert again.exit_code == 2 and "--resume" in again.output


def state(job: Job) -> dict[str, Any]:
    return torch.load(job.run.out / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        # One trainer does it; objectives differ in what they draw.
        *((kind, {}) for kind in ("eagle3", "longspec", "gru by KL")),
        *(
            pytest.param(kind, {}, marks=pytest.mark.full)
            for kind in KINDS
            if kind not in ("eagle3", "longspec", "gru by KL")
        ),
        ("jetspec", {"optimizer": "adamw"}),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    kind: str, options: dict[str, Any], make_job: MakeJob
) -> None:
    whole = make_job(kind, **options)
    losses, _ = whole.train()
    split = make_job(kind, "split", save_every=7, **options)
    with pytest.raises(KeyboardInterrupt):
        split.train(interrupt_at(9))
    with pytest.raises(ValueError, match="exists; pass --resume"):
        split.train()
    resumed, facts = split.changed(resume=True).train()
    # Steps after the save of step 7 are done again.
    assert resumed == losses[7:]
    assert facts["progress"]["step"] == 12
    states = [state(whole), state(split)]
    for part in ("head", "ema"):
        for name, tensor in states[0][part].items():
            assert torch.equal(tensor, states[1][part][name]), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jetspec", {}), ("dflash", {"mask_token_id": 63}), ("dspark", {"mask_token_id": 63}),
        ("eagle3", {}), ("eagle3", {"save_lm_head": False}), ("eagle3", {"speculators": True}),
    ],
)  # fmt: skip
def test_the_estimate_of_a_run_counts_all_that_it_saves(
    kind: str, options: dict[str, Any], make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(kind, **options)
    made = job.start(job.run, job.recipe)
    trainer = Trainer(made.head, made.tables, made.training.store, made.objective)
    trainer.train_step()
    trainer.save(tmp_path)
    made.save(tmp_path, trainer.averaged_head())
    saved = torch.load(tmp_path / "state.pt", weights_only=True), load_file(tmp_path / WEIGHTS_NAME)
    tensors = [part for part in tree_leaves(saved) if isinstance(part, torch.Tensor)]
    size = sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())
    # A mask that reads a token is a vector of the state that is not trained, and not counted.
    fixed = 4 * 32 if "mask_token_id" in options else 0
    assert trainer.saved_bytes(made.saved_tables) == size - fixed


@pytest.mark.parametrize("kind", ["jetspec", "tokenswift"])
def test_a_resumed_run_keeps_its_draft_vocabulary_when_the_data_has_grown(
    kind: str, make_job: MakeJob, tmp_path
) -> None:
    job = make_job(kind, "a", draft_vocab_size=12, total_steps=1)
    features = tmp_path / "features"
    shutil.copytree(job.run.features, features)
    job = job.changed(features=features)
    job.train()
    first = vocabulary_of(str(job.head)).tolist()
    for number in range(2, 8):
        shutil.copytree(job.run.heldout / "shard-00000", features / f"shard-{number:05d}")
    other = job.changed(out=tmp_path / "b")
    other.train()
    assert vocabulary_of(str(other.head)).tolist() != first
    job.changed(resume=True, total_steps=2, draft_vocab_size=11).train()
    assert vocabulary_of(str(job.head)).tolist() == first
    assert 2 in first, "the end-of-turn token is always drafted"


@pytest.mark.parametrize("kind", ["jetspec", "dflash", "dspark", "eagle3", "longspec"])
def test_a_run_starts_from_the_weights_of_a_head(kind: str, make_job: MakeJob) -> None:
    """Shape and draft tokens are that head's, and the origin is on record."""
    first = make_job(kind, "first", total_steps=2, ema_decay=0.0)
    first.train()
    second = make_job(
        kind, "second", init_from=str(first.head), total_steps=1, learning_rate=1e-30,
        adam_learning_rate=1e-30, warmup_steps=0, ema_decay=0.0,
    )  # fmt: skip
    _, facts = second.train()
    assert facts["init_from"]["name"] == "head"
    assert facts["init_from"]["progress"]["step"] == 2
    assert facts["shape"]["draft_vocab_size"] == 48
    assert torch.equal(vocabulary_of(str(first.head)), vocabulary_of(str(second.head)))
    config = TargetWeights(first.run.target).config
    for name, tensor in LOADERS[kind](first.head, config)[0].state_dict().items():
        given = LOADERS[kind](second.head, config)[0].state_dict()[name]
        torch.testing.assert_close(given, tensor, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("jetspec", "num_layers", 3), ("dspark", "num_layers", 3), ("longspec", "window_size", 8),
        ("eagle3", "norm_output", True), ("dflash", "draft_vocab_size", 7),
        ("dspark", "vocab_from", "head"), ("longspec", "intermediate_size", 40),
    ],
)  # fmt: skip
def test_a_run_from_a_head_refuses_another_shape(
    kind: str, name: str, value: Any, make_job: MakeJob
) -> None:
    option = name.replace("_", "-")
    with pytest.raises(ValueError, match=f"--{option} {value}, legal: only without --init-from"):
        make_job(kind, init_from="head", **{name: value})


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_head_of_other_layers_is_refused(kind: str, make_job: MakeJob) -> None:
    first = make_job(kind, "first", total_steps=1)
    first.train()
    assert FeatureStore(first.run.features).target_layer_ids == (0, 2)
    path = first.head / "config.json"
    raw = json.loads(path.read_text())
    part = raw.get("dflash_config", raw)
    assert part["target_layer_ids"] == [0, 2]
    part.update(target_layer_ids=[0, 1])
    raw.pop("eagle_aux_hidden_state_layer_ids", None)
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="init.from .* reads (target )?layers"):
        make_job(kind, "second", init_from=str(first.head)).train()


def test_a_head_of_another_kind_is_not_continued(make_job: MakeJob, tmp_path: Path) -> None:
    first = make_job("eagle3", "first", total_steps=1)
    first.train()
    target = json.loads((first.run.target / "config.json").read_text())
    trained, extras = load_eagle3_head(first.head, target)
    shapes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"windows": (8,)}, "has a sliding window of 8;"),
        ({"windows": (None, None)}, "has 2 layers;"),
        ({"mask_token_id": 7}, "drafts in parallel (mask_token_id 7);"),
        ({"windows": (8, None), "mask_token_id": 7}, "has 2 layers and has a sliding window of 8 "),
    )
    for number, (shape, words) in enumerate(shapes):
        other = Eagle3Head(replace(trained.config, **shape))
        save_eagle3_head(tmp_path / f"head-{number}", other, target_ids=extras.target_ids)
        with pytest.raises(ValueError, match=f"init-from .* {re.escape(words)}.* legal: one layer"):
            make_job("eagle3", "second", init_from=str(tmp_path / f"head-{number}")).train()


def test_a_run_is_not_resumed_with_features_of_other_layers(make_job: MakeJob, tmp_path) -> None:
    job = make_job("eagle3", total_steps=1)
    job.train()
    others = {"features": tmp_path / "f", "heldout": tmp_path / "h"}
    for name, folder in others.items():
        shutil.copytree(getattr(job.run, name), folder)
        for path in folder.rglob("meta.json"):
            meta = json.loads(path.read_text())
            path.write_text(json.dumps({**meta, "target_layer_ids": [1, 2]}))
    with pytest.raises(ValueError, match=r"target_layer_ids = \[1, 2\], .* has \[0, 2\]"):
        job.changed(resume=True, total_steps=2, **others).train()


@pytest.mark.parametrize("kind", ["jetspec", "dspark", "eagle3", "longspec"])
def test_an_mlp_wider_than_the_targets_is_refused(kind: str, make_job: MakeJob) -> None:
    with pytest.raises(ValueError, match="--intermediate-size 64, legal: up to 48"):
        make_job(kind, intermediate_size=64).train()


def test_a_resumed_run_takes_the_new_recipe(make_job: MakeJob) -> None:
    job = make_job("jetspec", total_steps=1)
    job.train()
    recipe = {"weight_decay": 0.1, "adam_beta2": 0.9, "learning_rate": 0.01}
    job.changed(resume=True, total_steps=2, **recipe).train()
    muon, adamw = (o["param_groups"][0] for o in state(job)["optimizers"])
    assert (muon["weight_decay"], muon["base_lr"], adamw["betas"]) == (0.1, 0.01, (0.9, 0.9))


def test_the_held_out_results_of_all_steps_are_kept_and_plotted(make_job: MakeJob) -> None:
    job = make_job("jetspec", total_steps=4, eval_every=2)
    job.run.out.mkdir(parents=True)
    (job.run.out / "history.jsonl").write_text('{"step": 1, "curves": {}}\n')  # of another run
    _, facts = job.train()

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (job.run.out / "history.jsonl").open()]

    first = rows()
    assert [row["step"] for row in first] == [2, 4]
    assert set(first[1]["curves"]) == {"all", "kind0", "kind1"}
    reached = facts["heldout"]["mean_acceptance_length"]["chain"]
    assert first[1]["curves"]["all"] == reached
    assert (job.run.out / "history.png").read_bytes()[1:4] == b"PNG"
    job.changed(resume=True, total_steps=6).train()
    assert [row["step"] for row in rows()] == [2, 4, 6] and rows()[:2] == first
    # A run that goes on from a save at step 2 evaluates next at another one.
    add_to_history(job.run.out, {"step": 3, "curves": first[0]["curves"]})
    assert [row["step"] for row in rows()] == [2, 3]


@pytest.mark.parametrize("failing", ["write_provenance", "add_to_history"])
def test_a_failure_after_the_last_step_is_mended_on_resume(
    failing: str, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job("jetspec", total_steps=2, eval_every=1, save_every=1)

    def fail_at_the_end(*args: Any) -> None:
        if (args[1].get("step") or args[1]["progress"]["step"]) == 2:
            raise OSError("no space left")
        whole(*args)

    whole = getattr(run_module, failing)
    with monkeypatch.context() as patch:
        patch.setattr(run_module, failing, fail_at_the_end)
        with pytest.raises(OSError, match="no space left"):
            job.train()
    # A history that fails prevents neither head nor state.
    losses, facts = job.changed(resume=True).train()
    assert len(losses) == (failing == "write_provenance")
    assert facts["progress"]["step"] == 2
    assert json.loads((job.head / "provenance.json").read_text())["progress"]["step"] == 2
    rows = [json.loads(line) for line in (job.run.out / "history.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    # A head that is older than the state is exported again.
    weights = job.head / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    assert job.changed(resume=True).train()[0] == []
    assert weights.read_bytes() == content


def test_a_run_is_not_resumed_with_other_data_or_trained_with_those_of_another_target(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job("jetspec", total_steps=1)
    job.train()
    with pytest.raises(
        ValueError, match="first_sequence = '.* tokens, CRC .*', but the checkpoint"
    ):
        job.changed(resume=True, total_steps=2, features=job.run.heldout).train()
    with pytest.raises(ValueError, match="first_heldout_sequence = '.* tokens, CRC .*', but the"):
        job.changed(resume=True, total_steps=2, heldout=job.run.features).train()
    more = tmp_path / "more"
    for number in range(2):
        shutil.copytree(job.run.heldout / "shard-00000", more / f"shard-{number:05d}")
    with pytest.raises(ValueError, match="heldout_sequences = 8, but the checkpoint has 4"):
        job.changed(resume=True, total_steps=2, heldout=more).train()
    shutil.copytree(job.run.target, tmp_path / "wider")
    path = tmp_path / "wider" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 64}))
    with pytest.raises(ValueError, match="states of width 32, those of the target have 64"):
        job.changed(target=tmp_path / "wider", out=tmp_path / "other").train()


@pytest.mark.parametrize("kind", ["jetspec", "longspec"])
def test_features_of_another_target_of_the_same_shape_are_refused(
    kind: str, make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(kind, total_steps=1)
    model = TargetWeights(job.run.target).load()
    with torch.no_grad():
        model.get_input_embeddings().weight[3] *= 2
    model.save_pretrained(tmp_path / "tuned")
    tuned = job.changed(target=tmp_path / "tuned")
    with pytest.raises(ValueError, match="holds states of another target .target_crc"):
        tuned.train()
    # Older features do not say of which target they are.
    for name in ("features", "heldout"):
        shutil.copytree(getattr(job.run, name), tmp_path / name)
        for path in (tmp_path / name).glob("*/meta.json"):
            meta = json.loads(path.read_text())
            assert meta.pop("target_crc")
            path.write_text(json.dumps(meta))
    tuned.changed(features=tmp_path / "features", heldout=tmp_path / "heldout").train()


def test_a_draft_vocabulary_of_another_target_is_refused(make_job: MakeJob, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    save_file({"d2t": torch.tensor([60, 63])}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"--vocab-from .* drafts token 64, legal: 0\.\.63"):
        make_job("jetspec", vocab_from=str(folder)).train()


def test_time_limit_saves_and_can_be_continued(make_job: MakeJob) -> None:
    job = make_job("jetspec")
    losses, facts = job.changed(max_minutes=1e-9).train()
    assert len(losses) == facts["progress"]["step"] == 1
    (job.run.out / "state.pt").rename(job.run.out / "kept.pt")
    with pytest.raises(ValueError, match="head exists, without a state to resume; name another"):
        job.train()
    (job.run.out / "kept.pt").rename(job.run.out / "state.pt")
    more, _ = job.changed(resume=True, total_steps=3).train()
    assert len(more) == 2
    _, facts = job.changed(resume=True, total_steps=5, position_gamma=2.0).train()
    recipes = [(r["from_step"], r["position_gamma"]) for r in facts["recipes"]]
    assert recipes == [(0, 4.0), (1, 4.0), (3, 2.0)]


def test_schedule_warms_up_holds_and_decays_and_can_be_extended(make_job: MakeJob) -> None:
    recipe = make_job("jetspec", total_steps=100, warmup_steps=10, decay_share=0.2).recipe
    scales = [recipe.lr_scale(step) for step in range(100)]
    assert scales[0] == 0.1
    assert scales[9:80] == [1.0] * 71
    assert scales[90] == pytest.approx(0.5)
    assert 0 < scales[99] < 0.1
    longer = replace(recipe, total_steps=200)
    assert [longer.lr_scale(s) for s in range(80)] == scales[:80]
    cosine = replace(recipe, schedule="cosine")
    assert [cosine.lr_scale(s) for s in (0, 9, 10)] == [0.1, 1.0, 1.0]
    assert cosine.lr_scale(55) == pytest.approx(0.5) and cosine.lr_scale(100) == pytest.approx(0)


def test_accumulated_batches_make_one_step(make_job: MakeJob) -> None:
    """The gradient is the mean over the batches, each with anchors of its own."""
    gradients, losses = [], []
    for parts in (1, 2):
        job = make_job("jetspec", gradient_accumulation=parts)
        trainer, whole = job.trainer(), job.trainer()
        drawn: list[Any] = []
        for trainer.part in range(parts):
            loss = trainer.step_loss()
            (loss.total / parts).backward()
            drawn.append(float(loss.reported.detach()))
        gradients.append({n: p.grad.clone() for n, p in trainer.head.named_parameters()})
        trainer.head.zero_grad()
        losses.append(drawn)
        steps: list[Any] = []
        for optimizer in whole.optimizers:
            optimizer.optimizer.register_step_pre_hook(lambda *_: steps.append(1))  # noqa: B023
        numbers = whole.train_step()
        assert numbers["loss"] == pytest.approx(sum(drawn) / parts)
        assert len(steps) == len(whole.optimizers)
    assert losses[1][0] == losses[0][0] != losses[1][1]
    assert any(not torch.equal(gradients[0][n], gradients[1][n]) for n in gradients[0])


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("jetspec", "optimizer", "sgd"),
        ("jetspec", "schedule", "step"),
        ("eagle3", "loss", "kl"),
        ("eagle3", "step_decay", 0.0),
        ("jetspec", "learning_rate", float("nan")),
        ("jetspec", "grad_clip", 0.0),
        ("gru", "temperature", 0.0),
    ],
)
def test_bad_options_are_named(kind: str, name: str, value: Any, make_job: MakeJob) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*legal"):
        make_job(kind, **{name: value})
