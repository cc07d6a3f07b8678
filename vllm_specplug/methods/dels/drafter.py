# SPDX-License-Identifier: Apache-2.0
"""Drafts with DeLS: a local head corrects the marginals of a DFlash head, branch by branch.

The block head predicts each depth from the context, the local head from the branch's own drafted
tokens. A product of experts fuses both (DeLS-Spec), and trees expand the fused distributions.
"""

from __future__ import annotations

import torch

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.methods.dels.checkpoint import load_local_head
from vllm_specplug.methods.dels.unigram import load_unigram, log_prior
from vllm_specplug.methods.local.drafter import LocalHeadDrafter
from vllm_specplug.methods.local.tree import LocalTreeBuilder


class DelsDrafter(LocalHeadDrafter):
    """Drafter for a DFlash head and a local head."""

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        super().load(target)
        options = self.options.settings
        local, local_ids = load_local_head(options.path, target.text_config)
        draft_ids = target_ids_or_all(self.target_ids, self.config.vocab_size)
        prior = None
        if options.unigram_path is not None:
            prior = log_prior(load_unigram(options.unigram_path), self.config.vocab_size)
        # The paper's local heads read the target's embeddings even if the block head ships its own.
        self.local_tree = LocalTreeBuilder(
            local,
            local_ids,
            draft_ids,
            prior,
            options,
            embed_tokens=target.embed_tokens,
            lm_head=target.lm_head,
            dtype=target.dtype,
        )
