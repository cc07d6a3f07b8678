# SPDX-License-Identifier: Apache-2.0
"""Random targets with multi-head latent attention: the published shapes, fewer and smaller."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

VOCAB = 300
# Engine arguments. With AMX vLLM takes AMX_MLA, which is not served, unless another is asked for.
BACKEND: dict[str, Any] = (
    {"attention_backend": "CPU_MLA"} if torch.cpu._is_amx_tile_supported() else {}
)

# What vLLM's CPU kernel takes: 512 latent numbers and 64 of rotary keys, as all of these families
# have them. The fields are those of the published config.json files.
_LATENT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_shared_experts": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "num_hidden_layers": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
         "beta_fast": 32, "beta_slow": 1, "rope_theta": 1e4}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    # DeepSeek-V2-Lite: queries are not compressed, experts by softmax.
    "DeepseekV2": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
                   "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    # DeepSeek-V3, and Kimi-K2 in its classes: compressed queries, experts in groups, by sigmoid
    # and a bias.
    "DeepseekV3": {"q_lora_rank": 48, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
                   "routed_scaling_factor": 2.5, "topk_method": "noaux_tc",
                   "scoring_func": "sigmoid",
                   "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    # GLM-4.7-Flash: rotary embeddings without scaling.
    "Glm4MoeLite": {"q_lora_rank": 48, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                    "routed_scaling_factor": 1.8,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}  # fmt: skip


def latent_config(family: str, **config: Any) -> Any:
    import transformers

    fields = {**_LATENT, **FAMILIES[family], "architectures": [f"{family}ForCausalLM"], **config}
    return getattr(transformers, f"{family}Config")(**fields)


def make_latent_target(folder: Path, family: str, *, sharp: bool = True, **config: Any) -> Path:
    """A float32 target whose attention is sharp: who attends whom shows in the output.

    Args:
        sharp: False for scores as near as trained ones, which magnify no rounding.
    """
    import transformers

    torch.manual_seed(0)
    made = latent_config(family, **config)
    model = transformers.AutoModelForCausalLM.from_config(made).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight")):
                parameter.mul_(20.0 if sharp else 4.0)
            elif name.endswith("o_proj.weight"):
                parameter.mul_(40.0)
            elif name.endswith("e_score_correction_bias"):
                parameter.normal_(std=0.1)
            elif parameter.dim() >= 2 and "embed" not in name:
                parameter.mul_(3.0 if "mlp" in name else 8.0)
    model.save_pretrained(folder)
    return folder


@cache
def latent_target(family: str = "DeepseekV2", **config: Any) -> str:
    """The folder of such a target, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="specplug-latent-")) / family
    return str(make_latent_target(folder, family, **config))
