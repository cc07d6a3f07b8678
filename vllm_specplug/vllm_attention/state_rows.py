# SPDX-License-Identifier: Apache-2.0
"""The tree rows of one step in layers that keep a recurrent state: Gated DeltaNet.

vLLM keeps one state per draft token and picks the last accepted one a step later. Here a sequence
has one committed state. All rows of a tree are computed from it. Their updates are kept until the
walk has chosen a path, and only that path is applied. No draft state exists between steps, so
vLLM's own code handles all other rows as without speculation.

Seam: state_rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadataBuilder

from vllm_specplug.kernels import (
    DeltaUpdates,
    StateTrees,
    commit_states,
    to_device,
    tree_conv,
    tree_delta_rule,
)
from vllm_specplug.vllm_attention.tree_rows import RequestRows

# Attribute of vLLM's metadata of such layers that carries `StateStep`.
STATE_STEP_ATTRIBUTE = "specplug_state_step"

# Attribute for `StateBlocks`, with prefix caching.
STATE_BLOCKS_ATTRIBUTE = "specplug_state_blocks"

# Attribute for the metadata's builder.
BUILDER_ATTRIBUTE = "specplug_state_builder"

# vLLM's CPU kernels add this to the sum of squares of a query or key.
NORM_EPS = 1e-5

# stock(layer, metadata, mixed_qkv, b, a, output)
Core = Callable[[Any, Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class TreeGDNBackend(GDNAttentionBackend):
    """Registered over `GDN_ATTN` in workers that draft trees for such a target."""

    @staticmethod
    def get_builder_cls() -> type[TreeGDNMetadataBuilder]:
        return TreeGDNMetadataBuilder


class TreeGDNMetadataBuilder(GDNAttentionMetadataBuilder):
    """vLLM's builder with speculation switched off, as there are no draft states to index."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if getattr(self.speculative_config, "plugin_method", None) is not None:
            self.use_spec_decode, self.num_spec, self.reorder_batch_threshold = False, 0, 1

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        # A full graph would be replayed without the step's trees.
        return AttentionCGSupport.NEVER

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kw: Any
    ) -> Any:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kw)
        setattr(metadata, BUILDER_ATTRIBUTE, self)
        if self.vllm_config.cache_config.mamba_cache_mode == "align":
            table, size = common_attn_metadata.block_table_tensor, self.kv_cache_spec.block_size
            setattr(metadata, STATE_BLOCKS_ATTRIBUTE, StateBlocks(table, size))
        return metadata


@dataclass(frozen=True)
class StateBlocks:
    """The state slots of a KV cache group: each full block keeps the state at its end, and the
    block of a step's last row the running state."""

    # [B, blocks] int32, 0 for none
    table: torch.Tensor
    size: int
    """Tokens of a block."""


@dataclass(frozen=True)
class LinearRows:
    """Rows that vLLM's own code computes, of requests without a tree."""

    # [T'] int64 rows of the forward, single rows that continue a state first
    rows: torch.Tensor
    # [B'] int64 requests of these rows
    requests: torch.Tensor
    # [B' + 1] int32
    starts: torch.Tensor
    # [B'] bool
    has_state: torch.Tensor
    num_decodes: int

    @classmethod
    def of(cls, requests: Sequence[RequestRows]) -> LinearRows | None:
        spans = [
            (index, r.first_row, r.end_row, r.num_computed > 0)
            for index, r in enumerate(requests)
            if not r.is_tree
        ]
        if not spans:
            return None
        spans.sort(key=lambda span: span[2] - span[1] > 1 or not span[3])
        counts = torch.tensor([end - first for _, first, end, _ in spans])
        return cls(
            rows=torch.cat([torch.arange(first, end) for _, first, end, _ in spans]),
            requests=torch.tensor([index for index, *_ in spans]),
            starts=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
            has_state=torch.tensor([has_state for *_, has_state in spans]),
            num_decodes=sum(
                1 for _, first, end, has_state in spans if has_state and end - first == 1
            ),
        )

    def metadata(self, stock: Any) -> Any:
        """Returns vLLM's metadata of a step that only has these rows, for its CPU kernels."""
        num_rows, decodes = len(self.rows), self.num_decodes
        return replace(
            stock,
            num_prefills=len(self.requests) - decodes,
            num_prefill_tokens=num_rows - decodes,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            num_actual_tokens=num_rows,
            has_initial_state=self.has_state,
            non_spec_query_start_loc=self.starts,
            non_spec_state_indices_tensor=stock.non_spec_state_indices_tensor[self.requests],
        )


