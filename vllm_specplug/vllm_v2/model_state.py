# SPDX-License-Identifier: Apache-2.0
"""vLLM's model state, of whatever class, with trees: attention metadata, rotary axes, states.

With prefix caching, each full block keeps the recurrent state at its end, and the block of a step's
last row holds the running state. That state moves there before the forward; the blocks that it
leaves keep their contents. vLLM moves states with Triton kernels that count one state per draft,
and here drafts have none (`vllm_attention.state_rows`).

Seams: model_state, state_blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_specplug.tree.step_trees import set_axes
from vllm_specplug.vllm_attention.state_rows import attach_state_step
from vllm_specplug.vllm_attention.tree_rows import put_rows
from vllm_specplug.vllm_v2.backend import TreeBackend
from vllm_specplug.vllm_v2.state_trees import state_step
from vllm_specplug.vllm_v2.step_context import StepContext

if TYPE_CHECKING:
    # A subclass of vLLM's `ModelState`.
    _State: Any
else:
    _State = object


def with_trees(
    model_state: Any,
    step: StepContext,
    backend: TreeBackend,
    layers: Mapping[str, Any],
    state_layers: Sequence[str],
    moves_states: bool,
) -> TreeModelState:
    """Returns vLLM's model state with `TreeModelState` mixed into its class. Both objects share all
    attributes.

    Args:
        layers: vLLM's static forward context.
        state_layers: names of the layers with a recurrent state.
        moves_states: whether prefix caching keeps these states at the ends of blocks.
    """
    stock = type(model_state)
    made: TreeModelState = object.__new__(
        type(f"Tree{stock.__name__}", (TreeModelState, stock), {})
    )
    made.__dict__ = vars(model_state)
    made.tree_step, made.tree_backend = step, backend
    made.tree_layers, made.tree_state_layers = layers, state_layers
    made.moves_tree_states = moves_states
    return made


class TreeModelState(_State):
    """The mixin that `with_trees` puts before vLLM's model state class."""

    tree_step: StepContext
    tree_backend: TreeBackend
    tree_layers: Mapping[str, Any]
    tree_state_layers: Sequence[str]
    moves_tree_states: bool

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step, backend = self.tree_step, self.tree_backend
        if step.has_dummy_rows:
            # vLLM marks dummy rows as padding, which gets no experts.
            input_batch.is_padding.fill_(False)
        rows = None
        is_dummy = kwargs.get("for_capture", False)
        is_graph = is_dummy or cudagraph_mode == CUDAGraphMode.FULL
        if is_graph and backend.captures_trees():
            # Before vLLM's own method, which changes the lengths when it captures.
            trees = None if is_dummy else step.trees
            rows = backend.graph_rows(trees, input_batch, block_tables)
        metadata = super().prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
        if rows is None:
            backend.attach(metadata, input_batch, step.trees, block_tables)
        else:
            put_rows(metadata, rows)
        if step.trees is not None and self.tree_state_layers:
            step.states = state_step(input_batch, step.trees, backend.state_step)
        states = step.states or step.warmup_states
        if states is not None:
            attach_state_step(metadata, self.tree_state_layers, states)
        return metadata

    def dummy_inputs_embeds(self, num_tokens: int) -> torch.Tensor | None:
        embeds: torch.Tensor | None = super().dummy_inputs_embeds(num_tokens)
        if embeds is not None and self.tree_step.has_dummy_rows:
            # vLLM's rows are equal, so they would all take the same experts.
            embeds.normal_()
        return embeds

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs(*args, **kwargs)
        # On several axes vLLM makes positions after `prepare_attn`; on one axis the batch has them.
        if self.tree_step.trees is not None and self.model_config.uses_mrope:
            set_axes(self.tree_step.trees, inputs["positions"])
        return inputs

    def preprocess_state(self, *args: Any, **kwargs: Any) -> None:
        if self.moves_tree_states and self.tree_backend.is_host:
            self._enter_blocks(*args, **kwargs)
        else:
            super().preprocess_state(*args, **kwargs)

    def postprocess_state(
        self, idx_mapping: Any, num_sampled: Any, *computed: Any, **kwargs: Any
    ) -> None:
        if not self.moves_tree_states:
            super().postprocess_state(idx_mapping, num_sampled, *computed, **kwargs)
        elif self.tree_backend.is_host:
            # vLLM copies nothing without the third argument.
            super().postprocess_state(idx_mapping, num_sampled)
        else:
            # Each sequence has one state, which already contains all accepted tokens, so vLLM's
            # kernels must count them as one.
            super().postprocess_state(idx_mapping, 1)

    def _enter_blocks(
        self,
        input_batch: Any,
        # by KV cache group, [>= B, blocks]
        block_tables: tuple[torch.Tensor, ...],
        kv_cache_config: Any,
        # [S] by request slot
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Copies each running state to the block of the step's last row."""
        count = input_batch.num_reqs
        groups = [
            (table[:count], group)
            for table, group in zip(block_tables, kv_cache_config.kv_cache_groups, strict=True)
            if isinstance(group.kv_cache_spec, MambaSpec)
        ]
        size = groups[0][1].kv_cache_spec.block_size
        slots = input_batch.idx_mapping[:count].long()
        ends = num_computed_tokens[slots] + input_batch.query_start_loc[: count + 1].diff()
        blocks = self._mamba_state_idx_gpu
        left, entered = blocks[slots].long(), (ends - 1).long() // size
        blocks[slots] = entered.to(blocks.dtype)
        moved = ((left >= 0) & (left != entered)).nonzero()[:, 0]
        if not len(moved):
            return
        for table, group in groups:
            source, target = (table[moved, at[moved]].long() for at in (left, entered))
            for name in group.layer_names:
                for state in self.tree_layers[name].kv_cache:
                    state[target] = state[source]
