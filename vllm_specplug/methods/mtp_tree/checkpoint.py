# SPDX-License-Identifier: Apache-2.0
"""Reading the module from its target's checkpoint, with strict checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import check_tensors
from vllm_specplug.methods.block.checkpoint import read_tensors
from vllm_specplug.methods.mtp_tree.config import MtpConfig
from vllm_specplug.methods.mtp_tree.head import MtpModule

# Of several modules the first: it predicts the token after next, and its own outputs lead further.
PREFIX = "mtp_layers.0."


def inspect_mtp_module(directory: str | Path, target_config: Any) -> MtpConfig:
    """Checks a module against its target from config and tensor headers, reading no weights; takes
    the arguments and raises the errors of `load_mtp_module`."""
    config = MtpConfig.from_pretrained(directory)
    config.check_target(target_config)
    _check(Path(directory), config, _read(Path(directory), headers_only=True))
    return config


def load_mtp_module(directory: str | Path, target_config: Any) -> MtpModule:
    """Reads the module in a target's checkpoint.

    Raises:
        ValueError: for a target that ships none, a module of another kind or another target's,
            tensors that are missing, unexpected or misshapen (all in one message).
    """
    config = inspect_mtp_module(directory, target_config)
    tensors = _read(Path(directory), headers_only=False)
    with torch.device("meta"):
        module = MtpModule(config)
    module.load_state_dict(tensors, assign=True)
    return module.requires_grad_(False).eval()


def _read(directory: Path, headers_only: bool) -> dict[str, torch.Tensor]:
    found = read_tensors(directory, headers_only=headers_only, prefixes=(PREFIX,))
    return {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}


def _check(directory: Path, config: MtpConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.device("meta"):
        expected = {k: tuple(v.shape) for k, v in MtpModule(config).state_dict().items()}
    check_tensors(f"module model.{PREFIX}* of {str(directory)!r}", expected, tensors)
