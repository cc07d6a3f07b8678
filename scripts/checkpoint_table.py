# SPDX-License-Identifier: Apache-2.0
"""The table in docs/checkpoints.md: which published draft heads are served.

    python scripts/checkpoint_table.py [--write]

Each head is made in a small size with the config and the tensor names of its format, and goes
through the checks of `specplug inspect`.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from safetensors.torch import save_file  # noqa: E402

from tests.unit.methods.block import published as block  # noqa: E402
from tests.unit.methods.block.published_heads import PublishedHead, Shared  # noqa: E402
from tests.unit.methods.eagle3_tree import published as eagle3  # noqa: E402
from vllm_specplug.bench.tables import markdown_table, replace_between  # noqa: E402
from vllm_specplug.drafting.head_files import read_head_files  # noqa: E402
from vllm_specplug.drafting.method import TargetInfo  # noqa: E402
from vllm_specplug.engine.spec_config import CAPABILITIES  # noqa: E402
from vllm_specplug.registry import head_owners, recognise_head  # noqa: E402

PAGE = ROOT / "docs" / "checkpoints.md"
_START, _END = "<!-- checkpoints: scripts/checkpoint_table.py --write -->", "<!-- /checkpoints -->"
HEADER = ("head", "written by", "for", "method", "CPU", "CUDA", "remark")
# Configs of `published`: kind, trainer or publisher, and target.
BLOCK_HEADS = {
    "ZLAB_QWEN3_8B": ("DFlash", "z-lab, SpecForge", "Qwen3-8B"),
    "ZLAB_MIXED": ("DFlash with sliding windows", "z-lab", "gemma-4-31B"),
    "DEEPSPEC_DFLASH_QWEN3_4B": ("DFlash", "DeepSpec", "Qwen3-4B"),
    "ANGELSLIM_DFLASH_QWEN3_4B": ("DFlash", "AngelSlim", "Qwen3-4B"),
    "SPECFORGE_DFLASH_KIMI": ("DFlash", "SpecForge", "Kimi-K2.7-Code"),
    "SPECULATORS_QWEN3_8B": ("DFlash", "speculators", "Qwen3-8B"),
    "SPECULATORS_JETSPEC": ("JetSpec", "speculators", "Qwen3-8B"),
    "ZLAB_DFLASH2_QWEN38_27B": ("DFlash2", "z-lab", "Qwen3.8-27B"),
    "INCO_DFLASH2_GLM53_FLASH": ("DFlash2", "Inco AI", "GLM-5.3-Flash"),
    "MUSE_DFLASH2_GLIMMER_30B": ("DFlash2", "unknown", "Muse-Glimmer-30B"),
    "LIGHTSEEK_DFLASH2_KIMI_K3": ("DFlash2", "lightseek", "Kimi-K3"),
    "SPECULATORS_DFLASH2": ("DFlash2", "speculators", "Qwen3-8B"),
    "DEEPSPEC_DSPARK_QWEN3_4B": ("DSpark", "DeepSpec", "Qwen3-4B"),
    "SPECFORGE_DSPARK_QWEN3_4B": ("DSpark", "SpecForge", "Qwen3-4B"),
    "SPECFORGE_DSPARK_QWEN3_8B": ("DSpark", "SpecForge", "Qwen3-8B"),
    "SPECFORGE_DSPARK_CAUSAL": ("DSpark, causal", "SpecForge", "Qwen3-8B"),
    "SPECFORGE_DSPARK_QWEN36_27B": ("DSpark", "SpecForge", "Qwen3.6-27B"),
    "SPECFORGE_DSPARK_DRAFT_VOCAB": ("DSpark, 32,000 draft tokens", "SpecForge", "Qwen3-8B"),
    "SPECULATORS_DSPARK": ("DSpark", "speculators", "Qwen3-8B"),
    "MODELOPT_DSPARK_QWEN3_8B": ("DSpark", "NVIDIA Model Optimizer", "Qwen3-8B"),
    "SPECFORGE_DOMINO_QWEN3_8B": ("Domino", "SpecForge", "Qwen3-8B"),
    "SPECFORGE_DOMINO_QWEN35_4B": ("Domino", "SpecForge", "Qwen3.5-4B"),
    "SPECFORGE_DSPINE_QWEN3_8B": ("DSpine", "SpecForge", "Qwen3-8B"),
    "MODELOPT_LILICORR_QWEN3_8B": ("LiLiCorr", "NVIDIA Model Optimizer", "Qwen3-8B"),
    "VLLM_XPRESS_QWEN3_8B": ("XPress", "vLLM", "Qwen3-8B"),
    "ANGELSLIM_DFLARE_QWEN3_4B": ("DFlare", "AngelSlim", "Qwen3-4B"),
}
EAGLE3_HEADS = {
    "EAGLE_LLAMA3_8B": ("EAGLE-3", "EAGLE", "Llama-3-8B"),
    "SPECFORGE_QWEN3_4B": ("EAGLE-3", "SpecForge", "Qwen3-4B"),
    "SPECFORGE_QWEN3_30B_EAGLE31": ("EAGLE-3.1", "SpecForge", "Qwen3-30B-A3B"),
    "SPECULATORS_GEMMA4_31B": ("EAGLE-3", "RedHatAI, speculators", "gemma-4-31B-it"),
    "MODELOPT_LLAMA31_8B": ("EAGLE-3", "NVIDIA Model Optimizer", "Llama-3.1-8B"),
    "ANGELSLIM_QWEN3_8B": ("EAGLE-3", "AngelSlim", "Qwen3-8B"),
    "DEEPSPEC_QWEN3_4B": ("EAGLE-3", "DeepSpec", "Qwen3-4B"),
    "SPECFORGE_QWEN25_VL_7B": ("EAGLE-3", "SpecForge", "Qwen2.5-VL-7B"),
}


def verdict(folder: Path, sizes: dict[str, int]) -> tuple[str, str, str, str]:
    """Returns the method of a head, whether a CPU and CUDA serve it, and why not.

    Args:
        sizes: text config of a target that fits the head.
    """
    files = read_head_files(folder)
    owner = ", ".join(f"`{method.name}`" for method in head_owners(files))
    try:
        method = recognise_head(folder)
        plan = method.parse_options({}).resolve(
            method.name, Shared(folder, 16, 8), TargetInfo(sizes, 64, None)
        )
    except ValueError as error:
        return owner, "no", "no", _reason(str(error))
    needs = method.needs | plan.needs
    served = ["yes" if needs <= CAPABILITIES[device] else "no" for device in ("cpu", "cuda")]
    return f"`{method.name}`", *served, ""


def _reason(message: str) -> str:
    """Returns what a refusal says of the head: the text in brackets if there is one."""
    message = message.removeprefix("draft head config: ").partition("; correct")[0]
    in_brackets = re.search(r"\((.*)\)$", message)
    return message if in_brackets is None else in_brackets[1]


def rows() -> list[tuple[str, ...]]:
    """Returns a row per published config."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, writer, target) in BLOCK_HEADS.items():
            head = PublishedHead(Path(folder) / name, block.tiny(getattr(block, name)))
            found.append((kind, writer, target, *verdict(head.folder, block.TINY_TARGET)))
        for name, (kind, writer, target) in EAGLE3_HEADS.items():
            path = Path(folder) / f"eagle3-{name}"
            path.mkdir()
            raw = eagle3.small(getattr(eagle3, name))
            (path / "config.json").write_text(json.dumps(raw))
            save_file(eagle3.tensors_of(raw), path / "model.safetensors")
            found.append((kind, writer, target, *verdict(path, eagle3.SMALL)))
    return found


def table() -> str:
    return markdown_table(HEADER, rows())


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    PAGE.write_text(replace_between(PAGE.read_text(), _START, _END, f"\n{table()}\n"))


if __name__ == "__main__":
    main()
