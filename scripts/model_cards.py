# SPDX-License-Identifier: Apache-2.0
"""The model cards of the shipped heads: heads/*/README.md.

    python scripts/model_cards.py [--write]

Every number is one of the head's provenance.json or of its tensors.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from vllm_specplug.bench.tables import markdown_table  # noqa: E402
from vllm_specplug.drafting.head_files import read_head_files  # noqa: E402
from vllm_specplug.registry import get_method  # noqa: E402

HEADS = ROOT / "heads"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
GSM8K = ("gsm", "gsm8k")
SOURCES = {
    "code": "functions to complete and short programming tasks",
    "conversations": "joined conversations with the target",
    "document": "summaries of and questions about documentation",
    "documents": "documentation",
    "gsm": "questions of GSM8K's training set",
    "gsm8k": "questions of GSM8K's training set",
    "self": "user turns that the target wrote",
    "topic": "questions over topics in nine task families",
    "translation": "German sentences to translate",
}
MEASURES = {
    "chain": "chain",
    "backbone": "chain of the DFlash head alone",
    "dels": "chain corrected by this head",
    "dels, anchor fed": "the same, with the anchor as an input",
}


@dataclass(frozen=True)
class Card:
    """What the files of a head do not say.

    Attributes:
        note: page with the whole training, relative to the repository.
        results: pages with measurements of the head in a server.
        config: what `--speculative-config` has beside `method`; None for the head as `model`.
    """

    method: str
    note: str
    results: tuple[str, ...] = ()
    config: dict[str, str] | None = None


LIMITS = """\
- The head was trained on few tokens, for demonstrations and tests. Published heads have seen far
  more.
- Most of the data is English. Acceptance is lower for other languages, for texts full of names and
  numbers, and for words outside the draft vocabulary.
- The speed depends on the machine and on the number of requests: with many requests drafts gain
  little or nothing.
- Bias and factual errors are the target's."""
NOTE = "docs/notes/shipped_heads.md"
LOOKUPS = "bench/results/lookups.md"
CARDS = {
    "smollm2-135m-jetspec": Card("jetspec", f"{NOTE}#the-jetspec-head", (LOOKUPS,)),
    "smollm2-135m-dflash": Card(
        "ddtree",
        f"{NOTE}#the-dflash-head-and-its-local-heads",
        ("bench/results/own_dflash_chains.md",),
    ),
    "smollm2-135m-dspark": Card("dspark_tree", f"{NOTE}#the-dspark-head"),
    "smollm2-135m-eagle3": Card(
        "eagle3_tree",
        "docs/methods/eagle3_tree.md#training",
        ("bench/results/own_eagle3_chains.md",),
    ),
    "smollm2-135m-longspec": Card("longspec", "docs/methods/longspec.md#the-shipped-head"),
    "smollm2-135m-tokenswift": Card("tokenswift", "docs/methods/tokenswift.md#numbers"),
    **{
        f"smollm2-135m-dels-{kind}": Card(
            "dels",
            f"{NOTE}#the-dflash-head-and-its-local-heads",
            config={
                "model": "heads/smollm2-135m-dflash",
                "local_head": f"heads/smollm2-135m-dels-{kind}",
            },
        )
        for kind in ("gru", "markov")
    },
}


def front_matter(name: str, sources: dict[str, int]) -> str:
    """Returns the metadata by which model hubs list a head."""
    lines = [
        "license: apache-2.0",
        f"base_model: {BASE_MODEL}",
        "language: en",
        "library_name: vllm-specplug",
        "pipeline_tag: text-generation",
        "tags:",
        *(f"  - {tag}" for tag in ("speculative-decoding", "draft-model", CARDS[name].method)),
    ]
    if any(source in sources for source in GSM8K):
        lines += ["datasets:", "  - openai/gsm8k"]
    return "\n".join(["---", *lines, "---"])


