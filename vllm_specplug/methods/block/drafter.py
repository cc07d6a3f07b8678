# SPDX-License-Identifier: Apache-2.0
"""Drafts with a block head: one forward drafts every depth of every tree.

The head sees the target's hidden states of all committed tokens (its context, cached in the
target's pages) and one block per request: the anchor token's embedding and mask embeddings.
Slot j gives the distribution of the token j positions after the anchor (j + 1 in heads that sample
from the anchor's slot), shared by all branches of that depth. The builder turns these marginals
into a tree by best-first expansion, which is DDTree's rule; JetSpec trees are built in the same
way. A `tree_width` of 1 gives DFlash's own chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from vllm_specplug.drafting.branch_drafter import BranchDrafter
from vllm_specplug.drafting.caches import DeviceCache, DraftCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.device_levels import MAX_LOGITS
from vllm_specplug.drafting.device_requests import DeviceRequests, DeviceTrees
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.late_context import LateContextDrafter
from vllm_specplug.drafting.ngram import ngram_branches
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels import build_best_first, can_build_best_first, top_candidates
from vllm_specplug.kernels.draft_rows import block_inputs
from vllm_specplug.kernels.local_tree import copies_no_logits
from vllm_specplug.methods.block.checkpoint import BlockHeadExtras, load_block_head
from vllm_specplug.methods.block.fused_head import FusedBlockHead
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.tree import DraftTree, build_tree

# Maximum number of draft logits at once if nothing copies them: 512 MiB in bfloat16. One product
# then reads the LM head's weights once.
_MAX_LOGITS_IN_PLACE = 1 << 28


def best_first_trees(
    # [R, D, K] target token ids of each depth, best first, and their log-probabilities
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    budgets: Sequence[int],
    depths: Sequence[int],
    widths: Sequence[int],
) -> list[DraftTree]:
    """Returns one tree per request from the candidates of its depths."""
    if can_build_best_first(token_ids.device) and min(widths) == max(widths):
        limits = (torch.tensor(values, dtype=torch.int32) for values in (budgets, depths))
        built = build_best_first(token_ids, log_probs, *limits, widths[0])
        return DraftTree.split(*(array.numpy() for array in built))
    ids, logps = token_ids.cpu().numpy(), log_probs.cpu().numpy()
    return [
        build_tree(ids[r], logps[r], budgets[r], tree_width=widths[r], tree_depth=depth)
        for r, depth in enumerate(depths)
    ]


def best_first_on_device(
    # [R, D, K] each, as for `best_first_trees`
    token_ids: torch.Tensor,
    log_probs: torch.Tensor,
    requests: DeviceRequests,
) -> DeviceTrees:
    """Returns the trees of `best_first_trees` without a read on the host."""
    from vllm_specplug.kernels.tree_builder_triton import build_best_first_triton

    built = build_best_first_triton(
        token_ids, log_probs, requests.budgets, requests.depths, requests.width, requests.num_nodes
    )
    return DeviceTrees(*built)


class BlockHeadDrafter(LateContextDrafter, BranchDrafter):
    """Block head of the JetSpec and DFlash family; causal or bidirectional by its config."""

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        head, extras = self.load_head(target)
        head = head.to(device=target.device, dtype=target.dtype)
        self.config = head.config
        embed = extras.embed_tokens if extras.embed_tokens is not None else target.embed_tokens
        # [V, H]
        self.embed_tokens = embed.to(device=target.device, dtype=target.dtype)
        self.masks_are_embedded = extras.mask_from_embedding
        if self.masks_are_embedded:
            head.mask_embedding.copy_(self.embed_tokens[self.config.mask_token_id])
        # [V'] target id of each draft id, where the draft vocabulary is reduced
        self.target_ids = extras.target_ids
        if self.target_ids is not None:
            self.target_ids = self.target_ids.to(target.device)
        self.lm_head = target.make_lm_head(self.target_ids, extras.lm_head)
        # V'
        self.vocab_size = len(self.embed_tokens if self.target_ids is None else self.target_ids)
        self.head = FusedBlockHead(head, self.options.max_model_len, target.make_linear)
        self.ngrams = ngram_branches(self.options)
        self.begin_backlog(target.device, self._write_context)

    def load_head(self, target: TargetWeights) -> tuple[BlockHead, BlockHeadExtras]:
        """Reads the checkpoint and checks it against its target."""
        assert self.options.head_path is not None
        return load_block_head(self.options.head_path, target.text_config)

    @torch.inference_mode()
    def follow_target(self, target: TargetWeights) -> None:
        if self.masks_are_embedded:
            self.head.mask_embedding.copy_(self.embed_tokens[self.config.mask_token_id])

    def cache_specs(self) -> list[DraftCacheSpec]:
        config = self.config
        return [
            DraftCacheSpec(config.num_key_value_heads, config.head_dim, window)
            for window in config.layer_windows
        ]

    def observe(self, committed: CommittedTokens) -> None:
        self.backlog.add(
            committed.layer_states(), committed.positions, committed.slots,
            req_ids=committed.req_ids, owners=committed.owners,
        )  # fmt: skip

    def _write_context(
        self, aux: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """aux [M, L*Ht], positions and slots int64 [M]."""
        keys, values = self.head.context_heads(aux, positions)
        self.cache.write(keys, values, slots)

    @property
    def forward_depth(self) -> int:
        return min(self.config.num_draft_tokens, self.options.tree_depth)

    def propose(self, requests: DraftRequests) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(requests)
        chosen, forward = requests.for_forward()
        if chosen:
            depths = [min(depth, self.forward_depth) for depth in forward.depths]
            for r, tree in zip(chosen, self._build(forward, depths), strict=True):
                trees[r] = tree
        return trees if self.ngrams is None else self.ngrams.add_to(trees, requests)

    @property
    def drafts_on_device(self) -> bool:
        return True

    @property
    def drafts_from_graphs(self) -> bool:
        return True

    @property
    def observes_from_graphs(self) -> bool:
        return True

    def depth_on_device(self, requests: DeviceRequests) -> int:
        """Returns the depth that a draft on the device needs."""
        depth = self.forward_depth
        return depth if requests.max_depth is None else min(depth, requests.max_depth)

    def propose_on_device(self, requests: DeviceRequests) -> DeviceTrees:
        candidates = self.candidates(requests, self.depth_on_device(requests), requests.width)
        return best_first_on_device(*candidates, requests)

    def _build(self, requests: DraftRequests, depths: list[int]) -> list[DraftTree]:
        """Returns the head's own trees."""
        widths = requests.widths
        candidates = self.candidates(requests, max(depths), max(widths))
        return best_first_trees(*candidates, requests.budgets, depths, widths)

    def candidates(
        self, requests: DraftRequests | DeviceRequests, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the `width` likeliest tokens of each depth.

        Returns:
            Target token ids int64 [R, depth, width], best first, and their natural
            log-probabilities float32 [R, depth, width].
        """
        ids, log_probs, _ = self.draft_candidates(requests, depth, width)
        return (ids if self.target_ids is None else self.target_ids[ids]), log_probs

    def draft_candidates(
        self, requests: DraftRequests | DeviceRequests, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns `candidates` with ids of the draft vocabulary, and the final normed states of the
        slots that drafted them [R, depth, H]."""
        if not isinstance(requests, DeviceRequests):
            self.backlog.write(requests.req_ids)
        num_reqs = len(requests)
        # A bidirectional block needs all slots that it was trained with, and convolutions see where
        # blocks begin by their size; another causal one may stop at the last depth that is read.
        first = self.config.first_slot
        causal = self.config.layer_causal
        rows = self.config.block_size
        if all(causal) and not self.config.conv_kernel_size:
            rows = depth + first
        device = self.embed_tokens.device
        if isinstance(requests, DeviceRequests):
            anchors, starts = requests.anchors, requests.context_lens
        else:
            anchors, starts = device_tensor([requests.anchors, requests.context_lens], device)
        # Depths are capped, so that no slot past the model's last position is used.
        block, positions = block_inputs(
            self.embed_tokens, self.head.mask_embedding, anchors, starts, rows,
            self.options.max_model_len - 1,
        )  # fmt: skip

        attend = cast(DeviceCache, self.cache).block_attention(
            requests, rows, causal[0] if len(set(causal)) == 1 else causal
        )
        hidden = self.head(block, positions, attend)
        hidden = hidden.unflatten(0, (num_reqs, rows))[:, first : first + depth]
        # In pieces: the logits of all requests would be the largest tensor of a step.
        max_logits = _MAX_LOGITS_IN_PLACE if copies_no_logits(device, width) else MAX_LOGITS
        pieces = hidden.flatten(0, 1).split(max(1, max_logits // self.vocab_size))
        parts = [top_candidates(self.lm_head(piece), width) for piece in pieces]
        ids, log_probs = (
            parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
        )
        shape = (num_reqs, depth)
        return ids.unflatten(0, shape), log_probs.unflatten(0, shape), hidden
