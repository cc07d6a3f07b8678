# SPDX-License-Identifier: Apache-2.0
"""Trees from DSpark and Domino heads: a low-rank Markov head or a recurrent head corrects the
block's scores, branch by branch.

vLLM's own method `dspark` drafts chains with DSpark heads whose Markov head is the plain one.
"""

from vllm_specplug.drafting.method import Method
from vllm_specplug.methods.block.options import BLOCK_NEEDS

METHOD = Method(
    name="dspark_tree",
    summary="block head with its own Markov or recurrent head (DSpark, Domino)",
    options="vllm_specplug.methods.dspark_tree.options:DSparkOptions",
    drafter="vllm_specplug.methods.dspark_tree.drafter:DSparkDrafter",
    needs=BLOCK_NEEDS,
    recognises="vllm_specplug.methods.block.recognise:is_markov_block_head",
    train_commands=("vllm_specplug.methods.dspark_tree.train.options",),
    presets={"smollm2": {"model": "heads/smollm2-135m-dspark", "num_speculative_tokens": 16}},
)