def measure(name: str) -> str:
    """Returns in words what a key of `mean_acceptance_length` measures."""
    kind, _, nodes = name.partition("/")
    trees = {
        "best_first": "tree of",
        "heads": "the heads' tree of",
        "self": "the target's own tree, an upper bound, of",
    }
    return MEASURES[name] if not nodes else f"{trees[kind]} {nodes} nodes"


def start_of(name: str, made: dict[str, Any]) -> str:
    """Returns a sentence on the weights from which the training began."""
    if made.get("backbone"):
        return "The head was trained beside `smollm2-135m-dflash`."
    before = (made.get("init_from") or {}).get("name")
    if before in (name, "head"):
        return "The head continues an earlier run of itself."
    return f"The head started from {f'`{before}`' if before else 'layers of the target'}."


def card(name: str) -> str:
    """Returns the model card of a shipped head."""
    about = CARDS[name]
    made: dict[str, Any] = json.loads((HEADS / name / "provenance.json").read_text())
    tensors = read_head_files(HEADS / name).tensors.values()
    count = sum(math.prod(shape) for shape in tensors)
    config = {"method": about.method, **(about.config or {"model": f"heads/{name}"})}
    data, progress, heldout = made["data"], made["progress"], made["heldout"]
    sources = data.get("by_source", {})
    tokens = data.get("answer_tokens") or data["supervised_tokens"]
    kinds = [f"{n:,} x {SOURCES[source]}" for source, n in sources.items()]
    lengths = [
        (measure(key), f"{length:.2f}") for key, length in heldout["mean_acceptance_length"].items()
    ]
    results = ", ".join(f"[{Path(page).stem}](../../{page})" for page in about.results)
    served = f"Measured in a server: {results}." if results else "Its speed was not published."
    prepared = (
        "The target was prepared from a 4-bit GGUF file, so its answers are those of that file."
    )
    run = (
        f"{progress['step']:,} steps in {progress['training_minutes']:.0f} minutes on "
        f"{made['hardware']['cores']} core(s) of a CPU ({made['hardware']['cpu']}), with "
        f"{progress['slots_trained']:,} supervised slots"
    )
    parts = (
        front_matter(name, sources),
        f"# {name}",
        filled(f"""
            A draft head for [{BASE_MODEL}](https://huggingface.co/{BASE_MODEL}):
            {get_method(about.method).summary}. It has {count / 1e6:.2f} million parameters. The
            target verifies every drafted token, so the head changes the speed of generation and
            not its output."""),
        "## Intended use",
        filled(f"""
            Speculative decoding of this one target with [vllm-specplug](../../README.md), method
            [`{about.method}`](../../docs/methods/{about.method}.md). It generates no text alone,
            and it fits no other target. In the repository's folder:"""),
        "```\n"
        f"vllm serve \"$(specplug target smollm2)\" --speculative-config '{json.dumps(config)}'\n"
        "```",
        "## Training data",
        filled(f"""
            {data["sequences"]:,} texts with {tokens:,} tokens, which the target itself
            wrote{": " + "; ".join(kinds) if kinds else ""}. {prepared}"""),
        "## Training",
        filled(f"""
            {start_of(name, made)} The last run had {run}. [provenance.json](provenance.json) has
            its command, versions and recipe, and [this page](../../{about.note}) the whole
            training."""),
        "## Evaluation",
        filled(f"""
            Mean acceptance length (tokens per step, the target's own included) on
            {heldout["sequences"]} held-out greedy answers to prompts of the same kinds, estimated
            from the target's features:"""),
        markdown_table(("drafts", "tokens per step"), lengths),
        served,
        "## Limits",
        LIMITS,
    )
    return "\n\n".join(parts) + "\n"


def filled(text: str) -> str:
    """Returns a paragraph in lines of at most 120 characters."""
    words = " ".join(text.split())
    return textwrap.fill(words, 120, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    for name in CARDS:
        if "--write" in sys.argv[1:]:
            (HEADS / name / "README.md").write_text(card(name))
        else:
            print(card(name))


if __name__ == "__main__":
    main()
