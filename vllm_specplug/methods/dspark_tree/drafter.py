# SPDX-License-Identifier: Apache-2.0
"""DSpark: the block's scores of each depth plus a Markov head's, which reads the token before.

With l_k the block's scores at depth k and y the token of the branch at depth k - 1 (the anchor at
depth 0), a node's children have the distribution softmax(l_k + W_2 W_1[y]). That is a local head
with weight 1 and no prior, so trees are built as DeLS builds them.
"""

from __future__ import annotations

import torch

from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.methods.block.checkpoint import BlockHeadExtras
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head
from vllm_specplug.methods.local.drafter import LocalHeadDrafter
from vllm_specplug.methods.local.head import LocalHead
from vllm_specplug.methods.local.tree import LocalTreeBuilder


class DSparkDrafter(LocalHeadDrafter):
    """Block head and Markov head of one checkpoint; without the latter, the block head alone."""

    markov: LocalHead | None = None

    def load_head(self, target: TargetWeights) -> tuple[BlockHead, BlockHeadExtras]:
        assert self.options.head_path is not None
        head, extras, self.markov = load_dspark_head(
            self.options.head_path, target.text_config, causal=self.options.settings.causal
        )
        return head, extras

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        super().load(target)
        if self.markov is None:
            return
        draft_ids = self.target_ids
        if draft_ids is None:
            draft_ids = torch.arange(self.config.vocab_size)
        self.local_tree = LocalTreeBuilder(
            self.markov,
            draft_ids.cpu(),
            draft_ids,
            None,
            self.options.settings,
            embed_tokens=self.embed_tokens,
            lm_head=target.lm_head,
            dtype=target.dtype,
        )
