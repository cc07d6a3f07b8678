# SPDX-License-Identifier: Apache-2.0
"""The list of seams is what the code does: what it uses of vLLM is listed, and the reverse."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import seam_table
from scripts import vllm_names as names
from vllm_specplug.seams import ALL_SEAMS, WORKER_SEAMS, SeamError
from vllm_specplug.seams import listing as listing_module
from vllm_specplug.seams.listing import PROCESS_CHECKS
from vllm_specplug.seams.seam import Overrides, Seam, Wrap, resolve

LISTED = {seam.target for seam in ALL_SEAMS}
# Public: the class and the type that generate training data, outside of any server.
_TRAINING = {"vllm:LLM", "vllm:SamplingParams"}


def overridden(used: names.UsedNames) -> set[str]:
    """Methods of vLLM's classes that a subclass in the package defines."""
    return {
        f"{base}.{method}"
        for base, methods in used.overridden.items()
        for method in methods
        if method in dir(resolve(base)) and _is_vllms(base, method)
    }


def _is_vllms(base: str, method: str) -> bool:
    """Whether the method is vLLM's own, rather than one that every object has."""
    owner = next(c for c in resolve(base).__mro__ if method in vars(c))
    return str(owner.__module__).startswith("vllm")


def unlisted(used: names.UsedNames) -> set[str]:
    """What the code uses and the list does not have."""
    missing = {target for target in used.imported | overridden(used) if not _covers(target)}
    last = {target.replace(":", ".").rpartition(".")[2] for target in LISTED}
    return missing | {name for name in used.private if name[1:] not in last}


def _covers(target: str) -> bool:
    """Whether a target, or a member of it, is listed; a runner of vLLM's CPU build inherits what it
    is checked for from the other."""
    target = target.replace(
        "vllm.v1.worker.cpu.model_runner:CPUModelRunner.",
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.",
    )
    return target in _TRAINING or any(
        seam == target or seam.startswith(f"{target}.") for seam in LISTED
    )


def test_everything_used_of_vllm_is_listed() -> None:
    assert unlisted(names.used_names()) == set()


def test_everything_listed_is_used() -> None:
    used = names.used_names()
    known = used.imported | overridden(used)
    listings = set(Path(listing_module.__file__).parent.glob("listing*.py"))
    files = (path for folder in names.SOURCES for path in folder.rglob("*.py"))
    code = "".join(path.read_text() for path in files if path not in listings)
    private = {name[1:] for name in used.private}
    changed = {seam.target for seam in ALL_SEAMS if seam.kind not in ("uses", "overrides")}
    for seam in ALL_SEAMS:
        member = seam.target.replace(":", ".").rpartition(".")[2]
        owner = seam.target.rpartition(".")[0]
        assert (
            seam.target in known | changed
            or member in private
            # A member of what is imported, or of an object that vLLM hands over.
            or (owner in known and not names.is_private(member))
            or (not names.is_private(member) and f".{member}" in code)
            # Called on a runner, and not told apart from a method of the package's own.
            or f".runner.{member}(" in code
        ), seam


@pytest.mark.parametrize(
    "code",
    [
        "from vllm.v1.worker.utils import _private_helper\n",
        "import vllm.v1.worker.gpu_worker as worker\nworker._init_somehow()\n",
        "from vllm.v1.core.block_pool import BlockPool\n",
        "def read(runner):\n    return runner._secret_state\n",
        "def patch(thing):\n    setattr(thing, '_secret_state', 1)\n",
        "from vllm.v1.worker.gpu.model_runner import GPUModelRunner\n"
        "class Mixin:\n    def prepare_inputs(self, output): ...\n"
        "class Runner(Mixin, GPUModelRunner): ...\n",
        "from vllm.v1.worker.gpu_worker import Worker\n"
        "class Mine(Worker):\n    def get_model(self):\n        return self._hidden_thing\n",
    ],
)
def test_a_new_use_is_noticed(tmp_path: Path, code: str) -> None:
    (tmp_path / "new.py").write_text(code)
    assert unlisted(names.used_names((tmp_path,)))


def test_the_installed_vllm_has_them_all() -> None:
    # Those of CUDA import what a CPU build has not; scripts/check_seams.py reads the source.
    assert PROCESS_CHECKS.verify() == []
    assert WORKER_SEAMS["cpu"].verify() == []


def test_workers_of_a_gpu_leave_vllms_cpu_worker_alone() -> None:
    """Its module replaces torch's events, streams and pinned memory when it is imported."""
    modules = {seam.target.partition(":")[0] for seam in WORKER_SEAMS["cuda"].seams}
    assert not {name for name in modules if name.startswith("vllm.v1.worker.cpu")}


def test_what_seams_put_in_place_exists() -> None:
    """Overridden methods exist by the test above; wrappers are named by strings."""
    for seam in ALL_SEAMS:
        for name in ("make", "annotation"):
            path = getattr(seam, name, "")
            if path:
                assert callable(resolve(path)), path
        path = getattr(seam, "path", "")
        if path and "gpu" not in path:
            assert resolve(":".join(path.rsplit(".", 1)))


def test_every_seam_says_why_and_is_listed_once() -> None:
    seen = [(seam.key, seam.target, seam.kind) for seam in ALL_SEAMS]
    assert len(seen) == len(set(seen))
    for seam in ALL_SEAMS:
        assert seam.why and seam.remove_when and ":" in seam.target, seam
    assert {type(seam).__name__ for seam in ALL_SEAMS} >= {"Seam", "Overrides", "Wrap", "Register"}


def test_the_page_shows_the_list() -> None:
    page = seam_table.PAGE.read_text()
    assert seam_table.table() in page, "run: python scripts/seam_table.py --write"


def test_a_lost_attribute_is_told_from_a_found_one() -> None:
    with pytest.raises(SeamError, match="vllm has no such_thing"):
        resolve("vllm:such_thing")
    assert Overrides("k", "vllm:LLM.nothing", "w", "r").verify() == "vllm.LLM has no nothing"
    assert isinstance(ALL_SEAMS[0], Seam) and Wrap.kind == "wraps"
