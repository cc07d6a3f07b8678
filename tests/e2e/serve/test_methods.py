# SPDX-License-Identifier: Apache-2.0
"""Each method behind `vllm serve`, by its name and with its defaults, over OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.harness import engine_args, run_engine
from tests.e2e.pair import head_options, own_target, target
from tests.e2e.served import MARK, Server
from vllm_specplug.bench.server import free_port
from vllm_specplug.registry import method_names

pytestmark = [pytest.mark.e2e, MARK]

ENGINE: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "trust_remote_code": True}
PROMPT = [7, 40, 41, 9]
PARAMS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48}


# test_serve.py serves jetspec's head.
@pytest.mark.parametrize("method", sorted({*method_names()} - {"jetspec"}))
def test_tokens_are_those_of_plain_vllm(method: str, tmp_path: Path) -> None:
    model = own_target(method).get("model", str(target()))
    spec = {"method": method, **head_options(method)}
    engine = engine_args(**ENGINE, model=model)
    plain = run_engine(engine, [{"prompts": [PROMPT], "params": {**PARAMS, "ignore_eos": True}}])
    port = free_port()
    command = [
        model, "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        "--max-num-seqs", "2", "--trust-remote-code", "--port", str(port),
        "--speculative-config", json.dumps(spec),
    ]  # fmt: skip
    extra = {
        "return_token_ids": True,
        "ignore_eos": True,
        # Drafts for certain: the default budget follows the clock.
        "vllm_xargs": {"specplug_tree_budget": 8},
    }
    with Server([command], port, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
        answer = client.completions.create(model=model, prompt=PROMPT, **PARAMS, extra_body=extra)
        assert answer.choices[0].model_extra["token_ids"] == plain.token_ids()[0]
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total")["0"] > 0
