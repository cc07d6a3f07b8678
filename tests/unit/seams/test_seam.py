# SPDX-License-Identifier: Apache-2.0
"""Seams are applied once, together or not at all, and undone to the objects that were there."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from vllm_specplug.seams.seam import (
    Add,
    Members,
    Register,
    Replace,
    SeamError,
    SeamSet,
    Topic,
    Wrap,
)

TOPIC = Topic("key", "why")


class Base:
    def inherited(self) -> str:
        return "base"


class Host(Base):
    size: int = 0

    def run(self) -> str:
        return "stock"


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("seam_host")
    members = {"run": Host.run, "__annotations__": dict(Host.__annotations__)}
    module.Host = type("Host", (Base,), members)
    module.around = lambda stock: lambda self: f"around {stock(self)}"
    module.retype = lambda stock: {**stock, "size": str}
    module.yes = lambda stock: True
    module.fails = lambda stock: 1 / 0
    monkeypatch.setitem(sys.modules, "seam_host", module)
    return module


def wrap(path: str, make: str = "around") -> Wrap:
    return Wrap(TOPIC, f"seam_host:{path}", make=f"seam_host:{make}")


def test_a_wrapper_is_undone_to_the_object_that_was_there(host: Any) -> None:
    stock = vars(host.Host)["run"]
    own, inherited = wrap("Host.run"), wrap("Host.inherited")
    own.apply()
    inherited.apply()
    assert host.Host().run() == "around stock" and host.Host.run.__wrapped__ is stock
    assert host.Host().inherited() == "around base" and Base().inherited() == "base"
    own.undo()
    inherited.undo()
    assert vars(host.Host)["run"] is stock
    assert "inherited" not in vars(host.Host)
    own.undo()  # once more is nothing
    own.apply()
    own.undo()


def test_a_seam_is_applied_once() -> None:
    seam = wrap("Host.run")
    with seam.applied(), pytest.raises(SeamError, match="already applied"):
        seam.apply()


@pytest.mark.parametrize("before", ["missing", False, True])
def test_a_global_that_some_releases_lack_is_put_back(host: Any, before: bool | str) -> None:
    if before != "missing":
        host.HAS_IT = before
    first = Add(TOPIC, "seam_host:HAS_IT", make="seam_host:yes")
    second = Add(TOPIC, "seam_host:HAS_IT_TOO", make="seam_host:yes")
    assert first.verify() is None
    with second.applied(), first.applied():
        assert host.HAS_IT is True and host.HAS_IT_TOO is True
    assert getattr(host, "HAS_IT", "missing") == before and not hasattr(host, "HAS_IT_TOO")
    nowhere = Add(TOPIC, "nowhere.at.all:HAS_IT", make="seam_host:yes")
    assert "nowhere" in str(nowhere.verify())


def test_a_set_is_applied_whole_or_not_at_all(host: Any) -> None:
    before = dict(vars(host.Host))
    retype = Replace(TOPIC, "seam_host:Host.__annotations__", make="seam_host:retype")
    good = [wrap("Host.run"), retype]
    seams = SeamSet([*good, wrap("Host.inherited", "fails")])
    with pytest.raises(SeamError, match=r"Host\.inherited could not.*division.*vLLM is as it was"):
        seams.apply()
    assert dict(vars(host.Host)) == before and not seams.is_applied
    works = SeamSet(good)
    works.apply()
    works.apply()
    assert works.is_applied and host.Host().run() == "around stock"
    assert host.Host.__annotations__ == {"size": str}
    works.undo()
    assert dict(vars(host.Host)) == before and not works.is_applied


def test_missing_targets_are_found_without_applying() -> None:
    seams = SeamSet(
        [
            Members(TOPIC, "seam_host:Host", "run"),
            wrap("Host.walk"),
            Replace(TOPIC, "no.such.module:name", make="seam_host:around"),
            wrap("Host.run", "nothing"),
            Register(TOPIC, "seam_host:Host", path="no.such.module.Backend"),
        ]
    )
    missing = seams.verify()
    assert missing[0] == "seam_host.Host.walk (seam_host.Host has no walk)"
    assert missing[1].startswith("no.such.module.name (no.such.module cannot be imported")
    assert missing[2] == "seam_host.Host.run (seam_host has no nothing)"
    assert missing[3].startswith("seam_host.Host (no.such.module cannot be imported")
    assert len(missing) == 4


def test_another_packages_backend_is_registered_again() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum.CUSTOM
    target = "vllm.v1.attention.backends.registry:AttentionBackendEnum.CUSTOM"
    theirs, ours = Register(TOPIC, target, path="their.Backend"), Register(TOPIC, target, path="B")
    with theirs.applied():
        with ours.applied():
            assert backend.get_path() == "B"
        assert backend.get_path() == "their.Backend"
    assert not backend.is_overridden()