@dataclass(frozen=True)
class PendingLayer:
    """The updates of one layer's states by its trees, pending until the walk."""

    # [S, W - 1, C] and [S, Hv, K, V], vLLM's
    conv_states: torch.Tensor
    states: torch.Tensor
    # [M, C]
    inputs: torch.Tensor
    updates: DeltaUpdates
    trees: StateTrees
    blocks: StateBlocks | None


class StateStep:
    """The trees of one step over their requests' states.

    Args:
        requests: all requests of the batch, in order; at least one has a tree. No rows precede a
            tree, and its request has a state: vLLM schedules drafts only after the full prompt.
        parents: int64 [M], as in `StateTrees`, over the rows of all trees.
    """

    def __init__(self, requests: Sequence[RequestRows], parents: torch.Tensor) -> None:
        drafting = [(i, r) for i, r in enumerate(requests) if r.is_tree]
        assert all(r.first_row == r.root_row and r.num_computed for _, r in drafting)
        counts = torch.tensor([r.end_row - r.root_row for _, r in drafting])
        self.max_rows = int(counts.max())
        self.starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        self.parents = parents
        self.rows = torch.cat([torch.arange(r.root_row, r.end_row) for _, r in drafting])
        self.requests = torch.tensor([i for i, _ in drafting])
        self.linear = LinearRows.of(requests)
        self.pending: list[PendingLayer] = []
        # By KV cache group, whose layers share one metadata object.
        self._groups: dict[int, tuple[Any, StateTrees, Any]] = {}
        self._windows: dict[int, torch.Tensor] = {}
        # By KV cache group, as `block_ends` returns them.
        self._ends: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _group(self, metadata: Any) -> tuple[Any, StateTrees, Any]:
        known = self._groups.get(id(metadata))
        if known is None:
            slots = metadata.non_spec_state_indices_tensor[self.requests].long()
            linear = None if self.linear is None else self.linear.metadata(metadata)
            # Keep the metadata alive: Python reuses the ids of dead objects.
            known = metadata, StateTrees(self.starts, self.parents, slots), linear
            self._groups[id(metadata)] = known
        return known

    def run(
        self,
        stock: Core,
        layer: Any,
        metadata: Any,
        # [T, C]
        mixed_qkv: torch.Tensor,
        # [T, Hv]
        b: torch.Tensor,
        a: torch.Tensor,
        # [T, Hv, V], written in place
        output: torch.Tensor,
    ) -> None:
        """Computes one layer."""
        _, trees, linear = self._group(metadata)
        if self.linear is not None:
            at = self.linear.rows
            own = torch.empty_like(output[: len(at)])
            stock(layer, linear, mixed_qkv[at], b[at], a[at], own)
            output[at] = own
        blocks = getattr(metadata, STATE_BLOCKS_ATTRIBUTE, None)
        self.run_trees(layer, trees, mixed_qkv, b, a, output, blocks)

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
        """Writes the trees' rows of a layer to `output`, without changing the states."""
        inputs, b, a = mixed_qkv[self.rows], b[self.rows], a[self.rows]
        conv_states, states = layer_states(layer)
        # Imported here, because every device imports this module, and this is a CPU kernel's.
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        weight = gdn_attention._unpacked_conv_weight(layer)
        mixed = tree_conv(
            torch.cat((conv_states[trees.slots].flatten(0, 1), inputs.to(conv_states.dtype))),
            self.window(trees, weight.shape[1]),
            weight,
            layer.conv1d.bias,
            silu=layer.activation in ("silu", "swish"),
        )
        query, key, value = (x.squeeze(0) for x in layer.rearrange_mixed_qkv(mixed))
        rates = torch.nn.functional.softplus(a.float() + layer.dt_bias.float())
        out, updates = tree_delta_rule(
            query,
            key,
            value,
            (-layer.A_log.float().exp() * rates).exp(),
            b.float().sigmoid(),
            states,
            trees,
            scale=key.shape[-1] ** -0.5,
            eps=NORM_EPS,
        )
        self.pending.append(PendingLayer(conv_states, states, inputs, updates, trees, blocks))
        output[self.rows] = out.to(inputs.dtype)

    def window(self, trees: StateTrees, width: int) -> torch.Tensor:
        """Returns `StateTrees.windows`, made once per step."""
        if width not in self._windows:
            self._windows[width] = trees.windows(width)
        return self._windows[width]

    def commit(
        self,
        last_rows: torch.Tensor,
        contexts: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> None:
        """Applies the accepted paths to the states of all layers.

        A path that reaches the end of a block leaves its state there as well, for prefix hits. It
        is shorter than a block (`check_state_blocks`), so that there is at most one.

        Args:
            last_rows: int64 [R] as in `commit_states`.
            contexts: int64 [R] tokens before each root; None for dummies.
            lengths: int64 [R] accepted nodes of each tree.
        """
        self.apply_paths(last_rows, contexts, lengths)
        # Breaks the reference cycle of step and metadata, without waiting for the collector.
        self.pending.clear()
        self._groups.clear()
        self._ends.clear()

    def apply_paths(
        self,
        last_rows: torch.Tensor,
        contexts: torch.Tensor | None,
        lengths: torch.Tensor | None,
    ) -> None:
        """Applies the paths to the layers, for `commit`."""
        for layer in self.pending:
            width = layer.conv_states.shape[1] + 1
            kept = layer.conv_states[layer.trees.slots].flatten(0, 1)
            known = torch.cat((kept, layer.inputs.to(kept.dtype)))
            windows = self.window(layer.trees, width)[:, 1:]
            if layer.blocks is not None and contexts is not None and lengths is not None:
                all_rows, all_slots = self.block_ends(layer, last_rows, contexts, lengths)
                ended = (all_slots >= 0).nonzero()[:, 0]
                rows, slots = all_rows[ended], all_slots[ended]
                if len(ended):
                    layer.conv_states[slots] = known[windows[rows]]
                    layer.states[slots] = layer.states[layer.trees.slots[ended]]
                    # A span also covers the rows of trees in between, which are not read.
                    starts = self.starts[[0, *ended[1:].tolist(), -1]]
                    trees = StateTrees(starts, self.parents, slots)
                    commit_states(layer.states, layer.updates, trees, rows)
            layer.conv_states[layer.trees.slots] = known[windows[last_rows]]
            commit_states(layer.states, layer.updates, layer.trees, last_rows)

    def block_ends(
        self,
        layer: PendingLayer,
        last_rows: torch.Tensor,
        contexts: torch.Tensor,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns int64 [R], the row of each tree that fills the block in which its path began, and
        the slot of that block; slot -1 for a tree whose path fills no block.

        Made once per KV cache group. Does not synchronise with the host.
        """
        assert layer.blocks is not None
        known = self._ends.get(id(layer.trees))
        if known is None:
            size = layer.blocks.size
            # Nodes of the path down to the row with a block's last position.
            depths = size - 1 - contexts % size
            slots = layer.blocks.table[self.requests].long()
            slots = slots.gather(1, (contexts // size)[:, None])[:, 0]
            # If the rows end with the block, its slot already holds the running state.
            is_full = (depths <= lengths) & (slots != layer.trees.slots) & (slots != 0)
            rows, above = last_rows, (lengths - depths).clamp_min(0)
            # By doubling: parents, grandparents, and so on.
            higher = self.parents
            for bit in range(max(1, (self.max_rows - 1).bit_length())):
                rows = torch.where((above >> bit) % 2 == 1, higher[rows], rows)
                higher = torch.where(higher < 0, higher, higher[higher.clamp_min(0)])
            known = rows.clamp_min(0), torch.where(is_full, slots, -1)
            self._ends[id(layer.trees)] = known
        return known


def warmup_step(
    num_rows: int,
    max_requests: int,
    tree_rows: int,
    make: type[StateStep],
    device: torch.device,
) -> StateStep:
    """Returns trees for a dummy forward, in which every node has two children.

    Args:
        max_requests: maximum number of trees.
        tree_rows: rows of a tree; more if `max_requests` trees are too few for `num_rows`.
        make: the device's `StateStep` class.
    """
    count = min(max_requests, -(-num_rows // tree_rows))
    ends = torch.linspace(0, num_rows, count + 1).round().long()
    requests = [RequestRows(a, a, b, 1) for a, b in itertools.pairwise(ends.tolist())]
    parents: list[torch.Tensor] = []
    for request in requests:
        rows = torch.arange(request.end_row - request.root_row)
        parents.append(torch.where(rows > 0, request.root_row + (rows - 1) // 2, -1))
    return make(requests, to_device(torch.cat(parents), device))


def layer_states(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a layer's convolution inputs [S, W - 1, C], oldest first, and states [S, Hv, K, V] in
    the layout of vLLM's CPU kernels."""
    states = layer.kv_cache[1]
    slots, heads, value_size, key_size = states.shape
    return layer_conv_states(layer), states.view(slots, heads, key_size, value_size)


def layer_conv_states(layer: Any) -> torch.Tensor:
    """Returns a layer's convolution inputs [S, W - 1, C], oldest first."""
    conv_states: torch.Tensor = layer.kv_cache[0]
    return conv_states.transpose(1, 2) if is_conv_state_dim_first() else conv_states


def row_bytes(layer: Any) -> int:
    """Returns the bytes that one tree row keeps in a layer until the walk."""
    (conv_shape, state_shape), dtypes = layer.get_state_shape()[:2], layer.get_state_dtype()
    heads, value_size, key_size = state_shape
    channels = max(conv_shape)
    key_heads = layer.num_k_heads // layer.tp_size
    return channels * dtypes[0].itemsize + 4 * (key_heads * key_size + heads * (value_size + 1))


def attach_state_step(attn_metadata: dict[str, Any], names: Sequence[str], step: StateStep) -> None:
    """Puts `step` on the metadata of the layers `names`."""
    for metadata in {id(m): m for m in (attn_metadata[name] for name in names)}.values():
        setattr(metadata, STATE_STEP_ATTRIBUTE, step)


def wrap_device_core(stock: Callable[..., None]) -> Callable[..., None]:
    """Wraps vLLM's core of a layer on a device; tree rows leave it. Seam: state_rows."""

    def core(
        layer: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        by_layer: Any = get_forward_context().attn_metadata
        metadata = by_layer.get(layer.prefix) if isinstance(by_layer, dict) else None
        step = getattr(metadata, STATE_STEP_ATTRIBUTE, None)
        if step is None:
            stock(layer, mixed_qkv, b, a, core_attn_out)
            return

        def linear_rows(layer: Any, linear: Any, *tensors: torch.Tensor) -> None:
            # vLLM's core reads its metadata from this dictionary.
            by_layer[layer.prefix] = linear
            try:
                stock(layer, *tensors)
            finally:
                by_layer[layer.prefix] = metadata

        step.run(linear_rows, layer, metadata, mixed_qkv, b, a, core_attn_out)

    return core


def wrap_cpu_core(stock: Core) -> Core:
    """Wraps vLLM's core of a layer on a CPU; tree rows leave it. Seam: state_rows."""

    def core(
        layer: Any,
        metadata: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        step = getattr(metadata, STATE_STEP_ATTRIBUTE, None)
        if step is None:
            stock(layer, metadata, mixed_qkv, b, a, output)
        else:
            step.run(stock, layer, metadata, mixed_qkv, b, a, output)

    return core
