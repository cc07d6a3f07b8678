# SPDX-License-Identifier: Apache-2.0
"""Published DFlash formats mean what their trainers meant, against the equations in plain torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.methods.block.published import (
    ANGELSLIM_DFLASH_QWEN3_4B,
    SPECFORGE_DFLASH_KIMI,
    SPECULATORS_QWEN3_8B,
    ZLAB_MIXED,
    ZLAB_QWEN3_8B,
    changed,
    tiny,
)
from tests.unit.methods.block.published_heads import PublishedHead
from vllm_specplug.registry import recognise_head

_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "mrope_interleaved": True}
_QUARTER = {"partial_rotary_factor": 0.25}
_LAYER = "transformer_layer_config"
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
            "use_sliding_window": True}  # fmt: skip

# Masks inside the block of both layers, and their windows.
PLAIN: tuple[list[bool], list[int | None]] = ([False, False], [None, None])
# By name: config, masks and windows.
HEADS: dict[str, tuple[dict[str, Any], list[bool], list[int | None]]] = {
    "zlab": (tiny(ZLAB_QWEN3_8B), *PLAIN),
    "angelslim": (tiny(ANGELSLIM_DFLASH_QWEN3_4B), *PLAIN),
    "zlab causal": (tiny(ZLAB_QWEN3_8B, is_causal=True), [True, True], [None, None]),
    "speculators": (tiny(SPECULATORS_QWEN3_8B), *PLAIN),
    # As Qwen3.6-27B's and gemma-4-31B's heads: sliding layers, and one that sees all.
    "mixed": (tiny(ZLAB_MIXED, sliding_window=6), [True, False], [6, None]),
    "mixed, stated": (
        tiny(ZLAB_MIXED, sliding_window=6, is_causal=False), [False, False], [6, None],
    ),
    "every layer by use_swa": (
        tiny(ZLAB_QWEN3_8B, dflash_config={"use_swa": True, "swa_window_size": 4}),
        [False, False],
        [4, 4],
    ),
    "speculators, sliding": (
        tiny(SPECULATORS_QWEN3_8B, **{_LAYER: _SLIDING}), [True, False], [6, None],
    ),
    "speculators, sliding, non-causal": (
        tiny(SPECULATORS_QWEN3_8B, sliding_window_non_causal=True, **{_LAYER: _SLIDING}),
        [False, False],
        [6, None],
    ),
    "linear": (tiny(ZLAB_QWEN3_8B, rope_scaling={"type": "linear", "factor": 4.0}), *PLAIN),
    "llama3": (tiny(ZLAB_QWEN3_8B, rope_scaling=_LLAMA3), *PLAIN),
    "yarn": (tiny(ZLAB_QWEN3_8B, rope_scaling=_YARN), *PLAIN),
    "yarn of kimi": (tiny(SPECFORGE_DFLASH_KIMI), *PLAIN),
    "yarn in parameters": (
        tiny(SPECULATORS_QWEN3_8B, **{_LAYER: {"rope_parameters": {**_YARN, "rope_theta": 1e4}}}),
        *PLAIN,
    ),
    "partial": (tiny(ZLAB_QWEN3_8B, partial_rotary_factor=0.5), *PLAIN),
    "biases": (tiny(ZLAB_QWEN3_8B, attention_bias=True), *PLAIN),
    # A draft is text, whose three positions are one.
    "mrope": (tiny(ZLAB_QWEN3_8B, partial_rotary_factor=0.5, rope_scaling=_MROPE), *PLAIN),
    "partial in parameters": (
        tiny(SPECULATORS_QWEN3_8B, **{_LAYER: {"rope_parameters": _QUARTER}}), *PLAIN,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_candidates_are_those_of_the_equations(name: str, tmp_path: Path) -> None:
    raw, causal, windows = HEADS[name]
    head = PublishedHead(tmp_path / "head", raw)
    kind = recognise_head(head.folder)
    assert kind.name == ("jetspec" if name == "zlab causal" else "ddtree")
    drafter, requests = head.drafter(kind)
    assert [spec.window for spec in drafter.cache_specs()] == windows
    ids, scores = drafter.candidates(requests, 4, 5)
    logits = head.logits(first=1, causal=False, causal_layers=causal, windows=windows)
    expected = logits.log_softmax(-1).topk(5)
    assert torch.equal(ids[0], head.target_ids[expected.indices])
    torch.testing.assert_close(scores[0].double(), expected.values, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["mixed", "yarn", "linear", "partial"])
def test_what_a_config_adds_changes_the_draft(name: str, tmp_path: Path) -> None:
    """The checks above would miss a setting that neither side computes."""
    raw, causal, windows = HEADS[name]
    plain, *_ = HEADS["zlab"]
    head = PublishedHead(tmp_path / "head", raw)
    base = PublishedHead(tmp_path / "plain", changed(plain, sliding_window=None))
    ours = head.logits(first=1, causal=False, causal_layers=causal, windows=windows)
    assert not torch.allclose(ours, base.logits(first=1, causal=False), atol=1e-2)


def test_unused_folders_of_a_jetspec_plus_plus_checkpoint_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its block head is a JetSpec head, and drafts as one."""
    caplog.set_level(logging.INFO)
    for kind, folders, said in (
        ("zlab causal", ("adapter", "calibration"), True),
        ("zlab causal", ("adapter",), False),
        ("zlab", ("adapter", "calibration"), False),
    ):
        head = PublishedHead(tmp_path / f"{kind}, {len(folders)}", HEADS[kind][0])
        plain, both = None, f"{head.folder}: adapter/ and calibration/ are not used"
        for extra in ((), folders):
            for name in extra:
                (head.folder / name).mkdir()
                save_file({"w": torch.zeros(2)}, head.folder / name / "model.safetensors")
            caplog.clear()
            drafter, requests = head.drafter(recognise_head(head.folder))
            (tree,) = drafter.propose(requests)
            plain = plain or tree.token_ids.tolist()
        messages = [record.getMessage() for record in caplog.records]
        assert any(message.startswith(both) for message in messages) == said
        assert tree.token_ids.tolist() == plain
