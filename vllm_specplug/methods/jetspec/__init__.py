# SPDX-License-Identifier: Apache-2.0
"""JetSpec: trees over a block head that is causal inside the block."""

from vllm_specplug.drafting.method import Method
from vllm_specplug.methods.block.options import BLOCK_NEEDS

METHOD = Method(
    name="jetspec",
    summary="causal block head over target features, tree by best-first expansion",
    options="vllm_specplug.methods.block.options:BlockOptions",
    drafter="vllm_specplug.methods.block.drafter:BlockHeadDrafter",
    needs=BLOCK_NEEDS,
    recognises="vllm_specplug.methods.block.recognise:is_causal_block_head",
    train_commands=("vllm_specplug.methods.block.train.options",),
    presets={"smollm2": {"model": "heads/smollm2-135m-jetspec", "num_speculative_tokens": 16}},
    is_default=True,
)
