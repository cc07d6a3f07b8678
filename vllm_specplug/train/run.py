# SPDX-License-Identifier: Apache-2.0
"""One training run of any head: open the data, start or resume, train, measure, export."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any
from zlib import crc32

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list

from vllm_specplug.train.features import Features, FeatureStore, chosen_layers, read_split
from vllm_specplug.train.history import HISTORY_NAME, add_to_history
from vllm_specplug.train.online import OnlineFeatures
from vllm_specplug.train.options import (
    REPETITIVE_SHARE,
    NewHeadOptions,
    Recipe,
    RunOptions,
)
from vllm_specplug.train.order import evenly_spread
from vllm_specplug.train.provenance import head_identity, write_provenance
from vllm_specplug.train.saved import read_saved, write_saved
from vllm_specplug.train.target import TargetTables, TargetWeights, forward_dtype, local_bytes
from vllm_specplug.train.trainer import Objective, Trainer
from vllm_specplug.train.vocabulary import (
    VOCABULARY_NAME,
    DraftTables,
    draft_vocabulary,
    vocabulary_coverage,
    vocabulary_of,
)

logger = logging.getLogger(__name__)

Log = Callable[[str], None]
OnStep = Callable[[int, dict[str, float]], None]
# Steps of a dry run.
_MEASURED_STEPS = 3


@dataclass(frozen=True)
class Training:
    """Data and target of a run; `held` are the sequences for evaluation."""

    run: RunOptions
    accelerator: Accelerator
    store: Features
    held: Any
    weights: TargetWeights
    tables: TargetTables

    @property
    def vocab_size(self) -> int:
        """Number of the target's tokens."""
        return int(self.weights.config["vocab_size"])

    def new_width(self, width: int) -> int:
        """Returns the MLP width of a head that starts from the target's layers; 0 means theirs.

        Raises:
            ValueError: for a larger width.
        """
        largest = int(self.weights.config["intermediate_size"])
        if width > largest:
            raise ValueError(
                f"--intermediate-size {width}, legal: up to {largest}, the target's, whose first "
                "rows the head starts from; lower it"
            )
        return width or largest

    def draft_tables(self, ids: torch.Tensor, lm_head: torch.Tensor | None = None) -> DraftTables:
        """Returns tables in `forward_dtype` of a head that drafts the tokens `ids`, with rows of
        the target's LM head or of its own."""
        rows = self.tables.lm_head[ids].contiguous() if lm_head is None else lm_head
        dtype = forward_dtype(self.accelerator.device)
        return DraftTables(self.tables.embed_tokens, rows, ids).to(dtype)


@dataclass(frozen=True, kw_only=True)
class HeadInTraining:
    """A new head of a method, and how to train and save it.

    Args:
        save: writes the checkpoint of the averaged head into a folder.
        shape: shape of the head, for provenance.json.
        origin: more facts about what the run started from, for provenance.json.
        saved_tables: tables of the target that a checkpoint holds too.
    """

    training: Training
    head: torch.nn.Module
    tables: DraftTables
    objective: Objective
    shape: dict[str, Any]
    save: Callable[[Path, Any], Any]
    origin: dict[str, Any] = field(default_factory=dict)
    saved_tables: tuple[torch.Tensor, ...] = ()


def new_accelerator() -> Accelerator:
    """Returns the accelerator of a run. Other processes wait while the main one evaluates.

    Raises:
        ValueError: if accelerate is configured to shard what it trains.
    """
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() in ("true", "1"):
            raise ValueError(
                f"accelerate's {name} = true, legal: false, since each process trains the whole "
                "head and averages its weights; leave it out (--shard-target divides the target)"
            )
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=4))
    # The trainer chooses the dtype of forwards.
    return Accelerator(mixed_precision="no", kwargs_handlers=[patience])


