# SPDX-License-Identifier: Apache-2.0
"""Trees of this plugin against the chains that vLLM's own method drafts with the same weights.

    python bench/own_chains.py --data PROMPTS [--method eagle3 | dflash] [--nodes 16]

vLLM's methods want a whole checkpoint: the shipped heads are given the target's LM head rows, and
the DFlash head's mask, a trained vector, in a file of its own. The plugin serves the shipped ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import BASELINE, HEADS, Benchmark, Cells
from speeds import ABOUT, add_load_flags, make_loads, speed_tables

from vllm_specplug.bench.result_page import ResultPage
from vllm_specplug.targets import cache_dir


@dataclass(frozen=True)
class Method:
    """A kind of head: what it is called, vLLM's method, the plugin's, the shipped head, and how
    many tokens the chains draft."""

    title: str
    own: str
    tree: str
    head: Path
    depths: tuple[int, ...]


METHODS = {
    "eagle3": Method("EAGLE-3", "eagle3", "eagle3_tree", HEADS / "smollm2-135m-eagle3", (2, 4)),
    "dflash": Method("DFlash", "dflash", "ddtree", HEADS / "smollm2-135m-dflash", (3, 7)),
}
# Of the target's special tokens one that no prompt holds; it stands for the DFlash head's mask.
MASK_TOKEN = 16


def whole_head(method: str, head: Path, target: str, folder: Path) -> Path:
    """The head as vLLM's own method loads it: with the target's rows as its LM head, and a DFlash
    head with its mask in `mask_embedding.pt`."""
    import torch
    from safetensors.torch import load_file, save_file

    from vllm_specplug.methods.block.checkpoint import load_block_head, save_block_head
    from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head, save_eagle3_head
    from vllm_specplug.train.target import TargetWeights

    weights = TargetWeights(target)
    table = weights.tables().lm_head
    if method == "eagle3":
        module, extras = load_eagle3_head(head, weights.config, dtype=torch.float32)
        ids, lm_head = extras.target_ids, extras.lm_head
        if lm_head is None:
            lm_head = table if ids is None else table[ids]
        save_eagle3_head(folder, module, target_ids=ids, lm_head=lm_head)
        return folder
    block, parts = load_block_head(head, weights.config)
    file = save_block_head(folder, block, d2t=parts.d2t)
    rows = table[parts.target_ids(block.config.draft_vocab_size)]
    save_file({**load_file(file), "lm_head.weight": rows.to(torch.bfloat16)}, file)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = MASK_TOKEN
    config["max_position_embeddings"] = weights.config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    mask = block.mask_embedding.detach().to(torch.bfloat16)
    torch.save({"embedding": mask, "mask_token_id": MASK_TOKEN}, folder / "mask_embedding.pt")
    return folder


def make_systems(
    method: Method, head: Path, whole: Path, nodes: int, depths: tuple[int, ...]
) -> dict[str, dict[str, Any] | None]:
    systems: dict[str, dict[str, Any] | None] = {BASELINE: None}
    shared = {"model": str(head), "ngram_topk": 0, "method": method.tree}
    for depth in depths:
        own = {"method": method.own, "model": str(whole), "num_speculative_tokens": depth}
        systems[f"vLLM's chain of {depth}"] = own
        budget = {"num_speculative_tokens": depth, "tree_budget": depth}
        systems[f"our chain of {depth}"] = {**shared, **budget, "tree_width": 1}
    budget = {"num_speculative_tokens": nodes, "tree_budget": nodes}
    systems[f"tree of {nodes}"] = {**shared, **budget}
    systems["tree, adaptive budget"] = {**shared, "num_speculative_tokens": nodes}
    return systems


def page(name: str, method: Method, cells: Cells) -> ResultPage:
    sections, data = speed_tables(cells)
    return ResultPage(
        name=name,
        title=f"{method.title} trees and vLLM's own chains",
        about=f"{ABOUT} One head.",
        sections=sections,
        data=data,
        made_by=[cell["provenance"] for cell in cells],
    )


def main() -> None:
    benchmark = Benchmark("own_chains", __doc__)
    benchmark.add_comparison_flags(minutes=6.0, rounds=2, tokens=64)
    add = benchmark.parser.add_argument
    add("--method", choices=list(METHODS), default="eagle3")
    add("--head", type=Path, help="default: the shipped one")
    add_load_flags(benchmark.parser)
    add("--nodes", type=int, default=16)
    add("--depths", type=int, nargs="+", help="of the chains; default: by method")
    args = benchmark.parse()
    method = METHODS[args.method]
    benchmark.name = f"own_{args.method}_chains"
    head, depths = args.head or method.head, tuple(args.depths or method.depths)
    if not args.report_only:
        # Written by a process of its own: this one is confined before it imports torch.
        # The same folder every time: a run that is started again knows its systems by it.
        folder = cache_dir() / "own_chains" / head.name
        _write_in_child(args.method, head, folder)
        benchmark.compare(
            args, make_systems(method, head, folder, args.nodes, depths),
            lambda target: make_loads(args, target),
            engine={"max_num_seqs": 8}, sampling={"max_tokens": args.tokens},
        )  # fmt: skip
    benchmark.publish(args, page(benchmark.name, method, benchmark.cells(args)))


def _write_in_child(method: str, head: Path, folder: Path) -> None:
    import subprocess
    import sys

    code = (
        "import json, sys; from pathlib import Path; from own_chains import whole_head\n"
        "from vllm_specplug.targets import prepare_target\n"
        "method, head, folder = json.loads(sys.argv[1])\n"
        "whole_head(method, Path(head), str(prepare_target('smollm2')), Path(folder))\n"
    )
    given = json.dumps([method, str(head.resolve()), str(folder)])
    subprocess.run(
        [sys.executable, "-c", code, given], check=True, cwd=Path(__file__).resolve().parent
    )


if __name__ == "__main__":
    main()
