# SPDX-License-Identifier: Apache-2.0
"""Trees from the multi-token-prediction module that a target ships.

vLLM's own method `mtp` drafts chains with the same modules.
"""

from vllm_specplug.drafting.method import Capability, Method

METHOD = Method(
    name="mtp_tree",
    summary="the target's own multi-token-prediction module, level by level",
    options="vllm_specplug.methods.mtp_tree.options:MtpOptions",
    drafter="vllm_specplug.methods.mtp_tree.drafter:MtpDrafter",
    needs=frozenset(
        {
            Capability.OUTPUT_STATES,
            Capability.NEXT_TOKENS,
            Capability.CONTEXT_CACHE,
        }
    ),
    # The module is in the target's own checkpoint.
    needs_head=False,
    recognises="vllm_specplug.methods.mtp_tree.recognise:ships_mtp_module",
)