def open_features(
    run: RunOptions,
    recipe: Recipe,
    stored: type[FeatureStore] = FeatureStore,
    online: type[OnlineFeatures] = OnlineFeatures,
) -> Training:
    """Opens a run over stored features, or over answers with the target beside the trainer.

    Args:
        stored, online: the stores of a method.

    Raises:
        ValueError: if training and held-out features do not hold the same layers of this target, or
            there are no answers.
    """
    accelerator, weights = new_accelerator(), TargetWeights(run.target)
    store: Features
    held: Features
    if run.answers is not None:
        store, held = _open_answers(run, run.answers, online, accelerator, weights)
    else:
        assert run.features is not None and run.heldout is not None
        store, held = stored(run.features), stored(run.heldout)
        if store.target_layer_ids != held.target_layer_ids:
            raise ValueError(
                f"features hold layers {store.target_layer_ids}, held-out features "
                f"{held.target_layer_ids}; make both with the same layers"
            )
        own, theirs = store.hidden_size, int(weights.config["hidden_size"])
        if own != theirs:
            raise ValueError(
                f"features hold states of width {own}, those of the target have {theirs}; make "
                "features with this target"
            )
    torch.manual_seed(recipe.seed)
    tables = weights.tables()
    for given in (store, held):
        if given.target_crc not in (None, tables.crc):
            raise ValueError(
                f"{given.folder} holds states of another target (target_crc {given.target_crc}, "
                f"not {tables.crc}); make features with this target"
            )
    held = evenly_spread(held, run.eval_sequences)
    return Training(run, accelerator, store, held, weights, tables)


def _open_answers(
    run: RunOptions,
    folder: Path,
    online: type[OnlineFeatures],
    accelerator: Accelerator,
    weights: TargetWeights,
) -> tuple[OnlineFeatures, OnlineFeatures]:
    """Returns the answers to train on and the held-out ones, beside the target."""
    if not online.reads_layers:
        run.refuse_given(("layers",), "only for a head that reads several layers of the target")
    processes = accelerator.num_processes if run.shard_target else 1
    if run.shard_target and processes == 1:
        raise ValueError(
            "--shard-target with 1 process, legal: several, of `accelerate launch`; leave it out"
        )
    parts, remarks = read_split(folder, run.heldout_answers, REPETITIVE_SHARE)
    for line in remarks:
        if accelerator.is_main_process:
            logger.warning(line)
    aside = [sequence for _, held, _ in parts for sequence in held]
    rest = [sequence for *_, trained in parts for sequence in trained]
    if not aside:
        raise ValueError(
            f"{folder} holds no greedy answer to hold out; generate some, since sampled ones tell "
            "less about acceptance"
        )
    model = weights.load_frozen(accelerator.device, processes) if online.runs_target else None
    layers: tuple[int, ...] = ()
    if online.reads_layers:
        layers = chosen_layers(run.layers, int(weights.config["num_hidden_layers"]))
    trained, held = (
        online(folder, part, model, layers, accelerator.device, run.shard_target)
        for part in (rest, aside)
    )
    return trained, held


def draft_ids(training: Training, size: int, vocab_from: str = "") -> torch.Tensor:
    """Returns the target token of each draft id, int64 [V'].

    A resumed run keeps its tokens; otherwise they are the tokens of the head `vocab_from`, or the
    `size` most frequent ones including the end-of-turn tokens.
    """
    saved = _saved_ids(training)
    if saved is not None:
        return saved  # the counts may have changed with more data
    vocab, always = training.vocab_size, training.weights.end_token_ids
    if vocab_from:
        ids = vocabulary_of(vocab_from)
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(
                f"--vocab-from {vocab_from!r} drafts token {int(ids.max())}, legal: 0..{vocab - 1} "
                "(the target's); name a head of this target"
            )
    else:
        ids = draft_vocabulary(training.store, min(size, vocab), vocab, always)
    _save_ids(training, ids)
    return ids


def continued_ids(training: Training, ids: torch.Tensor) -> torch.Tensor:
    """Returns the draft tokens `ids` of the head in `init_from`.

    Raises:
        ValueError: if a resumed run has others.
    """
    saved = _saved_ids(training)
    if saved is not None and not torch.equal(saved, ids):
        path = training.run.out / VOCABULARY_NAME
        raise ValueError(
            f"{path} has other draft tokens than the head in --init-from, which has changed since "
            "the run began; restore that head"
        )
    if saved is None:
        _save_ids(training, ids)
    return ids


def _saved_ids(training: Training) -> torch.Tensor | None:
    path = training.run.out / VOCABULARY_NAME
    if not training.run.resume:
        return None
    ids = read_saved(path)
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"{path} holds no draft tokens; restore it from a copy")
    return ids


