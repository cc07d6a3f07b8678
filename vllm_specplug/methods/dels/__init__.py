# SPDX-License-Identifier: Apache-2.0
"""DeLS-Spec: a DFlash head corrected branch by branch by a local head."""

from vllm_specplug.drafting.method import Method
from vllm_specplug.methods.block.options import BLOCK_NEEDS

METHOD = Method(
    name="dels",
    summary="DFlash head fused with a short-context local head, branch by branch",
    options="vllm_specplug.methods.dels.options:DelsOptions",
    drafter="vllm_specplug.methods.dels.drafter:DelsDrafter",
    needs=BLOCK_NEEDS,
    train_commands=("vllm_specplug.methods.dels.train.options",),
    presets={
        "smollm2": {
            "model": "heads/smollm2-135m-dflash",
            "local_head": "heads/smollm2-135m-dels-gru",
            "num_speculative_tokens": 16,
        }
    },
)
