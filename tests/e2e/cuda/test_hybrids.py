# SPDX-License-Identifier: Apache-2.0
"""Trees over recurrent states as on CUDA, against plain vLLM."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.e2e import vision
from tests.e2e.cuda import cuda_device, cuda_pairs
from tests.e2e.cuda.cuda_drafts import knowing_levels
from tests.e2e.cuda.cuda_pairs import INTERPRETED
from tests.e2e.hybrids import ROPE_ON_AXES, make_hybrid_target
from tests.e2e.mtp_modules import add_module
from tests.e2e.pair import Counts, Pair, core_of, sequences_of, watch_prefix_hits
from tests.e2e.requests import greedy, seeded
from tests.pretended_graph import is_host_sized
from vllm_specplug.kernels import multiply_experts
from vllm_specplug.methods.block.mlp import FusedExpertMLP
from vllm_specplug.vllm_attention.device_states import DeviceStateStep

pytestmark = [*INTERPRETED, pytest.mark.full, pytest.mark.usefixtures("device_states")]


VOCAB = 300


@cache
def target(family: str | None = None, **config: Any) -> str:
    if family is None:
        family = "Qwen3Next" if cuda_device.has_experts() else "Qwen3_5Text"
    folder = Path(tempfile.mkdtemp(prefix="specplug-hybrid-")) / family
    if family == "Qwen3_5Text":
        vision.have_torchvision()
        config["rope_parameters"] = ROPE_ON_AXES
    return str(make_hybrid_target(folder, family, VOCAB, **config))


def engines(*, ahead: bool, model: str | None = None, **options: Any) -> Pair:
    engine = {
        "model": model or target(),
        "skip_tokenizer_init": True,
        **cuda_device.state_arguments(),
    }
    return cuda_pairs.engines(ahead=ahead, target=engine, **options)


def compared(made: Pair, **options: Any) -> Counts:
    """Greedy and seeded, drafted for and not; one prompt comes in pieces beside requests that
    decode."""
    params = [
        greedy(max_tokens=14, detokenize=False),
        seeded(1, max_tokens=16, detokenize=False),
        greedy(max_tokens=10, detokenize=False),
        seeded(2, max_tokens=9, detokenize=False),
    ]
    params[2].extra_args = {"specplug_tree_budget": 0}
    prompts = [*cuda_pairs.PROMPTS, [4, 3, 2, 1]]
    return made.compare(prompts, params, **options)[1]


@pytest.mark.parametrize("ahead", [False, True])
def test_states_follow_trees(ahead: bool) -> None:
    made = engines(ahead=ahead)
    counts = compared(made, least_accepted=10)
    assert counts.skipping > 1 and (counts.stale > 0) == ahead, counts


def test_text_models_of_qwen3_5() -> None:
    """Their queries, keys and values come from one projection, side by side."""
    compared(engines(ahead=True, model=target("Qwen3_5Text")), least_accepted=10)


def test_a_module_with_experts(tmp_path: Path) -> None:
    """On a GPU its experts run in vLLM's kernel."""
    model = make_hybrid_target(tmp_path, "Qwen3Next", VOCAB)
    with knowing_levels() as drafts:
        made = engines(method="mtp_tree", ahead=True, ngram_topk=0, model=str(add_module(model)))
        compared(made, least_accepted=10)
    mlp = made.runner.drafter.drafter.head.mlp
    assert isinstance(mlp, FusedExpertMLP)
    assert (mlp.multiply is multiply_experts) != cuda_device.ON_GPU
    assert drafts.nodes > 50 and not drafts.differing, drafts


_made, _apply_paths = DeviceStateStep.__init__, DeviceStateStep.apply_paths


def _is_a_line(step: Any, requests: Any, parents: torch.Tensor) -> None:
    before = torch.arange(len(parents), device=parents.device) - 1
    _made(step, requests, torch.where(parents < 0, -1, before))


def _by_place(step: Any, last_rows: torch.Tensor, contexts: Any, lengths: Any) -> None:
    """As many rows as were accepted, but the first ones."""
    _apply_paths(step, step.starts[:-1] + lengths, contexts, lengths)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("__init__", _is_a_line), ("apply_paths", _by_place)],
)
def test_wrong_parents_and_wrong_commits_show(name: str, wrong: Any) -> None:
    made = engines(ahead=True)
    control = patch.object(DeviceStateStep, name, wrong)
    with control, pytest.raises(AssertionError, match="differs"):
        compared(made)


class _NothingRead(TorchDispatchMode):
    """Fails where the host would wait for a device's tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not is_host_sized(func, args, kwargs or {}), func.name()
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def caching() -> Pair:
    made = engines(
        model=target(size=16),
        ahead=True,
        # By default vLLM keeps only the last state of a prompt.
        enable_prefix_caching=True,
        prefix_cache_retention_interval=None,
    )
    assert core_of(made.tree).scheduler.block_size == 32
    return made


def test_prefix_hits_on_generated_text(caching: Pair) -> None:
    """A block that generated text fills keeps the state at its end; vLLM's own kernels carry the
    running one from block to block."""
    hits = watch_prefix_hits(caching.tree)
    prompts = [[(5 * i + n) % 250 + 5 for i in range(n)] for n in (21, 25, 27)]
    params = [
        greedy(max_tokens=14, detokenize=False),
        *(seeded(i, max_tokens=14, detokenize=False) for i in (1, 2)),
    ]
    expected, _ = caching.compare(prompts, params, least_accepted=8)
    hits.clear()
    longer = [[*text[:-1], 11] for text in sequences_of(expected)]
    caching.compare(longer, greedy(max_tokens=8, detokenize=False))
    assert any(count >= 32 for count in hits.values()), hits


def test_nothing_is_read_on_the_host(caching: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_trees", "apply_paths"):
        stock = getattr(DeviceStateStep, name)

        def reading_nothing(*args: Any, stock: Any = stock) -> Any:
            with _NothingRead():
                return stock(*args)

        monkeypatch.setattr(DeviceStateStep, name, reading_nothing)
    caching.compare([[5, 6, 7, 8]], greedy(max_tokens=6, detokenize=False))
