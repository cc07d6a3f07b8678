# SPDX-License-Identifier: Apache-2.0
"""Counts the unigram prior of DeLS over answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_specplug.methods.dels.unigram import save_unigram
from vllm_specplug.train.target import TargetWeights
from vllm_specplug.train.text import TextStore


def write_unigram(target: str | Path, data: str | Path, out: str | Path) -> dict[str, Any]:
    """Counts the tokens of answers, without prompts, and writes them. A JSON file of the same name
    describes the data.

    Raises:
        ValueError: for another file suffix, and data without answers or of another vocabulary.
    """
    out = Path(out)
    if out.suffix != ".safetensors":
        raise ValueError(f"out = {str(out)!r}, legal: a file name *.safetensors; correct it")
    config = TargetWeights(target).config
    store = TextStore(data, min_supervised=1, repetitive_share=1.0)
    counts = store.answer_counts(int(config["vocab_size"]))
    save_unigram(out, counts)
    facts = {
        "target": Path(target).name,
        "vocab_size": len(counts),
        "total_tokens": int(counts.sum()),
        "distinct_tokens": int((counts > 0).sum()),
        "sequences": len(store),
        "by_source": store.sources(),
    }
    out.with_suffix(".json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts
