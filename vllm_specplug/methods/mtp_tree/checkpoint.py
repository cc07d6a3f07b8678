# SPDX-License-Identifier: Apache-2.0
"""Reads the MTP module from its target's checkpoint, with strict checks."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vllm_specplug.drafting.checkpoint_files import check_tensors, load_module, module_shapes
from vllm_specplug.drafting.head_config import check_target
from vllm_specplug.methods.block.checkpoint import read_tensors
from vllm_specplug.methods.block.latent import LatentConfig
from vllm_specplug.methods.mtp_tree.config import MtpConfig
from vllm_specplug.methods.mtp_tree.head import MtpModule

# Prefix in MiMo's checkpoints and in speculators' format. Only the first module is read: it
# predicts the token after next, and its outputs feed the next level.
PREFIX = "mtp_layers.0."
# Prefixes in Qwen's checkpoints, and the names of the tensors around the layer.
_QWEN_LAYER = "mtp.layers.0."
_QWEN_NAMES = {
    "mtp.fc.weight": "input_proj.weight",
    "mtp.norm.weight": "final_layernorm.weight",
    "mtp.pre_fc_norm_embedding.weight": "token_layernorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hidden_layernorm.weight",
}
# In GLM's and DeepSeek's checkpoints, behind "layers.N." of the layer after the target's last one.
_LAYER_NAMES = {
    "eh_proj.weight": "input_proj.weight",
    "shared_head.norm.weight": "final_layernorm.weight",
    "enorm.weight": "token_layernorm.weight",
    "hnorm.weight": "hidden_layernorm.weight",
    "mlp.gate.e_score_correction_bias": "mlp.choice_bias",
}
# The other tensors there are copies of the target's embedding and LM head.
_LAYER_PARTS = (
    *_LAYER_NAMES,
    "input_layernorm.",
    "post_attention_layernorm.",
    "self_attn.",
    "mlp.",
)
_QUERY, _GATE = "self_attn.q_proj.weight", "self_attn.gate_proj.weight"
# Of latent attention
_QUERY_NORM, _QUERY_UP = "self_attn.q_a_layernorm.weight", "self_attn.q_b_proj.weight"
_DOWN, _OUTPUT = "self_attn.kv_a_proj_with_mqa.weight", "self_attn.o_proj.weight"
# Joined weights of all experts, and their parts in checkpoints with tensors for each expert.
_EXPERTS = {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
}


def inspect_mtp_module(directory: str | Path, target_config: Any) -> MtpConfig:
    """Checks a module against its target from its config and tensor headers, without the weights.

    Arguments and errors are those of `load_mtp_module`.
    """
    config = MtpConfig.from_pretrained(directory)
    check_target(
        config,
        target_config,
        "this module belongs to another target; leave model out to use the target's own",
    )
    _check(Path(directory), config, _read(Path(directory), config, headers_only=True))
    return config


def load_mtp_module(
    directory: str | Path, target_config: Any, dtype: torch.dtype = torch.float32
) -> MtpModule:
    """Reads the module in a target's checkpoint.

    Args:
        dtype: of weights that are stored in fp8; the others keep theirs.

    Raises:
        ValueError: for a target without a module, another kind of module, another target's module,
            missing, unexpected or misshapen tensors (all in one message).
    """
    config = inspect_mtp_module(directory, target_config)
    tensors = _as_module(config, _read(Path(directory), config, headers_only=False, dtype=dtype))
    return load_module(lambda: MtpModule(config), tensors)


def _read(directory: Path, config: MtpConfig, **how: Any) -> dict[str, torch.Tensor]:
    """Returns the stored tensors of the module under the names of `MtpModule`."""
    if config.layer:
        prefix = f"layers.{config.layer}."
        prefixes = tuple(prefix + part for part in _LAYER_PARTS)
        found = read_tensors(directory, prefixes=prefixes, **how)
        plain = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
        return {
            _LAYER_NAMES.get(name) or name.replace(".shared_experts.", ".shared_expert."): tensor
            for name, tensor in plain.items()
            # Computed from the config.
            if not name.endswith("rotary_emb.inv_freq")
        }
    prefixes = (PREFIX, *_QWEN_NAMES, _QWEN_LAYER)
    found = read_tensors(directory, prefixes=prefixes, **how)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in found.items():
        prefix = PREFIX if name.startswith(PREFIX) else _QWEN_LAYER
        tensors[_QWEN_NAMES.get(name) or name.removeprefix(prefix)] = tensor
    return tensors


def _as_module(config: MtpConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Changes the stored tensors to the form that `MtpModule` computes with, and returns them."""
    if config.family == "mimo":
        return tensors
    if config.family == "qwen":
        tensors |= {n: t.float() + 1.0 for n, t in tensors.items() if n.endswith("norm.weight")}
    embedding, state = tensors["input_proj.weight"].chunk(2, dim=1)
    tensors["input_proj.weight"] = torch.cat((state, embedding), dim=1)
    if config.gated:
        # Each head's query, then its gate.
        heads = (config.num_attention_heads, 2, config.head_dim)
        query, gate = tensors[_QUERY].unflatten(0, heads).unbind(1)
        tensors[_QUERY], tensors[_GATE] = query.flatten(0, 1), gate.flatten(0, 1)
    if config.latent is not None:
        _as_latent_projections(config, config.latent, tensors)
    if config.experts is not None and not tensors.keys() >= _EXPERTS.keys():
        for name, parts in _EXPERTS.items():
            count, first = config.experts.num_experts, tensors[_part_of(0, parts[0])]
            names = [[_part_of(expert, part) for part in parts] for expert in range(count)]
            # Experts may be stored in several dtypes.
            dtypes = {tensors[name].dtype for own in names for name in own}
            dtype = functools.reduce(torch.promote_types, dtypes)
            # Filled expert by expert, because the experts of DeepSeek-V3 take 21 GiB.
            joined = torch.empty(count, len(parts) * len(first), first.shape[1], dtype=dtype)
            for own, to in zip(names, joined, strict=True):
                to.copy_(torch.cat([tensors.pop(name) for name in own]))
            tensors[name] = joined
    return tensors


