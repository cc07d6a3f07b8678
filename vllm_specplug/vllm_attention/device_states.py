# SPDX-License-Identifier: Apache-2.0
"""`state_rows` with device kernels: the host reads nothing of a step's trees.

The host knows which rows belong to which request, and copies this to the device once per step.
Parents and accepted paths stay on the device.

Seam: state_rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from vllm_specplug.kernels import DeltaUpdates, StateTrees, to_device
from vllm_specplug.vllm_attention.state_rows import (
    BUILDER_ATTRIBUTE,
    LinearRows,
    PendingLayer,
    StateBlocks,
    StateStep,
    layer_conv_states,
)
from vllm_specplug.vllm_attention.tree_rows import RequestRows

# vLLM's device kernels add this to the sum of squares of a query or key.
NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeviceLinearRows(LinearRows):
    """`LinearRows` as tensors of a device."""

    # [B' + 1] int32, on the host
    host_starts: torch.Tensor

    @classmethod
    def moved(cls, rows: LinearRows, device: torch.device) -> DeviceLinearRows:
        """Returns a copy on the device."""
        return cls(
            to_device(rows.rows, device),
            to_device(rows.requests, device),
            to_device(rows.starts, device),
            to_device(rows.has_state, device),
            rows.num_decodes,
            rows.starts,
        )

    def metadata(self, stock: Any) -> Any:
        """Returns vLLM's metadata of a step that has only these rows."""
        metadata = super().metadata(stock)
        if not metadata.num_prefills:
            # As in vLLM: a step of single rows always reads its states.
            return replace(metadata, has_initial_state=None)
        if not self._prefill_fields:
            self._prefill_fields.update(self._prefills(getattr(stock, BUILDER_ATTRIBUTE)))
        slots = metadata.non_spec_state_indices_tensor[self.num_decodes :]
        return replace(metadata, prefill_state_indices=slots, **self._prefill_fields)

    @cached_property
    def _prefill_fields(self) -> dict[str, Any]:
        return {}

    def _prefills(self, builder: Any) -> dict[str, Any]:
        """Returns further fields for vLLM's prompt kernels, equal in every KV cache group."""
        device, decodes = self.starts.device, self.num_decodes
        nums, batch, offsets = compute_causal_conv1d_metadata(self.host_starts, device=device)
        starts = self.starts[decodes:] - decodes
        chunk_indices, chunk_offsets = builder._build_chunk_metadata(
            starts, self.host_starts[decodes:] - decodes, device
        )
        return {
            "nums_dict": nums,
            "batch_ptr": batch,
            "token_chunk_offset_ptr": offsets,
            "prefill_query_start_loc": starts,
            "prefill_has_initial_state": self.has_state[decodes:],
            "chunk_indices": chunk_indices,
            "chunk_offsets": chunk_offsets,
        }


class DeviceStateStep(StateStep):
    """`StateStep` on a device.

    Args:
        parents: on the device.
    """

    def __init__(self, requests: Sequence[RequestRows], parents: torch.Tensor) -> None:
        super().__init__(requests, parents)
        device = parents.device
        self.starts, self.rows = to_device(self.starts, device), to_device(self.rows, device)
        self.requests = to_device(self.requests, device)
        if self.linear is not None:
            self.linear = DeviceLinearRows.moved(self.linear, device)

    def run_trees(
        self,
        layer: Any,
        trees: StateTrees,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        output: torch.Tensor,
        blocks: StateBlocks | None,
    ) -> None:
        from vllm_specplug.kernels import delta_tree_triton as kernels

        conv_states, states = layer_conv_states(layer), device_states(layer)
        # Indexing copies; the next layer reuses the memory of `mixed_qkv`.
        inputs = mixed_qkv[self.rows]
        weight = layer.conv1d.weight.flatten(1)
        mixed = kernels.tree_conv_triton(
            inputs,
            conv_states,
            trees.slots,
            self.window(trees, weight.shape[1]),
            weight,
            layer.conv1d.bias,
            silu=layer.activation in ("silu", "swish"),
        )
        key_size = states.shape[2]
        query, key, value, decays, strengths = kernels.tree_inputs_triton(
            mixed,
            a,
            b,
            self.rows,
            layer.A_log,
            layer.dt_bias,
            key_heads=layer.num_k_heads // layer.tp_size,
            key_size=key_size,
            value_size=states.shape[3],
            eps=NORM_EPS,
        )
        out, updates = kernels.tree_delta_rule_triton(
            query,
            key,
            value,
            decays,
            strengths,
            states,
            trees.starts,
            trees.parents,
            trees.slots,
            max_rows=self.max_rows,
            scale=key_size**-0.5,
        )
        kept = DeltaUpdates(key, updates, decays)
        self.pending.append(PendingLayer(conv_states, states, inputs, kept, trees, blocks))
        output[self.rows] = out.to(output.dtype)

    def apply_paths(
        self,
        last_rows: torch.Tensor,
        contexts: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> None:
        for layer in self.pending:
            if layer.blocks is not None and contexts is not None and lengths is not None:
                _write(layer, *self.block_ends(layer, last_rows, contexts, lengths))
            _write(layer, last_rows, layer.trees.slots)


def _write(layer: PendingLayer, rows: torch.Tensor, targets: torch.Tensor) -> None:
    """Writes the states after `rows` [R] of a layer's trees to the slots `targets` [R]."""
    from vllm_specplug.kernels import delta_tree_triton as kernels

    trees, updates = layer.trees, layer.updates
    kernels.commit_conv_triton(
        layer.conv_states, layer.inputs, trees.parents, trees.slots, rows, targets
    )
    kernels.commit_states_triton(
        layer.states,
        updates.keys,
        updates.updates,
        updates.decays,
        trees.parents,
        trees.slots,
        rows,
        targets,
    )


def device_states(layer: Any) -> torch.Tensor:
    """Returns a layer's states [S, Hv, K, V] in the layout of vLLM's device kernels (V, K)."""
    states: torch.Tensor = layer.kv_cache[1]
    return states.transpose(2, 3)


def warmup(layer: Any, num_rows: int, dtype: torch.dtype) -> None:
    """Compiles the kernels of a layer by running them over a tree of zeros.

    It uses the state of vLLM's null block, which no request reads.

    Args:
        dtype: of the layer's rows.
    """
    conv_states, states = layer_conv_states(layer), device_states(layer)
    device = states.device
    parents = torch.arange(-1, num_rows - 1, device=device)
    step = DeviceStateStep([RequestRows(0, 0, num_rows, 1)], parents)
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    output = torch.zeros((num_rows, states.shape[1], states.shape[3]), dtype=dtype, device=device)
    rows = torch.zeros((num_rows, conv_states.shape[2]), dtype=dtype, device=device)
    gates = torch.zeros((num_rows, states.shape[1]), dtype=dtype, device=device)
    trees = StateTrees(step.starts, step.parents, slots)
    step.run_trees(layer, trees, rows, gates, gates, output, None)
    step.commit(step.starts[1:] - 1)
