# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of a small random target, and batches that use them."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.e2e.pair import Pair, target
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_adapter
from vllm_specplug.vllm_v2.step_input import verified_step

# What each changes: layers alone, the embedding too, and the LM head too.
MODULES = {
    "layers": ("q_proj", "v_proj", "down_proj"),
    "embedding": ("embed_tokens", "k_proj", "o_proj", "gate_proj"),
    "lm_head": ("lm_head", "up_proj"),
}
# A slot stays empty: on a CPU vLLM reads the last one for rows without an adapter.
LORA = {"enable_lora": True, "max_loras": len(MODULES) + 1, "max_lora_rank": 8}
CACHED = {"tree": {"enable_prefix_caching": True}}


@cache
def adapters() -> tuple[Any, ...]:
    """The bare target, and one request per adapter."""
    from vllm.lora.request import LoRARequest

    folder = Path(tempfile.mkdtemp(prefix="specplug-adapters-"))
    return None, *(
        LoRARequest(name, i, str(make_adapter(folder / name, target(), modules, seed=i)))
        for i, (name, modules) in enumerate(MODULES.items(), 1)
    )


def by_adapter(made: Pair) -> tuple[Counter[int], Counter[int]]:
    """Nodes and accepted drafts by LoRA id; grow as the pair runs."""
    runner, nodes, accepted = made.runner, Counter[int](), Counter[int]()
    record = runner.speculator.learn

    def recorded(*args: Any) -> Any:
        ids = runner.lora_state.lora_ids[args[0].idx_mapping_np]
        requests = verified_step(args[0], runner.speculator.trees, *args[1:3])
        for i, request in enumerate(requests):
            nodes[int(ids[i])] += 0 if request.tree is None else request.tree.num_nodes
            accepted[int(ids[i])] += len(request.accepted_path)
        return record(*args)

    runner.speculator.learn = recorded
    return nodes, accepted


def batch(prompts: list[list[int]], each: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Each prompt with each of these adapters; every other prompt's answers are sampled."""
    return {
        "prompts": [prompt for prompt in prompts for _ in each],
        "params": [
            seeded(p, **options) if p % 2 else greedy(**options)
            for p in range(len(prompts))
            for _ in each
        ],
        "adapters": list(each) * len(prompts),
    }
