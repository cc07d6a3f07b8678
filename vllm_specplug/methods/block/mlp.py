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

from vllm_specplug.drafting.checkpoint_files import is_positive, is_size
from vllm_specplug.drafting.drafter import ExpertProducts, LinearFactory
from vllm_specplug.drafting.head_config import require, require_only, required_size
from vllm_specplug.kernels import gated_silu, multiply_experts
from vllm_specplug.methods.block.fused_parts import joined_weights
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
    uses_sigmoid: bool = False
    """Whether the router has independent scores and a bias for the choice, as DeepSeek-V3's, and
    the shared expert no gate."""
    scale: float = 1.0
    """Factor of the weights of a row's experts."""
    num_groups: int = 1
    """Equal groups of consecutive experts, with sigmoids. A group's score is the sum of its two
    best experts' scores."""
    groups_per_row: int = 1
    """Number of best groups from which a row's experts are chosen."""

    @classmethod
    def of_qwen(cls, raw: Mapping[str, Any]) -> ExpertsConfig:
        """Returns the fields of a parsed `config.json` of Qwen3-Next or Qwen3.5."""
        require_only(raw, decoder_sparse_step=1, mlp_only_layers=[])
        return cls(
            *_routing(raw, "num_experts"),
            required_size(raw, "moe_intermediate_size"),
            required_size(raw, "shared_expert_intermediate_size"),
            _normalises(raw),
        )

    @classmethod
    def of_glm(cls, raw: Mapping[str, Any]) -> ExpertsConfig:
        """Returns the fields of a parsed `config.json` of GLM-4 with experts or DeepSeek-V3."""
        require_only(raw, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
        experts, chosen = _routing(raw, "n_routed_experts")
        groups, kept = _groups(raw, experts, chosen)
        width, scale = required_size(raw, "moe_intermediate_size"), raw.get("routed_scaling_factor")
        scale = 1.0 if scale is None else scale
        require(is_positive(scale), "routed_scaling_factor", scale, "a positive number")
        return cls(
            experts,
            chosen,
            width,
            width * required_size(raw, "n_shared_experts"),
            _normalises(raw),
            uses_sigmoid=True,
            scale=float(scale),
            num_groups=groups,
            groups_per_row=kept,
        )


def _routing(raw: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Returns the number of experts, field `name`, and how many a row takes."""
    num_experts, chosen = required_size(raw, name), required_size(raw, "num_experts_per_tok")
    require(chosen <= num_experts, "num_experts_per_tok", chosen, f"1..{num_experts} ({name})")
    return num_experts, chosen


def _groups(raw: Mapping[str, Any], num_experts: int, chosen: int) -> tuple[int, int]:
    """Returns the number of groups of experts, and from how many a row takes its experts."""
    groups, kept = (1 if raw.get(n) is None else raw[n] for n in ("n_group", "topk_group"))
    is_legal = is_size(groups) and num_experts % groups == 0
    legal = f"1, or a divisor of {num_experts} (the experts) that leaves each group two or more"
    require(is_legal and groups < max(2, num_experts), "n_group", groups, legal)
    fewest = -(-chosen * groups // num_experts)
    is_legal = is_size(kept) and fewest <= kept <= groups
    require(is_legal, "topk_group", kept, f"{fewest}..{groups} (groups that hold {chosen} experts)")
    return groups, kept


def _normalises(raw: Mapping[str, Any]) -> bool:
    value = raw.get("norm_topk_prob", True)
    require(isinstance(value, bool), "norm_topk_prob", value, "true or false")
    return bool(value)


class Experts(nn.Module):
    """The weights of all experts, joined."""

    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        super().__init__()
        sizes = (config.num_experts, config.width, hidden)
        self.gate_up_proj = nn.Parameter(torch.empty(sizes[0], 2 * sizes[1], sizes[2]))
        self.down_proj = nn.Parameter(torch.empty(sizes[0], sizes[2], sizes[1]))


class ExpertMLP(nn.Module):
    """Weights of an MLP with routed experts and a shared expert, under Qwen's names."""

    def __init__(self, config: ExpertsConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(hidden, config.num_experts, bias=False)
        self.experts = Experts(config, hidden)
        self.shared_expert = GatedMLP(hidden, config.shared_width)
        if config.uses_sigmoid:
            self.choice_bias = nn.Parameter(torch.zeros(config.num_experts))
        else:
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
        if mlp.config.uses_sigmoid:
            # As in the target, scores are computed in float32.
            self.gates, self.choice_bias = mlp.gate.weight.float(), mlp.choice_bias.float()
        else:
            # [E + 1, H]: router and gate of the shared expert read the same rows.
            self.gates = torch.cat((mlp.gate.weight, mlp.shared_expert_gate.weight))
        self.gate_up, self.down = mlp.experts.gate_up_proj, mlp.experts.down_proj
        self.shared = FusedMLP(mlp.shared_expert, make_linear)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self.config
        gates = F.linear(x.to(self.gates.dtype), self.gates)
        if config.uses_sigmoid:
            scores = gates.sigmoid()
            choice = scores + self.choice_bias
            if config.num_groups > 1:
                choice = _best_groups(choice, config)
            ids = choice.topk(config.experts_per_row).indices
            weights = scores.gather(1, ids)
        else:
            scores = gates[:, :-1].softmax(-1, dtype=torch.float32)
            weights, ids = scores.topk(config.experts_per_row)
        if config.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        routed = self.multiply(x, self.gate_up, self.down, weights, ids)
        shared = self.shared(x)
        if config.uses_sigmoid:
            return torch.add(shared, routed, alpha=config.scale)
        return torch.addcmul(routed, gates[:, -1:].sigmoid(), shared)


def _best_groups(choice: torch.Tensor, config: ExpertsConfig) -> torch.Tensor:
    """Returns the scores [T, E] with -inf outside of each row's best groups."""
    groups = choice.unflatten(-1, (config.num_groups, -1))
    best = groups.topk(2).values.sum(-1).topk(config.groups_per_row).indices
    is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)


def fuse_mlp(
    mlp: GatedMLP | ExpertMLP,
    make_linear: LinearFactory,
    multiply: ExpertProducts = multiply_experts,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the serving form of an MLP."""
    if isinstance(mlp, ExpertMLP):
        return FusedExpertMLP(mlp, make_linear, multiply)
    return FusedMLP(mlp, make_linear)
