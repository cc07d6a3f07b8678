# SPDX-License-Identifier: Apache-2.0
"""The list of seams is what the code does: what it uses of vLLM is listed, and the reverse."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import seam_table
from scripts import vllm_names as names
from vllm_specplug import seams
from vllm_specplug.seams import ALL_SEAMS, WORKER_SEAMS
from vllm_specplug.seams.seam import Members, SeamError, Topic, resolve

MEMBERS = {target for seam in ALL_SEAMS for target in seam.targets}
TOPIC = Topic("key", "why")


def overridden(used: names.UsedNames) -> set[str]:
    """Methods of vLLM's classes that a subclass in the package defines."""
    return {
        f"{base}.{method}"
        for base, methods in used.overridden.items()
        for method in methods
        if not method.startswith("__") and method in dir(resolve(base)) and _is_vllms(base, method)
    }


def _is_vllms(base: str, method: str) -> bool:
    """Whether the method is vLLM's own, rather than one that every object has."""
    owner = next(c for c in resolve(base).__mro__ if method in vars(c))
    return str(owner.__module__).startswith("vllm")


def unlisted(used: names.UsedNames) -> set[str]:
    """What the code overrides or reads, and the list does not have. An import that is missing is
    noticed without a list; a runner of vLLM's CPU build inherits what is listed of the other."""
    runner = "vllm.v1.worker.{}.model_runner:{}ModelRunner."
    missing = {
        target
        for target in overridden(used)
        if target.replace(runner.format("cpu", "CPU"), runner.format("gpu", "GPU")) not in MEMBERS
    }
    last = {target.replace(":", ".").rpartition(".")[2] for target in MEMBERS}
    return missing | {name for name in used.private if name[1:] not in last}


@pytest.fixture(scope="module")
def used() -> names.UsedNames:
    return names.used_names()


def test_everything_overridden_or_private_is_listed(used: names.UsedNames) -> None:
    assert unlisted(used) == set()


def test_every_listed_member_is_used(used: names.UsedNames) -> None:
    listings = set(Path(seams.__file__).parent.glob("*.py"))
    files = (path for folder in names.SOURCES for path in folder.rglob("*.py"))
    code = "".join(path.read_text() for path in files if path not in listings)
    methods = {target.rpartition(".")[2] for target in overridden(used)}
    for seam in ALL_SEAMS:
        for name in seam.members.split() if isinstance(seam, Members) else ():
            forms = f".{name}", f'"{name}"', f"def {name}(", f"    {name} = "
            is_named = any(form in code for form in forms)
            assert is_named or name in methods, (seam.target, name)


@pytest.mark.parametrize(
    "code",
    [
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


def test_workers_of_a_gpu_leave_vllms_cpu_worker_alone() -> None:
    """Its module replaces torch's events, streams and pinned memory when it is imported."""
    modules = {seam.target.partition(":")[0] for seam in WORKER_SEAMS["cuda"].seams}
    assert not {name for name in modules if name.startswith("vllm.v1.worker.cpu")}


def test_what_seams_put_in_place_exists() -> None:
    for seam in ALL_SEAMS:
        path = getattr(seam, "make", "")
        if path:
            assert callable(resolve(path)), path
        path = getattr(seam, "path", "")
        if path and "gpu" not in path:
            assert resolve(":".join(path.rsplit(".", 1)))


def test_every_seam_is_listed_once() -> None:
    seen = [(seam.topic, target, seam.kind) for seam in ALL_SEAMS for target in seam.targets]
    assert len(seen) == len(set(seen))


def test_the_page_shows_the_list() -> None:
    page = seam_table.PAGE.read_text()
    assert seam_table.table() in page, "run: python scripts/seam_table.py --write"


def test_a_lost_attribute_is_told_from_a_found_one() -> None:
    with pytest.raises(SeamError, match="vllm has no such_thing"):
        resolve("vllm:such_thing")
    lost = Members(TOPIC, "vllm:LLM", "nothing generate neither")
    assert lost.verify() == "it has no nothing, neither"
    assert Members(TOPIC, "vllm._custom_ops", "nothing").verify() == "it has no nothing"
