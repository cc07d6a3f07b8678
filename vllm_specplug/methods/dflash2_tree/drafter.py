# SPDX-License-Identifier: Apache-2.0
"""Drafts with a DFlash2 head, whose candidate selector scores pairs of neighbouring tokens.

With u_k the block's scores at depth k, h_k the slot's state and y the token of the branch at depth
k - 1 (the anchor at depth 0), the children of a node are the k = `selector_top_k` likeliest tokens
c of u_k with the scores

    u_k(c) + <A[y] * W h_k, B[c]>

with codebooks A and B and a projection W. This is a Markov head whose rank vectors A[y] are
multiplied by W h_k, so trees are built as for DSpark.
"""

from __future__ import annotations

import torch

from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.methods.block.checkpoint import BlockHeadExtras
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.dflash2_tree.checkpoint import load_dflash2_head
from vllm_specplug.methods.dflash2_tree.config import DFlash2Config
from vllm_specplug.methods.dspark_tree.drafter import DSparkDrafter


class DFlash2Drafter(DSparkDrafter):
    """Drafter for a DFlash2 checkpoint."""

    def load_head(self, target: TargetWeights) -> tuple[BlockHead, BlockHeadExtras]:
        assert self.options.head_path is not None
        head, extras, self.markov = load_dflash2_head(self.options.head_path, target.text_config)
        return head, extras

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        super().load(target)
        config = self.config
        assert isinstance(config, DFlash2Config)
        scale, cap = config.output_multiplier, config.final_logit_softcapping
        lm_head = self.lm_head
        if cap:
            self.lm_head = lambda x: (lm_head(x).float() * (scale / cap)).tanh() * cap
        elif scale != 1:
            self.lm_head = lambda x: lm_head(x).float() * scale
