# SPDX-License-Identifier: Apache-2.0
"""Parts of draft heads for serving: joined matrix products and rotary tables."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from vllm_specplug.kernels.draft_rows import RotaryTables
from vllm_specplug.methods.block.head import rotary_cos_sin
from vllm_specplug.methods.block.rotary import Rotary


def plain_linear(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns torch's own linear layer."""
    return lambda x: F.linear(x, weight, bias)


def joined_weights(*linears: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns weight and bias of one linear layer that computes the outputs of all `linears`."""
    weight = torch.cat([linear.weight for linear in linears])
    if linears[0].bias is None:
        return weight, None
    return weight, torch.cat([linear.bias for linear in linears])


def rotary_tables(rotary: Rotary, max_positions: int, like: torch.Tensor) -> RotaryTables:
    """Returns the tables for positions below `max_positions`, with device and dtype of `like`."""
    return _tables(*rotary_cos_sin(torch.arange(max_positions), rotary), like)


def tables_of_angles(angles: torch.Tensor, like: torch.Tensor) -> RotaryTables:
    """Returns the tables for angles [P, Dh/2], with device and dtype of `like`."""
    return _tables(angles.cos(), angles.sin(), like)


def _tables(cos: torch.Tensor, sin: torch.Tensor, like: torch.Tensor) -> RotaryTables:
    # Both halves: a rotation is two products and a sum.
    return RotaryTables(torch.cat((cos, cos), -1).to(like), torch.cat((-sin, sin), -1).to(like))
