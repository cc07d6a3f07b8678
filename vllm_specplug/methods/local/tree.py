# SPDX-License-Identifier: Apache-2.0
"""Trees from the product of a block head and a local head.

Shapes: R requests, D depths, M candidates of a depth, F nodes of a frontier, W children of a node,
V' draft vocabulary, r rank of the local head, Q terms of a slot that the local head reads.

For the branch b that reaches depth i - 1, and every candidate y of depth i,

    f(y | b) = l_i(y) + alpha_i s(y | b) - beta_i log p_uni(y)

with l_i the block head's scores, s the local head's scores after reading b, and p_uni the unigram
probability of y, which both scores contain (DeLS-Spec's fusion). The log-softmax of f is the
branch's distribution.

The local head scores only the M likeliest tokens of the block head, because lower ones cannot gain
enough. Their fused probabilities sum to the mass that the block head gave these M tokens. So scores
stay log-probabilities over the draft vocabulary, and weights of 0 give the block head's scores.

A confidence head lowers the scores of all children of a node by the same amount.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from vllm_specplug.drafting.device_levels import (
    DeviceExpand,
    DeviceFrontier,
    draft_levels_on_device,
    read_trees,
)
from vllm_specplug.drafting.device_requests import DeviceTrees
from vllm_specplug.drafting.requests import device_tensor
from vllm_specplug.kernels import (
    LocalTreeWeights,
    build_local_trees,
    can_build_local_trees,
    markov_weights,
    recurrent_weights,
)
from vllm_specplug.methods.local.head import ConfidenceHead, LocalHead
from vllm_specplug.methods.local.settings import LocalTreeSettings
from vllm_specplug.tree import DraftTree


class LocalTreeBuilder:
    """A local head, prepared for one target, draft vocabulary and fusion.

    Args:
        head: the local head.
        local_ids: int64, target id of each row of its output; None for the whole vocabulary.
        draft_ids: int64 [V'], target id of each draft id.
        log_prior: float32 [V] over the target's vocabulary; None if every beta is 0.
        options: weights and limits.
        embed_tokens: [V, H] of the target.
        lm_head: [V, H] of the target.
        dtype: of the products.
        confidence: the confidence head, if there is one.

    Raises:
        ValueError: if the local head does not score the whole draft vocabulary.
    """

    def __init__(
        self,
        head: LocalHead,
        local_ids: torch.Tensor | None,
        draft_ids: torch.Tensor,
        log_prior: torch.Tensor | None,
        options: LocalTreeSettings,
        *,
        embed_tokens: torch.Tensor,
        lm_head: torch.Tensor,
        dtype: torch.dtype,
        confidence: ConfidenceHead | None = None,
    ) -> None:
        device = embed_tokens.device
        self.options, self.confidence = options, confidence
        rows = None
        if head.config.lm_head_mode != "target_lm_head":
            rows = head.output_rows(draft_ids.cpu(), local_ids)
        self.draft_ids = draft_ids = draft_ids.to(device)
        self.embed_tokens = embed_tokens
        head = head.to(device)
        if rows is None:
            table = head.output_table(lm_head[draft_ids])
        else:
            table = head.output_table()[rows.to(device)]
        # [V', r]
        self.output_table = table.to(dtype).contiguous()
        self.head = head.to(dtype)
        # [V']
        self.log_prior = None
        if log_prior is not None:
            self.log_prior = log_prior.to(device)[draft_ids].contiguous()
        # [V'] by draft id
        self.token_confidence: torch.Tensor | None = None
        if confidence is not None:
            self.token_confidence = confidence.of_token[draft_ids].contiguous()
        # [D]
        self.alpha, self.beta = torch.tensor(options.alpha), torch.tensor(options.beta)
        self.weights: LocalTreeWeights | None = None
        if embed_tokens.device.type == "cpu" and can_build_local_trees(dtype):
            self.weights = self._compiled_weights()
        # [V', 3 S] input gates and [V] their rows, for the fused step on a GPU
        self.gates: torch.Tensor | None = None
        if device.type == "cuda":
            self._make_gates()

    @torch.inference_mode()
    def follow_target(self, lm_head: torch.Tensor) -> None:
        """Recomputes the tables that depend on the target's LM head [V, H] and `embed_tokens`.
        Tables that graphs read are updated in place."""
        if self.head.config.lm_head_mode == "target_lm_head":
            self.output_table.copy_(self.head.output_table(lm_head[self.draft_ids]))
        if self.weights is not None:
            self.weights = self._compiled_weights()
        if self.gates is not None:
            self.gates.copy_(self._input_gates())

    @property
    def is_idle(self) -> bool:
        """Whether all weights are 0, so that nothing is corrected."""
        return not any(self.options.alpha) and not any(self.options.beta)

    @torch.inference_mode()
    def build(
        self,
        # [R, D, M] draft ids, best first, and their log-probabilities under the block head
        ids: torch.Tensor,
        log_probs: torch.Tensor,
        anchors: Sequence[int],
        budgets: Sequence[int],
        depths: Sequence[int],
        width: int,
        # [R, D] float32 confidence logits of the slots, where the builder has a confidence
        slots: torch.Tensor | None = None,
        # [R, D, Q] terms of the slots, where the local head reads them
        terms: torch.Tensor | None = None,
        *,
        compiled: bool = True,
    ) -> list[DraftTree]:
        """Returns one tree per request, exactly best-first over the fused distributions.

        Without `compiled`, or without kernels for this CPU, it builds them as on a device, whose
        trees are read in one copy; tests compare the kernels with that.
        """
        if self.weights is None or not compiled:
            limits = device_tensor(np.array((anchors, budgets, depths)), ids.device)
            trees = self.build_on_device(
                ids[:, : max(depths)],
                log_probs,
                *limits,
                width=width,
                num_nodes=max(budgets),
                slots=slots,
                terms=terms,
            )
            return read_trees(trees)
        roots = None
        if self.head.config.anchor_input:
            # [R, 3 S] or [R, r]
            roots = self._root_inputs(torch.tensor(anchors))
        if terms is not None:
            parts = terms.float().unflatten(-1, (-1, self.head.config.rank))
            terms = F.pad(parts, (0, self.weights.rank - parts.shape[-1])).flatten(2)
        of_token, power = None, 0.0
        if self.confidence is not None and slots is not None:
            of_token, power = self.token_confidence, self.confidence.power
            # The kernel reads tokens by draft id, which an anchor may lack.
            slots = slots.clone()
            slots[:, 0] += self.confidence.of_token[list(anchors)]
        tokens, parents, node_depths, scores, counts = build_local_trees(
            self.weights,
            ids,
            log_probs,
            *(torch.tensor(values, dtype=torch.int32) for values in (budgets, depths)),
            width,
            self.alpha,
            self.beta,
            self.log_prior,
            roots,
            terms,
            slots,
            of_token,
            power,
        )
        token_ids = self.draft_ids[tokens.clamp_(0, len(self.draft_ids) - 1)].numpy()
        arrays = (parents, node_depths, scores, counts)
        return DraftTree.split(token_ids, *(array.numpy() for array in arrays))

    def build_on_device(
        self,
        # [R, D, M] draft ids, best first, and their log-probabilities under the block head
        ids: torch.Tensor,
        log_probs: torch.Tensor,
        # [R] int64
        anchors: torch.Tensor,
        # [R] each
        budgets: torch.Tensor,
        depths: torch.Tensor,
        *,
        width: int,
        num_nodes: int,
        slots: torch.Tensor | None = None,
        terms: torch.Tensor | None = None,
    ) -> DeviceTrees:
        """`build` without a read on the host, for all branches of a depth of all requests at once.

        Args:
            width: maximum children of a node.
            num_nodes: at least the largest budget.
            slots: [R, D] as in `build`.
            terms: [R, D, Q] as in `build`.
        """
        return draft_levels_on_device(
            anchors,
            budgets,
            depths,
            self._device_expander(ids, log_probs, min(width, ids.shape[-1]), slots, terms),
            num_levels=ids.shape[1],
            num_nodes=num_nodes,
            width=width,
            frontier_width=None,
        )

    def _device_expander(
        self,
        ids: torch.Tensor,
        log_probs: torch.Tensor,
        width: int,
        slots: torch.Tensor | None,
        terms: torch.Tensor | None,
    ) -> DeviceExpand:
        """Returns the function that expands frontiers by the fused distributions."""
        head, options, confidence = self.head, self.options, self.confidence
        states = ranks = torch.empty(0)

        def expand(frontier: DeviceFrontier) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal states, ranks
            depth, shape = frontier.depth, frontier.token_ids.shape
            read = frontier.token_ids.flatten()
            if depth == 0:
                states = head.initial_state(len(read))
            of_slot = None if terms is None else terms[:, depth]
            if depth:
                ranks, states = self._step(read, frontier.parent_rows, states, of_slot)
            elif head.config.anchor_input:
                ranks, states = head.step(read, states, self.embed_tokens, of_slot)
            # [R, M], [R, 1, M]
            candidates, own = ids[:, depth], log_probs[:, depth, None].float()
            fused = own.expand(*shape, -1)
            alpha, beta = options.alpha[depth], options.beta[depth]
            if alpha:
                table, local = self.output_table[candidates], ranks.unflatten(0, shape)
                fused = fused + alpha * (local @ table.mT).float()
            if beta:
                assert self.log_prior is not None
                fused = fused - beta * self.log_prior[candidates][:, None]
            if alpha or beta:
                # Rounding can sum a confident head's probabilities to more than 1.
                mass = own.logsumexp(-1, keepdim=True).clamp(max=0)
                fused = fused.log_softmax(-1) + mass
            if confidence is not None and slots is not None:
                logits = slots[:, depth, None] + confidence.of_token[frontier.token_ids]
                fused = fused + confidence.log_factors(logits)[..., None]
            # Stable: candidates with equal scores keep the block head's order.
            scores, order = fused.sort(dim=-1, descending=True, stable=True)
            order = order[..., :width]
            children = candidates[:, None].expand(*shape, -1).gather(2, order)
            return self.draft_ids[children], scores[..., :width]

        return expand

    def _make_gates(self) -> None:
        """Precomputes the input gates for the fused step, if the head is a GRU and they fit."""
        if self.head.config.kind != "gru":
            return
        w_ih = self.head.prefix_gru.weight_ih_l0
        size = len(self.draft_ids) * w_ih.shape[0] * w_ih.element_size()
        if size > self.options.gate_table_bytes:
            return
        self.gates = self._input_gates()
        self.gate_rows = torch.zeros(
            self.head.config.vocab_size, dtype=torch.int64, device=self.draft_ids.device
        )
        self.gate_rows[self.draft_ids] = torch.arange(
            len(self.draft_ids), device=self.draft_ids.device
        )
        # Compile both variants of the kernel, for few and for many nodes, before serving.
        for nodes in (1, 17):
            none = torch.zeros(nodes, dtype=torch.int64, device=self.gates.device)
            self._step(none, none, self.head.initial_state(1))

    def _input_gates(self) -> torch.Tensor:
        w_ih = self.head.prefix_gru.weight_ih_l0
        x = self.head.input_features(self.draft_ids, self.embed_tokens)
        return F.linear(x.to(w_ih.dtype), w_ih)

    def _step(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        states: torch.Tensor,
        terms: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads tokens [F] after the states of rows `parents` [F], with terms [R, Q] of slots, and
        returns rank vectors and new states."""
        if self.gates is None:
            states = states[parents.to(states.device)]
            return self.head.step(tokens, states, self.embed_tokens, terms)
        from vllm_specplug.kernels.gru_step_triton import gru_step_triton

        states = gru_step_triton(
            self.gate_rows[tokens],
            parents.to(device=states.device, dtype=torch.int32),
            states,
            self.gates,
            self.head.prefix_gru.weight_hh_l0,
        )
        return self.head.rank_of(states, terms), states

    def _compiled_weights(self) -> LocalTreeWeights:
        head, config = self.head, self.head.config
        if not config.hidden_size:
            return markov_weights(
                config.kind,
                self.output_table,
                head.input_features(self.draft_ids, self.embed_tokens),
                head.token_proj.weight if config.kind == "gated" else None,
            )
        # The input projection is folded into the input weights.
        features: torch.Tensor = self.embed_tokens
        w_ih, w_hh, rank_proj = self._recurrent_layers()
        if config.parameterization == "direct_vocab":
            features = head.embed_tokens.weight
        elif config.projects_input:
            w_ih = w_ih @ head.input_proj.weight
        return recurrent_weights(
            config.kind,
            self.output_table,
            w_ih,
            w_hh,
            rank_proj,
            silu=config.rank_activation == "silu",
            features=features,
            feature_rows=self.draft_ids,
            gate_table_bytes=self.options.gate_table_bytes,
        )

    def _recurrent_layers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns the weights of a head with a state: those that read a token's input [3 S, I] and
        the state [3 S, S], and those of the rank vector [r, S], None for an RNN."""
        head = self.head
        if head.config.kind == "rnn":
            return head.token_proj.weight, head.state_proj.weight, None
        gru = head.prefix_gru
        return gru.weight_ih_l0, gru.weight_hh_l0, head.rank_proj.weight

    def _root_inputs(self, anchors: torch.Tensor) -> torch.Tensor:
        """Returns the kernel's inputs for the anchors, float32 and padded like its weights."""
        assert self.weights is not None
        x = self.head.input_features(anchors, self.embed_tokens)
        if self.weights.state_size == 0:
            return F.pad(x.float(), (0, self.weights.rank - x.shape[-1]))
        w_ih = self._recurrent_layers()[0]
        gates = F.linear(x.to(w_ih.dtype), w_ih).float().unflatten(-1, (3, -1))
        return F.pad(gates, (0, self.weights.state_size - gates.shape[-1])).flatten(1)
