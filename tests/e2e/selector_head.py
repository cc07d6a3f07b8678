# SPDX-License-Identifier: Apache-2.0
"""A DFlash2 head for the shipped heads' target: no trained one is shipped."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.e2e.fork_server import REPO
from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.block.checkpoint import load_block_head, save_block_head
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.dflash2_tree.config import DFlash2Config

_TARGET = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}
_RANK = 16


def selector_head() -> Path:
    """Returns the folder of the shipped DFlash head with convolutions and a selector.

    Both change its scores a little, so that deep branches are accepted and pairs of tokens count.
    """
    folder = Path(os.environ["SPECPLUG_TESTS_SHARED"], "dflash2_head")
    if not (folder / "config.json").is_file():
        _make(folder)
    return folder


@torch.no_grad()
def _make(folder: Path) -> None:
    block, extras = load_block_head(REPO / "heads" / "smollm2-135m-dflash", _TARGET)
    selector = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": _RANK}
    config = DFlash2Config(**{**vars(block.config), **selector, "selector_top_k": 16})
    head, draw = BlockHead(config), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    # A new convolution returns its input.
    head.load_state_dict(block.state_dict(), strict=False)
    for name, parameter in head.named_parameters():
        if "_conv." in name:
            parameter.add_(random(*parameter.shape) * 0.003)
    # Scores of pairs of about 0.4.
    codebooks = (random(config.vocab_size, _RANK) * 0.3 for _ in range(2))
    projection = random(_RANK, config.hidden_size) / config.hidden_size**0.5
    ids = target_ids_or_all(extras.target_ids, config.vocab_size)
    extra = dict(zip(config.extra_tensors, (*codebooks, projection), strict=True))
    save_block_head(folder, head, extra=extra, target_ids=ids)
