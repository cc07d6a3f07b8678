# SPDX-License-Identifier: Apache-2.0
"""Trees from DFlash2 heads: a candidate selector scores pairs of tokens of neighbouring depths.

vLLM's own method `dflash` drafts chains with the same heads.
"""

from vllm_specplug.drafting.method import Method
from vllm_specplug.methods.block.options import BLOCK_NEEDS

METHOD = Method(
    name="dflash2_tree",
    summary="block head with convolutions along the block and a selector of pairs of candidates",
    options="vllm_specplug.methods.dflash2_tree.options:DFlash2Options",
    drafter="vllm_specplug.methods.dflash2_tree.drafter:DFlash2Drafter",
    needs=BLOCK_NEEDS,
    recognises="vllm_specplug.methods.block.recognise:is_selector_block_head",
)
