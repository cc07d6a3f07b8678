# SPDX-License-Identifier: Apache-2.0
"""Resolves and checks the options of a local head before anything is started."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_specplug.methods.dels.checkpoint import inspect_local_head, resolve_local_head
from vllm_specplug.methods.dels.settings import DelsSettings, depth_weights
from vllm_specplug.methods.dels.unigram import (
    RELEASED_UNIGRAM_NAME,
    UNIGRAM_NAME,
    UNIGRAM_SMOOTHING,
    load_unigram,
    tokenizer_fingerprint,
)
from vllm_specplug.methods.local import LOCAL_CANDIDATES
from vllm_specplug.options import option_error

if TYPE_CHECKING:
    from vllm_specplug.methods.dels.options import DelsOptions

# Most memory of a GRU head's table of input gates; larger ones are computed in each step.
_GATE_TABLE_BYTES = 64 << 20

logger = logging.getLogger("vllm.specplug.config")


def resolve_settings(
    options: DelsOptions, tree_width: int, num_draft_tokens: int, model_config: Any
) -> DelsSettings:
    """The options of method dels with paths, defaults and weights worked out.

    Args:
        num_draft_tokens: depths the block head drafts.
        model_config: vLLM's config of the target.

    Raises:
        ValueError: for a local head or counts of another target, weights that make no sense, and
            a prior that is needed and missing.
    """
    assert options.local_head is not None
    text_config = model_config.hf_text_config
    config = inspect_local_head(options.local_head, text_config)
    file = resolve_local_head(options.local_head).resolve()
    anchor = config.anchor_input if options.anchor_input is None else options.anchor_input
    first_depth = 1 if anchor else 2
    alpha, beta = (
        depth_weights(name, getattr(options, name), num_draft_tokens, first_depth=first_depth)
        for name in ("alpha", "beta")
    )
    return DelsSettings(
        path=str(file),
        unigram_path=_unigram_path(options, file, model_config) if any(beta) else None,
        alpha=alpha,
        beta=beta,
        anchor_input=anchor,
        num_candidates=max(LOCAL_CANDIDATES, tree_width),
        gate_table_bytes=_GATE_TABLE_BYTES,
        causal=options.causal,
    )


def _unigram_path(options: DelsOptions, local_head: Path, model_config: Any) -> str:
    if options.unigram is not None:
        path = Path(options.unigram).expanduser()
    else:
        beside = [local_head.parent / name for name in (UNIGRAM_NAME, RELEASED_UNIGRAM_NAME)]
        found = [path for path in beside if path.is_file()]
        if not found:
            raise option_error(
                "unigram",
                None,
                f"beta is not 0, and there is no {UNIGRAM_NAME} next to the local head",
                'Make counts with `specplug data unigram` and give "unigram": "/path/to/counts", '
                'or set "beta": 0',
            )
        path = found[0]
    recorded = load_unigram(path)
    if recorded.tokenizer is not None:
        recorded = load_unigram(path, tokenizer=_target_tokenizer(model_config))
    # Counts of a larger vocabulary are refused here already.
    recorded.log_probs(int(model_config.hf_text_config.vocab_size), UNIGRAM_SMOOTHING)
    return str(path.resolve())


def _target_tokenizer(model_config: Any) -> str | None:
    """Fingerprint of the target's tokenizer; None when the engine runs without one."""
    if model_config.skip_tokenizer_init:
        return None
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            model_config.tokenizer,
            revision=model_config.tokenizer_revision,
            trust_remote_code=model_config.trust_remote_code,
        )
        return tokenizer_fingerprint(tokenizer)
    except Exception as error:
        # Tokenizers that transformers cannot read exist; the counts may still be right.
        logger.info("The unigram counts' tokenizer was not compared with the target's: %s", error)
        return None
