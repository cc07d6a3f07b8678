# SPDX-License-Identifier: Apache-2.0
"""DeLS: a DFlash head whose marginals are corrected, branch by branch, by a local head.

The block head says what is likely at each depth given the context; the local head what follows
the branch's own drafted tokens. Both are fused as a product of experts (DeLS-Spec), and the fused
distribution of each branch drives the tree.
"""

from __future__ import annotations

import torch

from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.methods.dels.checkpoint import load_local_head
from vllm_specplug.methods.dels.unigram import UNIGRAM_SMOOTHING, load_unigram
from vllm_specplug.methods.local.drafter import LocalHeadDrafter
from vllm_specplug.methods.local.tree import LocalTreeBuilder


class DelsDrafter(LocalHeadDrafter):
    """Block head and local head; without weights it is the block head."""

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        super().load(target)
        options = self.options.settings
        local, local_ids = load_local_head(options.path, target.text_config)
        draft_ids = self.target_ids
        if draft_ids is None:
            draft_ids = torch.arange(self.config.vocab_size)
        log_prior = None
        if options.unigram_path is not None:
            counts = load_unigram(options.unigram_path)
            log_prior = counts.log_probs(self.config.vocab_size, UNIGRAM_SMOOTHING)
        # The paper's local heads read the target's own embeddings, whatever the block head ships.
        self.local_tree = LocalTreeBuilder(
            local,
            local_ids,
            draft_ids,
            log_prior,
            options,
            embed_tokens=target.embed_tokens,
            lm_head=target.lm_head,
            dtype=target.dtype,
        )
