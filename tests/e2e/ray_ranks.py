# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel ranks in workers of Ray; see `engine_process`.

vLLM refuses Ray on a CPU, because its CPU platform names no device that Ray's scheduler counts.
Here it names GPUs, and the nodes of a Ray cluster on this machine say that they have two.
Everything else is vLLM's.
"""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

from tests.e2e import engine_process
from tests.e2e.fork_server import REPO, run_fresh
from tests.e2e.harness import EngineResult
from tests.e2e.sabotage import sabotage

_JOB = "SPECPLUG_TESTS_RAY_JOB"
# Set where the engine is once Ray's nodes run, so workers have it only if vLLM copies it.
CARRIED = "SPECPLUG_CACHE"
_VALUE = "/carried"


def run_ray(
    engine: dict[str, Any], calls: list[dict[str, Any]], folder: Path, *sabotages: str,
    legacy: bool = False, env: dict[str, str] | None = None,
) -> tuple[EngineResult, list[bool]]:  # fmt: skip
    """Runs `calls` with two ranks; also returns whether each rank's worker has `CARRIED`.

    Args:
        legacy: with vLLM's first Ray executor, which needs an address for each node: on one node.
            Otherwise each rank has a node.

    Raises:
        AssertionError: with the end of the log when it fails.
    """
    engine = {**engine, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    job, result, log = (folder / f"ray.{kind}" for kind in ("job", "json", "log"))
    made = {"engine": engine, "calls": calls, "sabotage": sabotages, "own_processes": False,
            "legacy": legacy}  # fmt: skip
    job.write_text(json.dumps(made))
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": str(int(not legacy)),
        **(env or {}),
    }
    status = run_fresh("tests.e2e.ray_ranks", [str(job), str(result)], log, env=variables)
    if status:
        raise AssertionError(f"Ray ended with {status}:\n{log.read_text()[-6000:]}")
    data = json.loads(result.read_text())
    carried = [json.loads(_of_rank(job, rank).read_text()) for rank in range(2)]
    return EngineResult(data["calls"], data["counters"]), carried


def _of_rank(job: str | Path, rank: int) -> Path:
    return Path(f"{job}.{rank}")


def _name_devices() -> None:
    from vllm.platforms import current_platform

    assert not current_platform.ray_device_key, "vLLM has Ray on a CPU"
    type(current_platform).ray_device_key = "GPU"


def set_up_worker() -> None:
    """Runs first in each worker of Ray."""
    _name_devices()
    job_path = os.environ[_JOB]
    job = json.loads(Path(job_path).read_text())
    if "speculative_config" not in job["engine"]:
        from vllm_specplug.vllm_v2.plain_engine import use_v2

        use_v2()
    for name in job["sabotage"]:
        sabotage(name)
    from vllm.v1.worker.cpu_worker import CPUWorker

    init_device = CPUWorker.init_device

    def noting(worker: Any) -> None:
        _of_rank(job_path, worker.rank).write_text(json.dumps(os.environ.get(CARRIED) == _VALUE))
        init_device(worker)

    CPUWorker.init_device = noting


def main(job_path: str, result_path: str) -> None:
    import ray
    from ray.cluster_utils import Cluster

    legacy = json.loads(Path(job_path).read_text())["legacy"]
    node = {"num_cpus": 1, "num_gpus": 2 if legacy else 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    if not legacy:
        cluster.add_node(**node)
    ray.init(
        cluster.address,
        runtime_env={
            "worker_process_setup_hook": f"{__name__}.set_up_worker",
            "env_vars": {"PYTHONPATH": str(REPO), _JOB: job_path},
        },
    )
    _name_devices()
    os.environ[CARRIED] = _VALUE
    status = 1
    try:
        engine_process.main(job_path, result_path)
        status = 0
    except Exception:
        # Ray and its nodes must stop whatever failed; the status reports the failure.
        traceback.print_exc()
    ray.shutdown()
    cluster.shutdown()
    # Without exit handlers: the engine's would start Ray again to end its workers.
    os._exit(status)
