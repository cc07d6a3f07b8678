# SPDX-License-Identifier: Apache-2.0
"""DFlash2 heads under vLLM's own method and as trees of one branch: the same drafts, token for
token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Before vLLM: it puts Triton's interpreter in place.
from tests.e2e.cuda import cuda_device  # noqa: F401  # isort: skip

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.eagle3_chains import CHAIN, DEPTH, compare_in_batches_and_after_hits
from tests.e2e.pair import core_of, make_engine, target
from tests.e2e.tiny import make_dflash2_head
from vllm_specplug.train.target import TargetWeights

# vLLM drafts with these heads on its V2 model runner only, by Triton kernels.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.own_process(fresh=True, env={"SPECPLUG_INTERPRETED": "1"}),
]

# No prompt holds it.
MASK_TOKEN = 2


def make_heads(folder: Path, windows: tuple[int | None, ...]) -> tuple[Path, Path]:
    """A head as it is saved here, and with what vLLM's own method wants beside it. Drafts depend on
    all slots of a block, so it is as long as the chains."""
    weights = TargetWeights(target())
    vocab = int(weights.config["vocab_size"])
    ours = make_dflash2_head(folder / "ours", vocab, block_size=DEPTH + 1, windows=windows)
    tensors, config = load_file(ours / "model.safetensors"), (ours / "config.json").read_text()
    whole = folder / "whole"
    whole.mkdir()
    raw = json.loads(config)
    raw["dflash_config"]["mask_token_id"] = MASK_TOKEN
    raw["max_position_embeddings"] = weights.config["max_position_embeddings"]
    raw["is_causal"], raw["use_sliding_window"] = False, any(windows)
    (whole / "config.json").write_text(json.dumps(raw))
    mask = {"embedding": tensors.pop("mask_embedding"), "mask_token_id": MASK_TOKEN}
    torch.save(mask, whole / "mask_embedding.pt")
    tensors["lm_head.weight"] = weights.tables().lm_head.float()
    save_file(tensors, whole / "model.safetensors")
    return ours, whole


def show_drafts(llm: Any) -> None:
    """Shows the scheduler the drafts of vLLM's V2 model runner, which stay on the device."""
    core, drafts = core_of(llm), {}
    speculator = core.model_executor.driver_worker.worker.model_runner.speculator
    propose, schedule = speculator.propose, core.scheduler.schedule

    def noted(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        made = propose(input_batch, *args, **kwargs)
        drafts.update(zip(input_batch.req_ids, made.tolist(), strict=False))
        return made

    def shown(*args: Any) -> Any:
        output = schedule(*args)
        tokens = output.scheduled_spec_decode_tokens
        output.scheduled_spec_decode_tokens = {
            req_id: drafts[req_id][: len(tokens[req_id])] for req_id in tokens
        }
        return output

    speculator.propose, core.scheduler.schedule = noted, shown


@pytest.mark.parametrize("windows", [(None, None), pytest.param((24, 24), marks=pytest.mark.full)])
def test_chains_are_those_of_vllms_own_method(
    tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    """In a batch and after prefix hits."""
    ours, whole = make_heads(tmp_path, windows)
    engine: dict[str, Any] = {"async_scheduling": False, "enable_prefix_caching": True}
    own = {"method": "dflash", "model": str(whole), "num_speculative_tokens": DEPTH}
    engines = (
        make_engine(None, speculative_config=own, **engine),
        make_engine("dflash2_tree", speculative={**CHAIN, "model": str(ours)}, **engine),
    )
    show_drafts(engines[0])
    compare_in_batches_and_after_hits(engines)
