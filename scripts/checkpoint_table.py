# SPDX-License-Identifier: Apache-2.0
"""The table in docs/checkpoints.md, and tables and commands in docs/recipes/.

    python scripts/checkpoint_table.py [--write]

Each head is made in a small size with the config and the tensor names of its format, and goes
through the checks of `specplug inspect`. Sizes are those of the configs as they are.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from safetensors.torch import save_file  # noqa: E402

from tests.e2e.fp8_modules import in_fp8, split_experts  # noqa: E402
from tests.e2e.mtp_modules import layer_tensors, module_tensors  # noqa: E402
from tests.unit.methods.assistant_tree import published as assistant  # noqa: E402
from tests.unit.methods.block import published as block  # noqa: E402
from tests.unit.methods.block.published_heads import PublishedHead, Shared  # noqa: E402
from tests.unit.methods.eagle3_tree import published as eagle3  # noqa: E402
from tests.unit.methods.hub_heads import RECIPES, HubHead  # noqa: E402
from tests.unit.methods.mtp_tree import published as mtp  # noqa: E402
from vllm_specplug.bench.tables import markdown_table, replace_between  # noqa: E402
from vllm_specplug.drafting.head_files import read_head_files  # noqa: E402
from vllm_specplug.drafting.method import TargetInfo  # noqa: E402
from vllm_specplug.registry import head_owners, recognise_head  # noqa: E402

PAGE = ROOT / "docs" / "checkpoints.md"
_START, _END = "<!-- checkpoints: scripts/checkpoint_table.py --write -->", "<!-- /checkpoints -->"
HEADER = ("head", "written by", "for", "method", "served", "remark")
RECIPE_PAGES = {name: ROOT / "docs" / "recipes" / f"{name}.md" for name in RECIPES}
_HEADS = "<!-- heads: scripts/checkpoint_table.py --write -->"
_END_HEADS = "<!-- /heads -->"
RECIPE_HEADER = (
    "head", "for", "method", "parameters", "bfloat16", "served", "config", "remark",
)  # fmt: skip
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
    "DEEPSPEC_DSPARK_GATED": ("DSpark, gated", "DeepSpec", "Qwen3-4B"),
    "DEEPSPEC_DSPARK_RNN": ("DSpark, recurrent", "DeepSpec", "Qwen3-4B"),
    "SPECFORGE_DSPARK_QWEN3_4B": ("DSpark", "SpecForge", "Qwen3-4B"),
    "SPECFORGE_DSPARK_QWEN3_8B": ("DSpark", "SpecForge", "Qwen3-8B"),
    "SPECFORGE_DSPARK_CAUSAL": ("DSpark, causal", "SpecForge", "Qwen3-8B"),
    "SPECFORGE_DSPARK_QWEN36_27B": ("DSpark", "SpecForge", "Qwen3.6-27B"),
    "SPECFORGE_DSPARK_DRAFT_VOCAB": ("DSpark, 32,000 draft tokens", "SpecForge", "Qwen3-8B"),
    "SPECULATORS_DSPARK": ("DSpark", "speculators", "Qwen3-8B"),
    "SPECULATORS_DSPARK_GATED": ("DSpark, gated", "speculators", "Qwen3-8B"),
    "SPECULATORS_DSPARK_RNN": ("DSpark, recurrent", "speculators", "Qwen3-8B"),
    "MODELOPT_DSPARK_QWEN3_8B": ("DSpark", "NVIDIA Model Optimizer", "Qwen3-8B"),
    "MODELOPT_DSPARK_GATED": ("DSpark, gated", "NVIDIA Model Optimizer", "Qwen3-8B"),
    "MODELOPT_DSPARK_RNN": ("DSpark, recurrent", "NVIDIA Model Optimizer", "Qwen3-8B"),
    "SPECFORGE_DOMINO_QWEN3_8B": ("Domino", "SpecForge", "Qwen3-8B"),
    "SPECFORGE_DOMINO_QWEN35_4B": ("Domino", "SpecForge", "Qwen3.5-4B"),
    "SPECFORGE_DOMINO_QWEN36_27B": ("Domino", "SpecForge", "Qwen3.6-27B"),
    "SPECFORGE_DSPINE_QWEN3_8B": ("DSpine", "SpecForge", "Qwen3-8B"),
    "MODELOPT_LILICORR_QWEN3_8B": ("LiLiCorr", "NVIDIA Model Optimizer", "Qwen3-8B"),
    "VLLM_XPRESS_QWEN3_8B": ("XPress", "vLLM", "Qwen3-8B"),
    "ANGELSLIM_DFLARE_QWEN3_4B": ("DFlare", "AngelSlim", "Qwen3-4B"),
}
EAGLE3_HEADS: dict[str, tuple[str, ...]] = {
    "EAGLE_LLAMA3_8B": ("EAGLE-3", "EAGLE", "Llama-3-8B"),
    "SPECFORGE_QWEN3_4B": ("EAGLE-3", "SpecForge", "Qwen3-4B"),
    "SPECFORGE_QWEN3_30B_EAGLE31": ("EAGLE-3.1", "SpecForge", "Qwen3-30B-A3B"),
    "SPECULATORS_GEMMA4_31B": ("EAGLE-3", "RedHatAI, speculators", "gemma-4-31B-it"),
    "SPECULATORS_QWEN3_8B_WINDOW": ("EAGLE-3 with a sliding window", "speculators", "Qwen3-8B"),
    "SPECULATORS_QWEN3_8B_LAYERS": ("EAGLE-3 with three layers", "speculators", "Qwen3-8B"),
    "SPECFORGE_PEAGLE_QWEN3_8B": (
        "P-EAGLE",
        "SpecForge",
        "Qwen3-8B",
        "add `mask_token_id` to its config.json: SpecForge does not write it",
    ),
    "SPECULATORS_PEAGLE_QWEN3_8B": ("P-EAGLE", "speculators", "Qwen3-8B"),
    "TORCHSPEC_GLM4_MOE": ("EAGLE-3 with experts", "TorchSpec", "GLM-4.5"),
    "MODELOPT_LLAMA31_8B": ("EAGLE-3", "NVIDIA Model Optimizer", "Llama-3.1-8B"),
    "ANGELSLIM_QWEN3_8B": ("EAGLE-3", "AngelSlim", "Qwen3-8B"),
    "DEEPSPEC_QWEN3_4B": ("EAGLE-3", "DeepSpec", "Qwen3-4B"),
    "SPECFORGE_QWEN25_VL_7B": ("EAGLE-3", "SpecForge", "Qwen2.5-VL-7B"),
}


ASSISTANTS = {
    "GEMMA4_E2B": ("assistant with groups", "Google", "gemma-4-E2B-it, E4B-it"),
    "GEMMA4_12B": ("assistant", "Google", "gemma-4-12B-it"),
    "GEMMA4_31B": ("assistant", "Google", "gemma-4-31B-it, 26B-A4B-it"),
}
MODULES: dict[str, tuple[str, ...]] = {
    "GLM_47_FLASH": ("the target's module, with MLA", "Z.ai", "GLM-4.7-Flash"),
    "DEEPSEEK_V3": (
        "the target's module, with MLA, in fp8",
        "DeepSeek",
        "DeepSeek-V3, R1",
        "takes 22 GiB on every rank",
    ),
    "GLM_45_AIR_FP8": ("the target's module, in fp8", "Z.ai", "GLM-4.5-Air-FP8"),
    "QWEN36_35B_A3B_FP8": ("the target's module, in fp8", "Qwen", "Qwen3.6-35B-A3B-FP8"),
}


def verdict(folder: Path, sizes: dict[str, int]) -> tuple[str, str, str]:
    """Returns the method of a head, whether it is served, and why not.

    Args:
        sizes: text config of a target that fits the head.
    """
    files = read_head_files(folder)
    owner = ", ".join(f"`{method.name}`" for method in head_owners(files))
    try:
        method = recognise_head(folder)
        method.parse_options({}).resolve(
            method.name, Shared(folder, 16, 8), TargetInfo(sizes, 64, None)
        )
    except ValueError as error:
        return owner, "no", _reason(str(error))
    return f"`{method.name}`", "yes", ""


def _reason(message: str) -> str:
    """Returns what a refusal says of the head: the text in brackets if there is one."""
    message = message.removeprefix("draft head config: ").partition("; correct")[0]
    in_brackets = re.search(r"\((.*)\)$", message)
    return message if in_brackets is None else in_brackets[1]


def make_block_head(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Writes a small head with a block head's config; returns the sizes of a target for it."""
    PublishedHead(folder, block.tiny(config))
    return block.TINY_TARGET


