# SPDX-License-Identifier: Apache-2.0
"""Trees start on a CPU whose memory is in use, where vLLM's default share would be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.cpu_resource_utils import MemoryNodeInfo

from vllm_specplug.engine import cpu_memory

pytestmark = pytest.mark.usefixtures("installed")

GIB = 1 << 30
NGRAMS = {"method": "ngram_tree", "num_speculative_tokens": 8}


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch, target: Path) -> Any:
    """The share of the memory that a worker takes, by GiB free of 24 and the engine's arguments."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)

    def of(free: float, **arguments: Any) -> float:
        memory = MemoryNodeInfo(total_memory=24 * GIB, available_memory=int(free * GIB))
        monkeypatch.setattr(cpu_memory, "get_memory_node_info", lambda node: memory)
        arguments = {"speculative_config": NGRAMS, **arguments}
        config = EngineArgs(model=str(target), skip_tokenizer_init=True, **arguments)
        return config.create_engine_config().cache_config.gpu_memory_utilization

    return of


def test_workers_take_three_quarters_of_what_is_free_where_the_default_does_not_fit(
    share: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        cpu_memory._logger, "warning", lambda text, *values: messages.append(text % values)
    )
    assert share(8) == pytest.approx(6 / 24)
    [said] = messages
    assert "VLLM_CPU_KVCACHE_SPACE" in said
    assert "8.0 GiB are free" in said and "6.0 GiB instead" in said
    # Free now, and less once vLLM's other processes run.
    assert share(22.2) == pytest.approx(22.2 * 0.75 / 24, rel=1e-6)
    assert share(8, tensor_parallel_size=2, distributed_executor_backend="mp") == pytest.approx(
        3 / 24
    )


def test_what_fits_and_what_a_user_chose_stays(share: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert share(24.1) == 0.92
    assert share(8, gpu_memory_utilization=0.5) == 0.5
    assert share(8, kv_cache_memory_bytes=GIB) == 0.92
    assert share(8, speculative_config=None) == 0.92, "plain vLLM is as it was"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert share(8) == 0.92
