# SPDX-License-Identifier: Apache-2.0
"""Draft heads by hub id: taken from the local cache, never fetched."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from vllm_specplug.drafting.head_path import resolve_head_path


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What tried to reach the network; an empty cache, and nothing that says we are offline."""
    tried: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        tried.append(args)
        raise OSError("no network in tests")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return tried


def test_a_head_that_is_not_cached_is_refused_without_network(attempts: list[Any]) -> None:
    with pytest.raises(ValueError, match="model='someone/head' .*hf download someone/head"):
        resolve_head_path("someone/head", "jetspec")
    assert attempts == []


def test_a_cached_head_is_found_without_network(attempts: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "models--someone--head"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    assert resolve_head_path("someone/head", "jetspec") == folder / "snapshots" / ("0" * 40)
    assert attempts == []


def test_the_fixture_notices_a_download(attempts: list[Any]) -> None:
    # The hub's client repeats what fails, for long; this is what it is built on.
    import httpx

    with pytest.raises(httpx.ConnectError):
        httpx.get(constants.ENDPOINT, trust_env=False)
    assert attempts


@pytest.mark.parametrize("method", ["tree", "jetspec"])
@pytest.mark.parametrize("model", [5, True, ["x"], {"a": 1}, "x" * 5000, "~nosuchuser/x", "a\0b"])
def test_a_model_that_can_be_no_folder_is_refused(
    attempts: list[Any], model: Any, method: str
) -> None:
    with pytest.raises(ValueError, match=r"speculative_config\.model=.* is not usable") as error:
        resolve_head_path(model, method)
    assert len(str(error.value)) < 500 and "Give " in str(error.value)
    assert attempts == []
