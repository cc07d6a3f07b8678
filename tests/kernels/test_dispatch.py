# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging

import pytest
import torch

from tests.conftest import use_isa
from tests.kernels.paged import PagedTrees, paged_trees
from vllm_specplug import kernels
from vllm_specplug.kernels import extension


@pytest.fixture
def fresh_load():
    """Lets a test choose how the extension loads, and restores it afterwards."""
    extension.library_error.cache_clear()
    yield
    extension.library_error.cache_clear()
    if extension.has_cpu_extension():
        use_isa(None)


def problem() -> PagedTrees:
    return paged_trees([(40, 6)], (torch.bfloat16, "vnni"), group=3)


def test_without_the_extension_the_reference_serves_with_one_warning(
    fresh_load, monkeypatch, caplog
):
    monkeypatch.delenv(extension.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(extension, "_load", lambda: "the extension was not built at install")
    monkeypatch.setattr(torch.ops.specplug, "tree_attn", None, raising=False)  # a call would fail
    step = problem()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            step.check()
            slots = torch.tensor([[[3]]]), torch.tensor([2])
            kernels.copy_kv([step.cache], [step.cache], *slots, step.layout)
            step = problem()
    warnings = [r for r in caplog.records if "compiled CPU kernels" in r.message]
    assert len(warnings) == 1
    assert "was not built" in warnings[0].getMessage()
    assert kernels.describe()["kernel"] == "reference"
    assert "was not built" in kernels.describe()["reason"]


def test_a_library_that_does_not_load_is_named(fresh_load, monkeypatch, tmp_path):
    monkeypatch.delenv(extension.ISA_VARIABLE, raising=False)
    (tmp_path / "_cpu.so").write_bytes(b"not a library")
    monkeypatch.setattr(extension, "__file__", str(tmp_path / "extension.py"))
    assert "_cpu.so does not load" in extension.cpu_extension_error()


def test_the_reference_can_be_asked_for(fresh_load, monkeypatch, caplog):
    monkeypatch.setenv(extension.ISA_VARIABLE, "reference")
    assert kernels.describe()["kernel"] == "reference"
    assert not caplog.records


def test_an_instruction_set_can_be_forced(compiled, fresh_load, monkeypatch):
    monkeypatch.setenv(extension.ISA_VARIABLE, "plain")
    for dtype in (torch.float32, torch.bfloat16):
        assert kernels.describe(dtype)["isa"] == "plain"


def test_an_unknown_instruction_set_is_refused(fresh_load, monkeypatch):
    monkeypatch.setenv(extension.ISA_VARIABLE, "avx9000")
    with pytest.raises(ValueError, match="avx9000.*one of plain, avx2.*reference"):
        extension.cpu_extension_error()


def test_describe_names_the_best_variant(compiled):
    info = kernels.describe(torch.bfloat16)
    assert info["kernel"] == "cpp"
    assert info["isa"] == (extension.requested_isa() or info["supported_isas"][-1])
    assert kernels.describe(torch.float16)["isa"] in ("plain", "avx2", "avx512")
    assert kernels.describe(torch.float64)["kernel"] == "reference"


def test_other_dtypes_go_to_the_reference(compiled):
    paged_trees([(40, 6)], (torch.float64, "vec"), group=3).check()
