# SPDX-License-Identifier: Apache-2.0
"""Seams that a source tree changed or lost are reported."""

from __future__ import annotations

from pathlib import Path

from scripts import check_seams as seams


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_changes_are_told_from_losses(tmp_path: Path) -> None:
    old = write(tmp_path / "a", m="def same(a): ...\ndef changed(a): ...\ndef lost(a): ...\n")
    new = write(tmp_path / "b", m="def same(a): ...\ndef changed(a, b): ...\n")
    assert seams.compare(new, old, {"vllm.m:same", "vllm.m:changed", "vllm.m:lost"}) == {
        "vllm.m.same": "same",
        "vllm.m.changed": "parameters were ['a'], are ['a', 'b']",
        "vllm.m.lost": "missing",
    }


def test_the_installed_vllm_has_them_all() -> None:
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parents[1]
    found = seams.compare(root, root, seams.all_targets())
    assert len(found) > 300
    assert set(found.values()) == {"same"}, found
