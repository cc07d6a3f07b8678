# SPDX-License-Identifier: Apache-2.0
"""Counts the unigram prior of DeLS over answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_specplug.methods.dels.unigram import save_unigram, tokenizer_fingerprint
from vllm_specplug.train.target import TargetWeights
from vllm_specplug.train.text import TextStore


def write_unigram(target: str | Path, data: str | Path, out: str | Path) -> dict[str, Any]:
    """Counts the tokens of answers, without prompts, and writes them with the fingerprint of the
    target's tokenizer. A JSON file of the same name describes the data.

    Raises:
        ValueError: for another file suffix, data without answers or of another tokenizer, and a
            target without a tokenizer.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"out = {str(out)!r}, legal: a file name *.safetensors; correct it")
    config = TargetWeights(target).config
    store = TextStore(data, min_supervised=1, repetitive_share=1.0)
    counts = store.answer_counts(int(config["vocab_size"]))
    fingerprint = tokenizer_fingerprint(load_tokenizer(target))
    save_unigram(out, counts, tokenizer=fingerprint)
    facts = {
        "target": Path(target).name,
        "tokenizer": fingerprint,
        "vocab_size": len(counts),
        "total_tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "sequences": len(store),
        "by_source": store.sources(),
    }
    out.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def load_tokenizer(target: str | Path) -> Any:
    """Returns the tokenizer of a target's folder."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(target))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"target {str(target)!r} has no tokenizer that can be read ({reason}); the counts "
            "must name theirs, so give the folder of the whole model"
        ) from None
