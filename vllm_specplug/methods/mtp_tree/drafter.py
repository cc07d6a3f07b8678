# SPDX-License-Identifier: Apache-2.0
"""Multi-token-prediction trees: one forward of the module per level drafts all frontiers."""

from __future__ import annotations

import torch

from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.drafting.drafter import TargetWeights
from vllm_specplug.methods.eagle3_tree.drafter import StateDrafter
from vllm_specplug.methods.mtp_tree.checkpoint import load_mtp_module
from vllm_specplug.methods.mtp_tree.head import FusedMtpModule


class MtpDrafter(StateDrafter):
    """Drafter for the one-layer MTP module of a target's checkpoint."""

    @torch.inference_mode()
    def load(self, target: TargetWeights) -> None:
        assert self.options.head_path is not None
        module = load_mtp_module(self.options.head_path, target.text_config, target.dtype)
        biases = {
            name: tensor.to(target.device, torch.float32)
            for name, tensor in module.state_dict().items()
            if name.endswith("choice_bias")
        }
        module = module.to(device=target.device, dtype=target.dtype)
        # The biases of two experts may differ by less than bfloat16 can tell.
        module.load_state_dict(biases, strict=False, assign=True)
        self.reads_first = module.config.family == "qwen"
        self.take_tables(target)
        self.lm_head = target.make_lm_head(None)
        self.head = FusedMtpModule(
            module, self.options.max_model_len, target.make_linear, target.multiply_experts
        )
        self.begin_context(module.config.hidden_size)

    def target_outputs(self, committed: CommittedTokens) -> torch.Tensor:
        assert committed.output_states is not None
        return committed.output_states[committed.rows]

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embeds = super()._embed(token_ids, positions)
        if self.reads_first:
            return embeds
        # The others train their modules without the embedding of the token after the first one.
        return embeds.masked_fill((positions == 0).unsqueeze(-1), 0.0)
