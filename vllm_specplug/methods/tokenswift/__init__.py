# SPDX-License-Identifier: Apache-2.0
"""TokenSwift: the target drafts for itself, for very long outputs."""

from vllm_specplug.drafting.method import Capability, Method

METHOD = Method(
    name="tokenswift",
    summary="the target over a partial cache, chained heads and n-grams, for long outputs",
    options="vllm_specplug.methods.tokenswift.options:TokenSwiftOptions",
    drafter="vllm_specplug.methods.tokenswift.drafter:TokenSwiftDrafter",
    needs=frozenset({Capability.HIDDEN_STATES, Capability.TARGET_FORWARD}),
    recognises="vllm_specplug.methods.tokenswift.recognise:is_tokenswift_head",
    train_commands=("vllm_specplug.methods.tokenswift.train.options",),
    presets={"smollm2": {"model": "heads/smollm2-135m-tokenswift", "num_speculative_tokens": 16}},
)
