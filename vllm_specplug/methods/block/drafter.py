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

import torch

from vllm_specplug.drafting.caches import DraftCacheSpec
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.depth_drafter import DepthDrafter
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.late_context import LateContextDrafter
from vllm_specplug.drafting.requests import DraftRequests, device_tensor
from vllm_specplug.kernels.local_tree import copies_no_logits
from vllm_specplug.methods.block.checkpoint import BlockHeadExtras, load_block_head
from vllm_specplug.methods.block.fused_head import FusedBlockHead
from vllm_specplug.methods.block.head import BlockHead

# Maximum number of draft logits at once if nothing copies them: 512 MiB in bfloat16. One product
# then reads the LM head's weights once.
_MAX_LOGITS_IN_PLACE = 1 << 28


class BlockHeadDrafter(LateContextDrafter, DepthDrafter):
    """Block head of the JetSpec and DFlash family; causal or bidirectional by its config."""

    observes_from_graphs = True

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        head, extras = self.load_head(target)
        head = head.to(device=target.device, dtype=target.dtype)
        self.config = head.config
        self.take_tables(target, extras.target_ids, extras.embed_tokens)
        self.lm_head = target.make_lm_head(self.target_ids, extras.lm_head)
        self.masks_are_embedded = extras.mask_from_embedding
        if self.masks_are_embedded:
            head.mask_embedding.copy_(self.embed_tokens[self.config.mask_token_id])
        self.head = FusedBlockHead(head, self.options.max_model_len, target.make_linear)
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

    def candidates(
        self, requests: DraftRequests | DeviceRequests, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, log_probs, _ = self.draft_candidates(requests, depth, width)
        return self.to_target_ids(ids), log_probs

    def draft_candidates(
        self, requests: DraftRequests | DeviceRequests, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns `candidates` with ids of the draft vocabulary, and the final normed states of the
        slots that drafted them [R, depth, H]."""
        self.prepare_context(requests)
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
        block = self.head.mask_embedding.expand(num_reqs, rows, -1).clone()
        block[:, 0] = self.embed_tokens[anchors]
        # Depths are capped, so that no slot past the model's last position is used.
        positions = starts[:, None] + torch.arange(rows, device=device)
        positions = positions.clamp_(max=self.options.max_model_len - 1).flatten()
        attend = self.cache.block_attention(
            requests, rows, causal[0] if len(set(causal)) == 1 else causal
        )
        hidden = self.head(block.flatten(0, 1), positions, attend)
        hidden = hidden.unflatten(0, (num_reqs, rows))[:, first : first + depth]
        ids, log_probs = self.likeliest_draft_ids(hidden.flatten(0, 1), width)
        shape = (num_reqs, depth)
        return ids.unflatten(0, shape), log_probs.unflatten(0, shape), hidden

    def max_scores(self, width: int) -> int:
        if copies_no_logits(self.embed_tokens.device, width):
            return _MAX_LOGITS_IN_PLACE
        return super().max_scores(width)
