# SPDX-License-Identifier: Apache-2.0
"""Trees from EAGLE-3 heads: one decoder layer, run level by level.

vLLM's own method `eagle3` drafts chains with the same heads.
"""

from vllm_specplug.drafting.method import Capability, Method

METHOD = Method(
    name="eagle3_tree",
    summary="EAGLE-3 head over target features and its own states, level by level",
    options="vllm_specplug.methods.eagle3_tree.options:Eagle3Options",
    drafter="vllm_specplug.methods.eagle3_tree.drafter:Eagle3Drafter",
    needs=frozenset(
        {
            Capability.HIDDEN_STATES,
            Capability.NEXT_TOKENS,
            Capability.CONTEXT_CACHE,
        }
    ),
    recognises="vllm_specplug.methods.eagle3_tree.recognise:is_eagle3_head",
    train_commands=("vllm_specplug.methods.eagle3_tree.train.options",),
    presets={"smollm2": {"model": "heads/smollm2-135m-eagle3", "num_speculative_tokens": 16}},
)
