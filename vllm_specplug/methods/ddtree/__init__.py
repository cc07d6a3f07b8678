# SPDX-License-Identifier: Apache-2.0
"""DDTree: trees over a DFlash head, bidirectional inside the block."""

from vllm_specplug.drafting.method import Method
from vllm_specplug.methods.block.options import BLOCK_NEEDS

METHOD = Method(
    name="ddtree",
    summary="bidirectional block head (DFlash) over target features, tree or chain",
    options="vllm_specplug.methods.block.options:BlockOptions",
    drafter="vllm_specplug.methods.block.drafter:BlockHeadDrafter",
    needs=BLOCK_NEEDS,
    recognises="vllm_specplug.methods.block.recognise:is_bidirectional_block_head",
    train_commands=("vllm_specplug.methods.block.train.options",),
    presets={"smollm2": {"model": "heads/smollm2-135m-dflash", "num_speculative_tokens": 16}},
)
