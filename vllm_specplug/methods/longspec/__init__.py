# SPDX-License-Identifier: Apache-2.0
"""LongSpec: one draft layer, run level by level, with constant memory."""

from vllm_specplug.drafting.method import Capability, Method

METHOD = Method(
    name="longspec",
    summary="one layer over a window and the target's own cache, level by level",
    options="vllm_specplug.methods.longspec.options:LongSpecOptions",
    drafter="vllm_specplug.methods.longspec.drafter:LongSpecDrafter",
    needs=frozenset({Capability.WINDOW, Capability.TARGET_CACHE}),
    recognises="vllm_specplug.methods.longspec.recognise:is_longspec_head",
    train_commands=("vllm_specplug.methods.longspec.train.cli",),
    presets={"smollm2": {"model": "heads/smollm2-135m-longspec", "num_speculative_tokens": 16}},
)
