# SPDX-License-Identifier: Apache-2.0
"""A test that a method is lossless: a plain engine and one with the method get the same requests.

In float32 every request must get the tokens of plain decoding. Without accepted drafts the
comparison would show nothing, so it fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specplug.registry import get_method
from vllm_specplug.testing.target import make_target

_VOCAB = 40
_NODES = 12
# There are too few blocks for two requests of the longest situation, so some are preempted. Steps
# are shorter than the longest prompts, which are chunked beside decoding requests.
_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "block_size": 32,
    "num_gpu_blocks_override": 14,
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "seed": 0,
}
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
_DRAFTED = "vllm:spec_decode_num_draft_tokens"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


@dataclass(frozen=True)
class SituationResult:
    """Results of one kind of traffic on both engines."""

    name: str
    requests: int
    equal: int
    """Requests with the tokens of plain decoding."""
    drafted: int
    """Verified nodes."""
    accepted: int
    first_difference: str | None
    happened: bool
    """Whether the event of the situation, such as a preemption, happened."""

    @property
    def passed(self) -> bool:
        """Whether all tokens are equal, drafts were accepted and the event happened."""
        return self.equal == self.requests and self.happened and self.accepted > 0


@dataclass(frozen=True)
class LosslessReport:
    """The results of `check_method`."""

    method: str
    situations: tuple[SituationResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every situation passed."""
        return all(situation.passed for situation in self.situations)

    def __str__(self) -> str:
        lines = [f"method {self.method!r}: {'lossless' if self.passed else 'NOT SHOWN LOSSLESS'}"]
        for s in self.situations:
            lines.append(
                f"  {'ok  ' if s.passed else 'FAIL'} {s.name}: {s.equal} of {s.requests} equal, "
                f"{s.accepted} of {s.drafted} drafted tokens accepted"
                + ("" if s.happened else "; the situation did not arise")
                + (f"; {s.first_difference}" if s.first_difference else "")
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Situation:
    name: str
    prompts: list[list[int]]
    params: list[dict[str, Any]]
    happened: Callable[[dict[str, float]], bool] = lambda counters: True


def check_method(
    name: str, *, target: str | Path | None = None, model: str | Path | None = None, **options: Any
) -> LosslessReport:
    """Compares a method with plain vLLM in float32: chunked prompts beside decoding requests,
    preemption, prefix hits on generated text, seeded sampling, penalties.

    It starts two engines and takes about a minute. The method must be registered by an entry point,
    because the engines are other processes.

    Args:
        target: folder of the target; None makes a tiny random Llama.
        model: folder of the draft head for `target`, for methods that need one.
        options: more keys of --speculative-config.

    Returns:
        The results; print them, and assert `passed`.

    Raises:
        ValueError: for an unknown method or a missing head.
        RuntimeError: if an engine does not start or dies, with the end of its log.
    """
    method = get_method(name)
    if method.needs_head and (model is None or target is None):
        raise ValueError(f"method {name!r} needs a head: give target= and model= that fit together")
    # With a fixed budget, drafts do not depend on time.
    speculative = {
        "method": name,
        "num_speculative_tokens": _NODES,
        "tree_budget": _NODES,
        **({} if model is None else {"model": str(model)}),
        **options,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        chosen = Path(target) if target is not None else make_target(path / "target", _VOCAB)
        vocab = json.loads((chosen / "config.json").read_text())["vocab_size"]
        situations = _situations(vocab)
        plain, tree = _run(path, chosen, situations, speculative)
    results = tuple(_compare(s, a, b) for s, a, b in zip(situations, plain, tree, strict=True))
    return LosslessReport(name, results)


def _situations(vocab: int) -> list[_Situation]:
    # Text with repetitions and variations, so that lookups have matches.
    words = [[(7 * w + 3 * i) % (vocab - 4) + 4 for i in range(4)] for w in range(5)]

    def prompt(seed: int, length: int) -> list[int]:
        chosen = [words[(seed + k * (1 + seed % 3)) % len(words)] for k in range(length // 4)]
        return [token for word in chosen for token in word]

    greedy = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    mixed = [prompt(i, (12, 80, 140, 24)[i % 4]) for i in range(10)]
    long = [prompt(20 + i, 60) for i in range(6)]
    # Prompts are longer than two blocks: later requests hit the first one's blocks.
    shared = prompt(60, 64)
    alike = [shared + prompt(61 + i, 16) for i in range(6)]
    short = [prompt(40 + i, 12) for i in range(6)]
    sampled = [
        {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": i, "max_tokens": 32}
        for i in range(6)
    ]
    edits: list[dict[str, Any]] = [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 0.6, "frequency_penalty": 0.3},
        {"min_tokens": 30},
        {"allowed_token_ids": list(range(0, vocab, 2))},
        {"stop_token_ids": [5, 9]},
        {},
    ]
    return [
        _Situation("prompts in chunks beside decoding requests", mixed, [greedy] * 10),
        _Situation(
            "preemption",
            long,
            [{**greedy, "max_tokens": 120}] * 6,
            lambda counters: counters.get("vllm:num_preemptions", 0) > 0,
        ),
        _Situation(
            "prefix hits",
            alike,
            [{**greedy, "max_tokens": 24}] * 6,
            lambda counters: counters.get("vllm:prefix_cache_hits", 0) > 0,
        ),
        _Situation("seeded sampling", short, sampled),
        _Situation("penalties and limits", short, [{**greedy, **edit} for edit in edits]),
    ]


def _run(
    folder: Path, target: Path, situations: Sequence[_Situation], speculative: dict[str, Any]
) -> list[list[dict[str, Any]]]:
    """Returns the results of the plain engine and of the one with the method, by situation."""
    job, result, log = (folder / name for name in ("job.json", "result.json", "log.txt"))
    plain = {**_ENGINE, "model": str(target)}
    engines = [plain, {**plain, "speculative_config": speculative}]
    calls = [{"prompts": s.prompts, "params": s.params} for s in situations]
    job.write_text(json.dumps({"engines": engines, "calls": calls}))
    with log.open("w") as stream:
        status = subprocess.run(
            [sys.executable, "-m", "vllm_specplug.testing.engine_process", str(job), str(result)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
        ).returncode
    if status or not result.is_file():
        raise RuntimeError(f"the engine ended with status {status}:\n{log.read_text()[-4000:]}")
    return json.loads(result.read_text())


def _compare(situation: _Situation, plain: dict[str, Any], tree: dict[str, Any]) -> SituationResult:
    counters = tree["counters"]
    pairs = list(zip(plain["token_ids"], tree["token_ids"], strict=True))
    different = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    first = None
    if different is not None:
        a, b = pairs[different]
        at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        first = f"request {different} differs at token {at}: {a[at : at + 4]} != {b[at : at + 4]}"
    return SituationResult(
        name=situation.name,
        requests=len(pairs),
        equal=sum(a == b for a, b in pairs),
        drafted=int(counters.get(_DRAFTED, 0)),
        accepted=int(counters.get(_ACCEPTED, 0)),
        first_difference=first,
        happened=situation.happened(counters),
    )