def _as_latent_projections(
    config: MtpConfig, sizes: LatentConfig, tensors: dict[str, torch.Tensor]
) -> None:
    """Changes the tensors of the attention to the form of `LatentProjections`."""
    heads, rotated = config.num_attention_heads, sizes.qk_rope_head_dim
    query = tensors[_QUERY_UP].unflatten(0, (heads, -1))
    content, turned = query.split((sizes.qk_nope_head_dim, rotated), dim=1)
    tensors[_QUERY_UP] = torch.cat((_halves(turned), content), dim=1).flatten(0, 1)
    latent, turned = tensors[_DOWN].split((sizes.kv_lora_rank, rotated))
    tensors[_DOWN] = torch.cat((latent, _halves(turned[None])[0]))
    # Queries are linear in this weight.
    tensors[_QUERY_NORM] = tensors[_QUERY_NORM] * config.query_factor
    output = tensors[_OUTPUT].unflatten(1, (heads, -1))
    padding = sizes.head_dim - sizes.v_head_dim
    tensors[_OUTPUT] = F.pad(output, (0, padding)).flatten(1)


def _halves(
    # [heads, P, N], P / 2 pairs of rows
    rows: torch.Tensor,
) -> torch.Tensor:
    """Returns the first rows of all pairs, then the second ones."""
    return rows.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _part_of(expert: int, part: str) -> str:
    return f"mlp.experts.{expert}.{part}.weight"


def _check(directory: Path, config: MtpConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    prefixes = f"layers.{config.layer}.*" if config.layer else f"{PREFIX}* or mtp.*"
    if not tensors:
        raise ValueError(
            f"{str(directory)!r} ships no multi-token-prediction module: it has no tensors "
            f"{prefixes}. Set model to a folder with the target's original release, or use another "
            "method"
        )
    expected = module_shapes(lambda: MtpModule(config))
    if config.gated:
        rows, columns = expected.pop(_GATE)
        expected[_QUERY] = (2 * rows, columns)
    if config.latent is not None:
        inner = config.num_attention_heads * config.latent.v_head_dim
        expected[_OUTPUT] = (config.hidden_size, inner)
    if config.experts is not None and not tensors.keys() >= _EXPERTS.keys():
        for name, parts in _EXPERTS.items():
            num_experts, rows, columns = expected.pop(name)
            for expert in range(num_experts):
                shape = (rows // len(parts), columns)
                expected.update({_part_of(expert, part): shape for part in parts})
    what = f"the module {prefixes} of {str(directory)!r}"
    check_tensors(what, expected, tensors)
