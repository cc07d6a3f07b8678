# SPDX-License-Identifier: Apache-2.0
"""Reads assistants (safetensors only), with strict checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_specplug.drafting.checkpoint_files import check_tensors, load_module, module_shapes
from vllm_specplug.methods.assistant_tree.config import AssistantConfig
from vllm_specplug.methods.assistant_tree.head import AssistantHead
from vllm_specplug.methods.block.checkpoint import read_tensors

_ORDERING = "masked_embedding.token_ordering"
_LM_HEAD = "lm_head.weight"


def inspect_assistant(directory: str | Path, target_config: Any) -> AssistantConfig:
    """Checks an assistant against its target from its config and tensor headers.

    Arguments and errors are those of `load_assistant`.
    """
    return _read(Path(directory), target_config, headers_only=True)[0]


def load_assistant(directory: str | Path, target_config: Any) -> AssistantHead:
    """Reads an assistant.

    Raises:
        ValueError: for another target's assistant, missing, unexpected or misshapen tensors (all
            in one message), and groups that are not a permutation of the vocabulary.
    """
    config, tensors = _read(Path(directory), target_config, headers_only=False)
    own_head, embedding = tensors.get(_LM_HEAD), tensors["embed_tokens.weight"]
    if own_head is not None and not torch.equal(own_head.to(embedding.dtype), embedding):
        raise ValueError(
            f"draft head {str(directory)!r}: {_LM_HEAD} differs from the embedding, legal: an LM "
            "head that is tied to it. Use the assistant that is published for this target"
        )
    if config.centroids is not None:
        ordering = tensors[_ORDERING] = tensors[_ORDERING].long()
        if not torch.equal(ordering.sort().values, torch.arange(config.vocab_size)):
            raise ValueError(
                f"draft head {str(directory)!r}: {_ORDERING} is no permutation of the "
                f"{config.vocab_size} tokens; the checkpoint is damaged, fetch it again"
            )
    return load_module(lambda: AssistantHead(config), tensors)


def _read(
    directory: Path, target_config: Any, headers_only: bool
) -> tuple[AssistantConfig, dict[str, torch.Tensor]]:
    config = AssistantConfig.from_pretrained(directory)
    config.check_target(target_config)
    tensors = read_tensors(directory, headers_only=headers_only)
    expected = module_shapes(lambda: AssistantHead(config))
    # The LM head is tied to the embedding; some files hold it twice.
    check_tensors(f"draft head {str(directory)!r}", expected, tensors, ignored=(_LM_HEAD,))
    return config, tensors
