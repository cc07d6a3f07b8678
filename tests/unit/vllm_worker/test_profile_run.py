# SPDX-License-Identifier: Apache-2.0
"""What a step with trees allocates on CUDA is there when vLLM measures memory for its caches.

The device is pretended: storages that torch's operators make on the CPU are counted.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm import SamplingParams

from tests.e2e.tiny import HIDDEN, make_head
from tests.unit.drafters import load_drafter, requests_of
from vllm_specplug.drafting import depth_drafter, head_drafter
from vllm_specplug.drafting.caches import TargetCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.kernels.cuda_dispatch import ChosenKernel
from vllm_specplug.methods.block.drafter import BlockHeadDrafter
from vllm_specplug.vllm_v2.cuda_trees import CudaTreeBackend
from vllm_specplug.vllm_worker.cuda_kernels import StepLimits
from vllm_specplug.vllm_worker.target.state_layers import StateLayers
from vllm_specplug.vllm_worker.warmup import _NoTargetCache

CPU = torch.device("cpu")
VOCAB, REQUESTS, NODES, TOKENS, DEPTH = 4096, 12, 7, 128, 4


class LiveBytes(TorchDispatchMode):
    """Bytes of storages made under it that are alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._known:
                    self._known.add(key)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._freed, key, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class _Cache:
    def write(self, *args: Any) -> None: ...

    def block_attention(self, requests: Any, rows: int, causal: bool) -> Any:
        return lambda layer, query, key, value: torch.zeros(query.shape)


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from vllm_specplug.vllm_v2.worker_gpu import GPUModelRunner, TreeGPUModelRunner

    # The kernel that builds trees takes no memory of note.
    monkeypatch.setattr(
        depth_drafter, "best_first_on_device",
        lambda ids, log_probs, requests: DeviceTrees.none(len(requests), NODES, CPU),
    )  # fmt: skip
    monkeypatch.setattr(GPUModelRunner, "profile_run", lambda self, *args, **kwargs: None)
    weights = torch.zeros(VOCAB, HIDDEN)
    drafter = load_drafter(
        BlockHeadDrafter, make_head(tmp_path / "head", VOCAB), None, weights,
        num_nodes=NODES, max_depth=NODES,
    )  # fmt: skip
    made = object.__new__(TreeGPUModelRunner)
    made.__dict__.update(
        vllm_config=SimpleNamespace(
            speculative_config=SimpleNamespace(
                num_speculative_tokens=NODES, aux_layers=drafter.config.target_layer_ids,
                max_step_rows=TOKENS,
            )
        ),
        tree_backend=SimpleNamespace(make_workspace=lambda: None, is_host=False),
        drafter=SimpleNamespace(
            drafter=drafter, options=drafter.options, state_layers=StateLayers()
        ),
        planner=SimpleNamespace(row_budget=SimpleNamespace(max_step_rows=TOKENS)),
        model=SimpleNamespace(compute_logits=lambda hidden: hidden @ weights.T),
        model_config=SimpleNamespace(
            get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: VOCAB
        ),
        num_speculative_steps=NODES, device=CPU, dtype=torch.float32, max_num_tokens=TOKENS,
        max_num_reqs=REQUESTS, max_model_len=64, lora_config=None,
    )  # fmt: skip
    return made


@pytest.fixture
def sampler(cpu_kernels: None) -> Any:
    """vLLM's, with a request in every slot that is sampled with top-k and top-p."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    states = RequestState(REQUESTS, 64, TOKENS, NODES, VOCAB, CPU)
    config: Any = SimpleNamespace(reasoning_config=None)
    made = Sampler(config, REQUESTS, VOCAB, CPU, states)
    params = SamplingParams(temperature=1.0, top_k=VOCAB - 1, top_p=0.9)
    for i in range(REQUESTS):
        states.add_request(str(i), 4, [1] * 8, 7, 40)
        made.add_request(states.req_id_to_index[str(i)], params)
    states.apply_staged_writes()
    made.apply_staged_writes()
    return made


def _largest_step(runner: Any, sampler: Any) -> None:
    """Rows for every request, all sampled with top-k and top-p, and a draft for every request."""
    drafter = runner.drafter.drafter
    rows = REQUESTS * (NODES + 1)
    hidden = torch.zeros(TOKENS, HIDDEN)
    aux = [torch.zeros(TOKENS, HIDDEN) for _ in runner.vllm_config.speculative_config.aux_layers]
    sample_hidden = hidden[torch.arange(rows)]
    logits = runner.model.compute_logits(sample_hidden)
    slots = torch.arange(REQUESTS, dtype=torch.int32)
    places = torch.arange(NODES + 1, dtype=torch.int32).repeat(REQUESTS)
    sampler.sample(
        logits, slots.repeat_interleave(NODES + 1), slots, slots.numpy(), places.long() + 8,
        torch.ones_like(places), places, np.full(REQUESTS, 9 + NODES, np.int32),
    )  # fmt: skip
    drafter.bind_cache(_Cache())
    every = torch.arange(TOKENS)
    drafter.observe(CommittedTokens(aux, every, every % 64, every))
    requests = requests_of([np.arange(9)] * REQUESTS, NODES, 4, DEPTH)
    drafter.propose_on_device(DeviceRequests.of(requests, NODES, CPU))


def test_the_profile_run_takes_what_the_largest_step_takes(runner: Any, sampler: Any) -> None:
    with torch.inference_mode(), LiveBytes() as step:
        _largest_step(runner, sampler)
    with LiveBytes() as profile:
        runner.profile_run()
    assert step.most > REQUESTS * (NODES + 1) * VOCAB * 4
    # A step has a few numbers of each row besides.
    assert 0.999 < profile.most / step.most < 1.2
    assert profile.now < VOCAB * 4


def test_the_profile_run_takes_a_drafters_own_memory(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that is, is in test_drafter_memory.py."""
    with LiveBytes() as without:
        runner.profile_run()
    own = lambda state: torch.empty(1 << 20, dtype=torch.uint8)  # noqa: E731
    monkeypatch.setattr("vllm_specplug.vllm_v2.worker_gpu.drafter_memory", own)
    with LiveBytes() as profile:
        runner.profile_run()
    assert profile.most - without.most == 1 << 20 and profile.now == without.now