def make_eagle3_head(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Writes a small head with an EAGLE-3 head's config; returns the sizes of a target for it."""
    folder.mkdir(parents=True)
    raw = eagle3.small(config)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(eagle3.tensors_of(raw), folder / "model.safetensors")
    return eagle3.SMALL


def make_assistant(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Writes a small assistant; returns the sizes of a target for it."""
    folder.mkdir(parents=True)
    raw = assistant.small(config)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(assistant.tensors_of(raw), folder / "model.safetensors")
    return assistant.target_of(raw)


def make_module(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """Writes the module of a small target; returns the target's sizes."""
    folder.mkdir(parents=True)
    raw = mtp.small(config)
    (folder / "config.json").write_text(json.dumps(raw))
    sizes = raw.get("text_config", raw)
    tensors = module_tensors(sizes) if "num_experts" in sizes else layer_tensors(sizes)
    if "quantization_config" in raw:
        tensors, _ = in_fp8(split_experts(tensors), raw["quantization_config"])
    save_file(tensors, folder / "model.safetensors")
    return sizes


def make_hub_head(folder: Path, head: HubHead) -> dict[str, int]:
    """Writes a small head with the config of a head on a hub, as the functions above."""
    assert head.config is not None
    if head.is_assistant:
        return make_assistant(folder, head.config)
    make = make_block_head if head.is_block_head else make_eagle3_head
    return make(folder, head.config)


def rows() -> list[tuple[str, ...]]:
    """Returns a row per published config."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for heads, make, module in (
            (BLOCK_HEADS, make_block_head, block),
            (EAGLE3_HEADS, make_eagle3_head, eagle3),
            (ASSISTANTS, make_assistant, assistant),
            (MODULES, make_module, mtp),
        ):
            for name, (kind, writer, target, *remarks) in heads.items():
                path = Path(folder) / module.__name__ / name
                sizes = make(path, getattr(module, name))
                method, served, reason = verdict(path, sizes)
                remark = "; ".join(part for part in (reason, *remarks) if part)
                found.append((kind, writer, target, method, served, remark))
    return found


def table() -> str:
    return markdown_table(HEADER, rows())


def recipe(heads: Iterable[HubHead]) -> str:
    """Returns the table of a recipe's heads, then one block of commands per served head."""
    found, commands = [], []
    with tempfile.TemporaryDirectory() as folder:
        for head in heads:
            method, served, reason = "-", "-", ""
            if head.config is not None:
                path = Path(folder) / head.hub_id
                method, served, reason = verdict(path, make_hub_head(path, head))
            if head.refused:
                served, reason = "no", head.refused
            elif head.latent_target and served == "yes":
                reason = "MLA on CUDA was not run on a GPU"
            count = head.parameters() if served == "yes" else 0
            size = (f"{count / 1e9:.2f} B", f"{2 * count / 2**30:.2f} GiB") if count else "--"
            source = head.source if head.config is not None else "-"
            remark = "; ".join(part for part in (reason, head.remark) if part)
            found.append((
                f"`{head.hub_id}`", f"`{head.target}`", method, *size, served, source, remark,
            ))  # fmt: skip
            if count:
                config = json.dumps({"method": method.strip("`"), "model": head.hub_id})
                commands.append(
                    f"```\nhf download {head.hub_id}\n"
                    f"vllm serve {head.target} --speculative-config '{config}'\n```"
                )
    return "\n\n".join([markdown_table(RECIPE_HEADER, found), *commands])


def main() -> None:
    if "--write" not in sys.argv[1:]:
        print(table())
        return
    PAGE.write_text(replace_between(PAGE.read_text(), _START, _END, f"\n{table()}\n"))
    for name, page in RECIPE_PAGES.items():
        text = f"\n{recipe(RECIPES[name])}\n"
        page.write_text(replace_between(page.read_text(), _HEADS, _END_HEADS, text))


if __name__ == "__main__":
    main()
