# SPDX-License-Identifier: Apache-2.0
"""Drafts with a DSpark or Domino head: a Markov head, which reads the previous token, or a
recurrent head corrects the block.

With l_k the block's scores at depth k and y the token of the branch at depth k - 1 (the anchor at
depth 0), a node's children have the distribution softmax(l_k + W_2 W_1[y]). This is a local head
with weight 1 and no prior, so `LocalTreeBuilder` builds the trees, as for DeLS. Gated and recurrent
heads also read the state of the slot that drafts depth k.

A confidence head estimates c, the overlap of that distribution with the target's, from the slot's
state and W_1[y]. The drafter multiplies the probabilities of children by c to the power
`CONFIDENCE_POWER`, so that the budget goes to nodes where the head is right more often.
"""

from __future__ import annotations

import torch

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.drafting.requests import DraftRequests
from vllm_specplug.methods.block.checkpoint import BlockHeadExtras
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head
from vllm_specplug.methods.local.drafter import LocalHeadDrafter
from vllm_specplug.methods.local.head import ConfidenceHead, LocalHead
from vllm_specplug.methods.local.tree import LocalTreeBuilder


class DSparkDrafter(LocalHeadDrafter):
    """Drafter for a DSpark checkpoint: a block head with or without a Markov head."""

    markov: LocalHead | None = None
    confidence: ConfidenceHead | None = None

    def load_head(self, target: TargetWeights) -> tuple[BlockHead, BlockHeadExtras]:
        assert self.options.head_path is not None
        head, extras, self.markov, confidence = load_dspark_head(
            self.options.head_path, target.text_config
        )
        if confidence is not None:
            self.confidence = confidence.to(target.device)
        return head, extras

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        super().load(target)
        if self.markov is None:
            return
        draft_ids = target_ids_or_all(self.target_ids, self.config.vocab_size)
        self.local_tree = LocalTreeBuilder(
            self.markov,
            draft_ids.cpu(),
            draft_ids,
            None,
            self.options.settings,
            embed_tokens=self.embed_tokens,
            lm_head=target.lm_head,
            dtype=target.dtype,
            confidence=self.confidence,
        )

    def candidates(
        self, requests: DraftRequests | DeviceRequests, depth: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Only called without a Markov head: candidates do not depend on the branch.
        ids, log_probs, hidden = self.draft_candidates(requests, depth, width)
        if self.confidence is not None:
            logits = self.confidence.of_slots(hidden)
            log_probs = log_probs + self.confidence.log_factors(logits)[..., None]
        return self.to_target_ids(ids), log_probs
