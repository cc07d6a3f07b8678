# SPDX-License-Identifier: Apache-2.0
"""The doctor on a model of the user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.latent import latent_config
from vllm_specplug.cpu_environment import Problems
from vllm_specplug.engine import doctor

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 4 query heads over 2 KV heads."""
    from transformers import Qwen3Config

    folder = tmp_path_factory.mktemp("target")
    Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=128,
        architectures=["Qwen3ForCausalLM"], dtype="bfloat16",
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_a_targets_attention_is_what_serving_would_have(target: Path) -> None:
    shape = doctor.target_shape(str(target))
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 2, 24)
    assert shape.dtype == torch.bfloat16 and shape.block_size % 16 == 0
    # KV heads are never split.
    of_four = doctor.target_shape(str(target), 4)
    assert (of_four.num_heads, of_four.num_kv_heads) == (1, 1)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 .* must divide the 4 query heads"):
        doctor.target_shape(str(target), 3)
    with pytest.raises(ValueError, match="target='/no/such/folder' is not usable: there is no"):
        doctor.target_shape("/no/such/folder")


def test_latent_attention_is_tested_when_a_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent_config("DeepseekV2").save_pretrained(tmp_path)
    assert doctor.target_shape(str(tmp_path)).num_heads == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match=r"latent attention \(MLA\).* leave --target out"):
        doctor.target_shape(str(tmp_path))


def test_the_kernels_of_a_device_are_asked_about_the_target(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_specplug.kernels import cuda_doctor

    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor, "_device", lambda: {"type": "cuda"})
    monkeypatch.setattr(doctor, "_vllm", lambda: {"supported": True})
    found = {"kernel": "triton", "reason": "the fastest"}
    monkeypatch.setattr(cuda_doctor, "describe_cuda", lambda shape: asked.append(shape) or found)
    monkeypatch.setattr(
        cuda_doctor, "self_test_cuda", lambda name, shape: asked.append(shape) or "good"
    )
    assert doctor.collect(target=str(target), num_ranks=2)["ok"]
    assert [(s.num_heads, s.num_kv_heads, s.head_dim) for s in asked] == [(2, 1, 24)] * 2
    asked.clear()
    assert doctor.collect()["ok"]
    assert asked == [cuda_doctor.USUAL_SHAPE] * 2
    found.update(kernel="none", reason="it finds no kernel")
    report = doctor.collect()
    assert not report["ok"] and "it finds no kernel" in report["self_test"]["detail"]


def test_a_broken_environment_is_one_cause_and_one_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "find_problems", lambda: Problems(("torchvision",), lacks_vllm_entry=True)
    )
    # Nothing that fails in such an environment is tried.
    monkeypatch.delattr(doctor, "_vllm")
    report = doctor.collect()
    assert report["ok"] is False and set(report) == {"versions", "problem", "ok"}
    assert report["problem"].startswith("torchvision cannot be imported")
    assert report["problem"].endswith("Run `specplug doctor --fix`")
