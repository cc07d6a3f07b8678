# SPDX-License-Identifier: Apache-2.0
"""MLPs of draft layers with experts, and the serving form of MLPs with and without them.

Shapes: T rows, H hidden size, E experts, K experts per row, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_specplug.drafting.drafter import ExpertProducts, LinearFactory
from vllm_specplug.drafting.head_config import require, required_size
from vllm_specplug.kernels import gated_silu, multiply_experts
from vllm_specplug.methods.block.fused_head import joined_weights
from vllm_specplug.methods.block.head import GatedMLP


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and routing of an MLP with experts."""

    num_experts: int
    experts_per_row: int
    width: int
    shared_width: int
    """Width of the shared expert, which all rows pass."""
    normalises: bool
    """Whether the weights of a row's experts are divided by their sum."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ExpertsConfig:
        """Returns the fields of a parsed `config.json`, under Qwen's names."""
        normalises = raw.get("norm_topk_prob", True)
        require(isinstance(normalises, bool), "norm_topk_prob", normalises, "true or false")
        for name, legal in (("decoder_sparse_step", (None, 1)), ("mlp_only_layers", (None, []))):
            require(raw.get(name) in legal, name, raw.get(name), f"absent or {legal[1]!r}")
        num_experts, chosen = (
            required_size(raw, name) for name in ("num_experts", "num_experts_per_tok")
        )
        require(
            chosen <= num_experts, "num_experts_per_tok", chosen, f"1..{num_experts} (num_experts)"
        )
        return cls(
            num_experts,
            chosen,
            required_size(raw, "moe_intermediate_size"),
            required_size(raw, "shared_expert_intermediate_size"),
            normalises,
        )


class Experts(nn.Module):
    """The weights of all experts, joined."""

    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        super().__init__()
        sizes = (config.num_experts, config.width, hidden)
        self.gate_up_proj = nn.Parameter(torch.empty(sizes[0], 2 * sizes[1], sizes[2]))
        self.down_proj = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))


class ExpertMLP(nn.Module):
    """Weights of an MLP with routed experts and a gated shared expert, under Qwen's names."""

    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(hidden, config.num_experts, bias=False)
        self.experts = Experts(config, hidden)
        self.shared_expert = GatedMLP(hidden, config.shared_width)
        self.shared_expert_gate = nn.Linear(hidden, 1, bias=False)


class FusedMLP:
    """Serving form of a `GatedMLP`: [T, H] -> [T, H]."""

    def __init__(self, mlp: GatedMLP, make_linear: LinearFactory) -> None:
        self.gate_up = make_linear(*joined_weights(mlp.gate_proj, mlp.up_proj))
        self.down = make_linear(mlp.down_proj.weight, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(gated_silu(self.gate_up(x)))


class FusedExpertMLP:
    """Serving form of an `ExpertMLP`: [T, H] -> [T, H]."""

    def __init__(
        self, mlp: ExpertMLP, make_linear: LinearFactory, multiply: ExpertProducts
    ) -> None:
        self.config, self.multiply = mlp.config, multiply
        # [E + 1, H]: router and gate of the shared expert read the same rows.
        self.gates = torch.cat((mlp.gate.weight, mlp.shared_expert_gate.weight))
        self.gate_up, self.down = mlp.experts.gate_up_proj, mlp.experts.down_proj
        self.shared = FusedMLP(mlp.shared_expert, make_linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores, gate = F.linear(x, self.gates).split((self.config.num_experts, 1), dim=-1)
        weights, ids = scores.softmax(-1, dtype=torch.float32).topk(self.config.experts_per_row)
        if self.config.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        routed = self.multiply(x, self.gate_up, self.down, weights, ids)
        return torch.addcmul(routed, gate.sigmoid(), self.shared(x))


def fuse_mlp(
    mlp: GatedMLP | ExpertMLP,
    make_linear: LinearFactory,
    multiply: ExpertProducts = multiply_experts,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the serving form of an MLP."""
    if isinstance(mlp, ExpertMLP):
        return FusedExpertMLP(mlp, make_linear, multiply)
    return FusedMLP(mlp, make_linear)
