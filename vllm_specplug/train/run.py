# SPDX-License-Identifier: Apache-2.0
"""What whole training runs share: opening the data, the loop with its exports, the facts of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from accelerate import Accelerator

from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.loop import (
    Log,
    LoopOptions,
    OnStep,
    head_identity,
    progress_facts,
    rounded,
    run_loop,
)
from vllm_specplug.train.order import evenly_spread
from vllm_specplug.train.provenance import write_provenance
from vllm_specplug.train.target import TargetTables, TargetWeights
from vllm_specplug.train.trainer import Trainer
from vllm_specplug.train.vocabulary import saved_vocabulary, vocabulary_coverage
from vllm_specplug.train.walk import AcceptanceReport

VOCABULARY_NAME = "draft_ids.pt"

S = TypeVar("S", bound=FeatureStore)


class Store(Protocol):
    """Features of any kind."""

    @property
    def num_answer_tokens(self) -> int: ...

    def sources(self) -> dict[str, int]: ...

    def __len__(self) -> int: ...


class Run(Protocol):
    """What a run reads."""

    @property
    def target(self) -> str: ...

    @property
    def features(self) -> str: ...

    @property
    def heldout(self) -> str: ...

    @property
    def eval_sequences(self) -> int: ...


@dataclass(frozen=True)
class Training(Generic[S]):
    """The data and the target of a run, before it has a head. `held` are the sequences of its
    evaluation."""

    loop: LoopOptions
    accelerator: Accelerator
    store: S
    held: list[Any]
    weights: TargetWeights
    tables: TargetTables

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return int(self.weights.config["vocab_size"])

    def draft_ids(self, size: int, vocab_from: str = "") -> torch.Tensor:
        """Target token of each draft id, int64 [V']: those of the run that is resumed, else of the
        head `vocab_from`, else the `size` most frequent ones and the end-of-turn tokens."""
        return saved_vocabulary(
            Path(self.loop.out) / VOCABULARY_NAME,
            self.loop.resume,
            vocab_from,
            self.store,
            size,
            self.vocab_size,
            self.weights.end_token_ids,
            keep=self.accelerator.is_main_process,
        )

    def data_facts(self, ids: torch.Tensor) -> dict[str, Any]:
        """What was trained on, for provenance.json; the head drafts the tokens `ids`."""
        return data_facts(self.store, vocabulary_coverage(self.store, ids))


def open_training(run: Run, loop: LoopOptions, kind: type[S], seed: int) -> Training[S]:
    """Reads what a run needs, its features as stores of a `kind`, and seeds torch.

    Raises:
        ValueError: where a new run would write over a saved one, and for what cannot be read.
    """
    loop.refuse_overwriting()
    accelerator = Accelerator(mixed_precision="bf16")
    store, heldout = open_features(run.features, run.heldout, kind)
    weights = TargetWeights(run.target)
    width, largest = getattr(run, "intermediate_size", 0), weights.config["intermediate_size"]
    if width > largest and not getattr(run, "init_from", ""):
        raise ValueError(
            f"--intermediate-size {width}, legal: up to {largest}, the target's, whose first rows "
            "the head starts from; lower it"
        )
    torch.manual_seed(seed)
    held = evenly_spread(heldout, run.eval_sequences)
    return Training(loop, accelerator, store, held, weights, weights.tables())


def open_features(features: str, heldout: str, kind: type[S]) -> tuple[S, S]:
    """Training and held-out features.

    Raises:
        ValueError: when they do not hold the same layers.
    """
    store, held = kind(features), kind(heldout)
    if store.target_layer_ids != held.target_layer_ids:
        raise ValueError(
            f"features hold layers {store.target_layer_ids}, held-out features "
            f"{held.target_layer_ids}; make both with the same layers"
        )
    return store, held


def layer_scales(store: FeatureStore, layers: int, sequences: int = 32) -> list[float]:
    """Root mean square of every selected layer's output over a sample. The first token is left out:
    language models keep an outlier state there."""
    rows = torch.cat([sample.aux[1:].float() for sample in evenly_spread(store, sequences)])
    return [float(part.pow(2).mean().sqrt()) for part in rows.chunk(layers, dim=-1)]


def origin(init_from: str) -> dict[str, Any] | None:
    """The head that a run started from, for provenance.json; None where it started without."""
    return head_identity(init_from) if init_from else None


def data_facts(store: Store, coverage: float | None = None) -> dict[str, Any]:
    """What was trained on, for provenance.json."""
    covered = {} if coverage is None else {"draft_vocabulary_coverage": round(coverage, 5)}
    return {
        "sequences": len(store),
        "by_source": store.sources(),
        "answer_tokens": store.num_answer_tokens,
        **covered,
    }


def heldout_facts(report: AcceptanceReport, sequences: int) -> dict[str, Any]:
    """Reached acceptance, for provenance.json."""
    slots = {"slot_accuracy": [round(v, 3) for v in report.slot_accuracy()]}
    return {
        "sequences": sequences,
        "mean_acceptance_length": rounded(report.lengths()),
        "mean_acceptance_length_by_source": {
            source: rounded(values) for source, values in report.lengths_by_source().items()
        },
        "rounds_reaching_depth": {
            name: [
                round(counts.share_reaching(depth), 3)
                for depth in range(1, max(counts.by_length) + 1)
            ]
            for name, counts in report.total.items()
        },
        **(slots if len(report.hits) else {}),
    }


def run_head(
    trainer: Trainer,
    loop: LoopOptions,
    *,
    target: str,
    shape: dict[str, Any],
    data: dict[str, Any],
    init_from: Any,
    heldout: int,
    evaluate: Callable[[], AcceptanceReport],
    save: Callable[[Path], Any],
    log: Log = print,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Resumes if asked to, trains, and exports the head into `loop.out`/head on the way and at the
    end; returns the facts in its provenance.json.

    Args:
        data: `data_facts`. init_from: what the run started from (`origin`).
        heldout: sequences of the evaluation.
        evaluate: held-out acceptance of the averaged weights.
        save: writes their checkpoint into a folder.
    """
    if loop.resume:
        trainer.resume(loop.out)
    count = sum(p.numel() for p in trainer.module.parameters())
    coverage = data.get("draft_vocabulary_coverage")
    log(
        f"{data['sequences']} sequences, {data['answer_tokens']} answer tokens, "
        f"{count / 1e6:.1f}M parameters, draft vocabulary {shape['draft_vocab_size']}"
        f"{'' if coverage is None else f' covers {coverage:.2%}'}, from step {trainer.step}"
    )
    facts: dict[str, Any] = {}

    def export() -> None:
        report = evaluate()
        facts.update(
            {
                "target": Path(target).name,
                "shape": shape,
                "init_from": init_from,
                "data": data,
                **progress_facts(trainer),
                "heldout": heldout_facts(report, heldout),
            }
        )
        lengths = "  ".join(f"{k} {v:.3f}" for k, v in report.lengths().items())
        slots = " ".join(f"{v:.2f}" for v in report.slot_accuracy())
        log(
            f"step {trainer.step}: mean acceptance length {lengths}"
            f"{f'; slot accuracy {slots}' if slots else ''}"
        )
        folder = Path(loop.out) / "head"
        save(folder)
        write_provenance(folder, facts)

    run_loop(trainer, loop, export, log, on_step)
    return facts