def test_draft_logits_are_made_in_pieces(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of all requests and depths would be the largest tensor of a step."""
    drafter = runner.drafter.drafter
    drafter.bind_cache(_Cache())
    requests = requests_of([np.array([1, i]) for i in range(REQUESTS)], NODES, 4)
    drafter.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    peaks, found = [], []
    with torch.inference_mode():
        for most in (1 << 25, 6 * VOCAB):
            monkeypatch.setattr(head_drafter, "MAX_LOGITS", most)
            with LiveBytes() as live:
                found.append(drafter.candidates(requests, DEPTH, 4))
            peaks.append(live.most)
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
    assert peaks[0] > REQUESTS * DEPTH * VOCAB * 4 > 2 * peaks[1]


def test_the_profile_run_takes_what_attention_over_the_target_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of several layers: a key and a value of each row, and the outputs."""
    heads, kv_heads, dim, rows, pages = 4, 2, 64, 32, 5
    kernel = ChosenKernel("cute", lambda *args, **features: None, "")
    monkeypatch.setattr(CudaTreeBackend, "choose", lambda self, *shape, **use: kernel)
    monkeypatch.setattr(CudaTreeBackend, "cache_writer", lambda self: lambda *args: None)
    limits = StepLimits(REQUESTS, REQUESTS * rows, rows, 16 * pages)
    backend = CudaTreeBackend("auto", heads, limits, CPU)
    backend.block_size = 16
    table = torch.zeros(REQUESTS, pages, dtype=torch.int32)
    spec = TargetCacheSpec(kv_heads, dim, 1.0)
    cache = torch.zeros(pages, kv_heads, 16, 2 * dim)
    texts = [np.arange(9)] * REQUESTS
    requests = DeviceRequests.of(requests_of(texts, NODES, 4), NODES, CPU)
    query = torch.zeros(REQUESTS * rows, heads, dim)
    owners = torch.arange(REQUESTS).repeat_interleave(rows)
    peaks = []
    for caches in (backend.target_cache(cache, lambda: table, spec), _NoTargetCache(spec)):
        with LiveBytes() as live:
            attend = caches.level_attention(requests, torch.full((REQUESTS,), 8), owners)
            for _ in range(2):
                attend(query)
        peaks.append(live.most)
    step, profile = peaks
    assert 0.95 < profile / step < 1.05


@pytest.mark.parametrize("group", [1, 4, 8])
def test_no_call_of_the_attention_takes_more_than_its_workspace(
    monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    pytest.importorskip("triton")
    from vllm_specplug.kernels import tree_attn_triton as kernel

    monkeypatch.setitem(kernel._LIMITS, CPU, (132, 227 * 1024, 9))
    largest = 0
    for rows in (1, 2, 5, 16, 17, 64, 65, 129, 257):
        for trees in (1, 2, 3, 8, 32, 200):
            for kv_heads in (1, 8, 32):
                config = kernel.config_for(CPU, rows * group, 256, 2)
                tiles = -(-rows * group // config.block_m)
                split = kernel.grid_split_of(trees, tiles * kv_heads, config, 1 << 20, 132, None)
                row = kv_heads * group * (256 * 4 + 4)
                largest = max(largest, split.parts * rows * row)
    limit = kernel.most_workspace_bytes(CPU)
    assert limit / 8 < largest <= limit