def _save_ids(training: Training, ids: torch.Tensor) -> None:
    path = training.run.out / VOCABULARY_NAME
    if training.accelerator.is_main_process and not training.run.dry_run:
        write_saved(ids, path)


def layer_scales(store: Features, sequences: int = 32) -> list[float]:
    """Returns the root mean square of every selected layer's output over a sample. The first token
    is skipped, because its state is an outlier in language models."""
    rows = torch.cat([sample.aux[1:].float() for sample in evenly_spread(store, sequences)])
    parts = rows.chunk(len(store.target_layer_ids), dim=-1)
    return [float(part.pow(2).mean().sqrt()) for part in parts]


def _data_facts(training: Training, ids: torch.Tensor) -> dict[str, Any]:
    """Returns facts about the data of a head that drafts the tokens `ids`, for provenance.json."""
    store = training.store
    coverage = vocabulary_coverage(store, ids, training.vocab_size)
    return {
        "sequences": len(store),
        "by_source": store.sources(),
        "answer_tokens": store.num_answer_tokens,
        "draft_vocabulary_coverage": round(coverage, 5),
    }


def _silent(_line: str) -> None:
    pass


def train_head(
    start: Callable[[Any, Any], HeadInTraining],
    run: RunOptions,
    recipe: Recipe,
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Trains the head of `start(run, recipe)` until `total_steps` or `max_minutes`.

    Writes into `run.out` the state for `resume`, and at every evaluation and at the end
    history.jsonl with a plot, and `head/` (config.json, model.safetensors, provenance.json).
    Returns the facts of provenance.json.

    Raises:
        ValueError: if a new run would overwrite a saved one, and for data or heads that do not
            fit.
    """
    if not run.dry_run:
        run.refuse_overwriting()
    made = start(run, recipe)
    training = made.training
    if not training.accelerator.is_main_process:
        log = _silent
    trainer = Trainer(
        made.head, made.tables, training.store, made.objective, training.accelerator,
        _fixed(training),
    )  # fmt: skip
    if run.dry_run:
        log(estimate(trainer, made.saved_tables))
        return {}
    if run.resume:
        trainer.resume(run.out)
    elif training.accelerator.is_main_process:
        (run.out / HISTORY_NAME).unlink(missing_ok=True)
    store = training.store
    data = _data_facts(training, made.tables.target_ids)
    count = sum(p.numel() for p in made.head.parameters())
    log(
        f"{data['sequences']} sequences, {data['answer_tokens']} answer tokens, "
        f"{count / 1e6:.2f}M parameters, draft vocabulary {len(made.tables.target_ids)} covers "
        f"{data['draft_vocabulary_coverage']:.2%}, from step {trainer.step}"
    )
    origin = dict(made.origin)
    if isinstance(run, NewHeadOptions):
        origin["init_from"] = head_identity(run.init_from) if run.init_from else None
    facts: dict[str, Any] = {}

    def export() -> dict[str, Any] | None:
        if not training.accelerator.is_main_process:
            if isinstance(store, OnlineFeatures) and store.is_sharded:
                for _ in training.held:
                    pass  # the main process reads them too
            return None
        head = trainer.averaged_head()
        measured = made.objective.measure(head, training.held, trainer.tables)
        facts.update(
            {
                "target": run.target.name,
                "shape": made.shape,
                **origin,
                "data": data,
                "recipes": trainer.recipes,
                "progress": {
                    "step": trainer.step,
                    "epochs": trainer.order.epoch,
                    "slots_trained": trainer.slots_trained,
                    "training_minutes": round(trainer.seconds / 60, 1),
                },
                "heldout": {"sequences": len(training.held), **measured.facts()},
            }
        )
        log(f"step {trainer.step}: {measured.summary()}")
        made.save(run.out / "head", head)
        write_provenance(run.out / "head", facts)
        return {"step": trainer.step, "loss": trainer.loss_average, "curves": measured.curves()}

    run_loop(trainer, run, export, log, on_step)
    return facts


def _fixed(training: Training) -> dict[str, Any]:
    """Returns what a resumed run must not change, because its head and its held-out answers depend
    on it."""
    run, store = training.run, training.store
    fixed: dict[str, Any] = {}
    if isinstance(run, NewHeadOptions):
        # The shape of that head has no place in the saved state.
        fixed["init_from"] = run.init_from
    fixed["target_layer_ids"] = list(store.target_layer_ids)
    if run.answers is not None:
        fixed["heldout_answers"] = run.heldout_answers
    # Training data may grow at their end.
    fixed["first_sequence"] = _sequence_identity(store)
    held = training.held.dataset
    fixed["first_heldout_sequence"] = _sequence_identity(held)
    fixed["heldout_sequences"] = len(held)
    return fixed


def _sequence_identity(store: Any) -> str:
    tokens = store.text(0).tokens
    return f"{len(tokens)} tokens, CRC {crc32(tokens.numpy().tobytes()):08x}"


def estimate(trainer: Trainer, saved_tables: Sequence[torch.Tensor]) -> str:
    """Returns steps per epoch, time, disk and memory of a run as text, measured with a few steps,
    which are not kept; for `saved_tables` see `HeadInTraining`."""
    seconds = []
    for _ in range(_MEASURED_STEPS):
        before = trainer.seconds
        trainer.train_step()
        seconds.append(trainer.seconds - before)
    # The first step compiles kernels.
    step, total = min(seconds[1:]), trainer.options.total_steps
    drawn = trainer.order.epoch * trainer.order.size + trainer.order.cursor
    epoch = max(1, round(len(trainer.store) * trainer.step / max(1, drawn)))
    lines = [
        f"an epoch is about {epoch:,} steps; --total-steps {total:,} is {total / epoch:.1f} epochs "
        f"and takes {step * total / 60:,.0f} minutes, {step:.2f} s per step"
    ]
    saved = trainer.saved_bytes(saved_tables) / 1e9
    disk = f"the output folder takes {saved:.2f} GB, and twice as much while the run saves"
    if isinstance(trainer.store, OnlineFeatures):
        stored, model = trainer.store.stored_bytes(), trainer.store.model
        disk += f"; stored features would take {stored / 1e9:.2f} GB more"
        weights = 0 if model is None else local_bytes(model)
        lines.append(f"weights of the target on each process: {weights / 2**30:.2f} GiB")
    lines.append(disk)
    if trainer.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(trainer.device)
        lines.append(f"peak of device memory: {peak / 2**30:.1f} GiB")
    # Kibibytes, as Linux counts.
    peak = getrusage(RUSAGE_SELF).ru_maxrss
    lines.append(f"peak of each process's host memory: {peak / 2**20:.1f} GiB")
    return "\n".join(lines)


def run_loop(
    trainer: Trainer,
    run: RunOptions,
    export: Callable[[], dict[str, Any] | None],
    log: Log,
    on_step: OnStep | None,
) -> None:
    """Trains until `total_steps` or `max_minutes`; exports and saves regularly and at the end.

    Args:
        export: returns the row of the history, on the main process.
    """
    total = trainer.options.total_steps
    main = trainer.accelerator.is_main_process
    began = time.monotonic()
    if trainer.step >= total:
        # The head or the history may be older than the last state.
        measured = export()
        if measured is not None:
            add_to_history(run.out, measured)
    while trainer.step < total:
        numbers = trainer.train_step()
        if on_step is not None:
            on_step(trainer.step, numbers)
        if trainer.step % run.log_every == 0 and main:
            log(
                f"step {trainer.step}: loss {trainer.loss_average:.4f}, "
                f"{numbers['slots_per_second']:.0f} slots/s, "
                f"{trainer.seconds / 60:.1f} min of steps"
            )
        done = trainer.step >= total
        late = run.max_minutes > 0 and time.monotonic() - began > run.max_minutes * 60
        if run.max_minutes > 0:
            # Their clocks differ, and if one process stopped first, the others would wait for it.
            (late,) = broadcast_object_list([late])
        # In this order: a crash never leaves a head older than the state, and a failing plot
        # prevents neither.
        measured = export() if trainer.step % run.eval_every == 0 or done or late else None
        if trainer.step % run.save_every == 0 or done or late:
            trainer.save(run.out)
        if measured is not None:
            add_to_history(run.out, measured)
        if late:
            log(
                f"stopped at step {trainer.step} after {run.max_minutes} minutes; continue "
                "with --resume"
            )
            break
