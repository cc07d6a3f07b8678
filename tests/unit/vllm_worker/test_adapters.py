# SPDX-License-Identifier: Apache-2.0
"""What docs/targets.md says of vLLM's LoRA layers on a CPU."""

from __future__ import annotations

import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def test_rows_without_an_adapter_read_the_last_slot() -> None:
    """While another row has an adapter; hence the advice to leave that slot empty."""
    wrapper = PunicaWrapperCPU(16, max_batches=4, device="cpu")
    a, b = torch.ones(2, 1, 4, 8), torch.ones(2, 1, 8, 4)
    for bare_rows, others in ((1, (7,)), (2, ())):
        mapping = LoRAMapping((0,) * bare_rows + others, (0,) * bare_rows + others, is_prefill=True)
        wrapper.update_metadata(mapping, [7, 9], 2, 32)
        for last in (0.0, 1.0):
            a[1], b[1] = last, last
            output = torch.zeros(2, 8)
            wrapper.add_lora_linear(output, torch.ones(2, 8), (a,), (b,), 1.0, (8,))
            leaks = bool(others) and last > 0
            assert bool(output[0].any()) == leaks
            assert bool(output[1].any()) == bool(others)
