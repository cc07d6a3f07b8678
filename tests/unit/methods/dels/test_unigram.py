# SPDX-License-Identifier: Apache-2.0
"""The unigram prior: smoothing, padding, and counts that are not this target's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from vllm_specplug.drafting import checkpoint_files
from vllm_specplug.methods.dels.unigram import (
    load_unigram,
    log_prior,
    save_unigram,
)

COUNTS = torch.tensor([0, 3, 1, 0, 6])


def test_additive_smoothing() -> None:
    probs = log_prior(COUNTS, 5).exp()
    assert torch.allclose(probs, torch.tensor([1.0, 4, 2, 1, 7]) / 15)


def test_short_counts_are_padded_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        probs = log_prior(COUNTS, 8).exp()
    assert torch.allclose(probs, torch.tensor([1.0, 4, 2, 1, 7, 1, 1, 1]) / 18)
    assert "cover 5 of 8 tokens" in caplog.text
    with pytest.raises(ValueError, match="5 tokens, legal: at most 4"):
        log_prior(COUNTS, 4)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_files_come_back(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"unigram{suffix}"
    if suffix == ".safetensors":
        save_unigram(path, COUNTS)
    else:
        torch.save({"counts": COUNTS, "num_samples": 4, "metadata": {"a": "b"}}, path)
    assert load_unigram(path).tolist() == COUNTS.tolist()


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_unigram(tmp_path / "u.safetensors", COUNTS)
    assert path.stat().st_mode & 0o777 == 0o644

    def full_disk(tensors: object, file: Path, metadata: object) -> None:
        Path(file).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint_files, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_unigram(path, COUNTS + 1)
    assert load_unigram(path).tolist() == COUNTS.tolist()


def test_bad_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        load_unigram(tmp_path / "u.safetensors")
    (tmp_path / "u.txt").write_bytes(b"nothing")
    torch.save({"other": COUNTS}, tmp_path / "u.pt")
    for name in ("u.txt", "u.pt"):
        with pytest.raises(ValueError, match="cannot be read"):
            load_unigram(tmp_path / name)
    for counts in (torch.tensor([1.5]), torch.zeros(2, 2).long(), torch.tensor([3, -1])):
        with pytest.raises(ValueError, match="legal"):
            save_unigram(tmp_path / "w.safetensors", counts)
