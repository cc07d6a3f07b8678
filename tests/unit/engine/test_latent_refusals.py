# SPDX-License-Identifier: Apache-2.0
"""What targets with multi-head latent attention are refused with, at config time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.latent import BACKEND, latent_config
from tests.e2e.tiny import make_tokenswift_heads
from tests.unit.engine_config import engine_config
from vllm_specplug.options import max_scheduled_rows

pytestmark = pytest.mark.usefixtures("installed")


def config_of(target: Path, spec: dict[str, Any], **engine: Any) -> Any:
    return engine_config(target, spec, **{**BACKEND, **engine})


@pytest.mark.parametrize(
    ("engine", "spec", "message"),
    [
        ({}, {}, None),
        ({"dtype": "bfloat16"}, {}, None),
        ({}, {"tree_kernel": "reference"}, None),
        ({}, {"tree_kernel": "cpp"}, r"tree_kernel='cpp' on an MLA target .*\"auto\" or"),
        ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype='fp8' on an MLA target .*unquantised"),
        # Whether it can be is seen in the loaded target.
        ({"enforce_eager": False}, {}, None),
        # Prompts come in whole.
        ({"max_num_batched_tokens": 64}, {}, None),
        ({"max_num_scheduled_tokens": 64}, {}, "scheduled_tokens=64 on .*max_model_len=256"),
        # What vLLM's scheduler does not follow above the other limit, which is 2048 here.
        ({"max_num_scheduled_tokens": 4096}, {}, None),
        ({}, {"method": "tokenswift", "draft_source": "heads"}, None),
        ({}, {"method": "tokenswift", "draft_source": "ngrams"}, None),
        ({}, {"method": "tokenswift", "draft_source": "self"},
         r"draft_source='self' on an MLA target .*another setting"),
    ],
)  # fmt: skip
def test_targets_with_latent_attention(
    tmp_path: Path, engine: dict[str, Any], spec: dict[str, Any], message: str | None
) -> None:
    latent_config("DeepseekV3").save_pretrained(tmp_path)
    spec = {"method": "ngram_tree", "num_speculative_tokens": 8, **spec}
    if spec["method"] == "tokenswift":
        spec["model"] = str(make_tokenswift_heads(tmp_path / "heads", 300))
    if message is None:
        config = config_of(tmp_path, spec, **engine)
        assert config.model_config.use_mla
        assert 256 <= max_scheduled_rows(config.scheduler_config) <= 2048
        return
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, spec, **engine)


@pytest.mark.parametrize(
    ("device", "kernel", "message"),
    [
        ("cuda", "auto", None),
        ("cuda", "triton", None),
        ("cuda", "flash", r"tree_kernel='flash' on an MLA target .*\"auto\" or \"triton\""),
        ("xpu", "auto", r"MLA target \(DeepseekV2ForCausalLM\) on 'xpu'.*on CPUs and on CUDA"),
    ],
)
def test_latent_attention_by_device(
    tmp_path: Path, device: str, kernel: str, message: str | None
) -> None:
    latent_config("DeepseekV2").save_pretrained(tmp_path)
    config = config_of(tmp_path, {"method": "ngram_tree", "num_speculative_tokens": 8})
    config.speculative_config.tree_kernel = kernel
    config.device_config = SimpleNamespace(device_type=device)
    from vllm_specplug.engine.engine_args import check_engine_config

    if message is None:
        check_engine_config(config)
        return
    with pytest.raises(ValueError, match=f"'ngram_tree' .*{message}"):
        check_engine_config(config)
