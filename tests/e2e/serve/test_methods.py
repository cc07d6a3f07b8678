# SPDX-License-Identifier: Apache-2.0
"""Each method behind `vllm serve`, by its name and with its defaults, over OpenAI's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.assistants import make_followed_target
from tests.e2e.harness import DEFAULTS, chat_ids, engine_args, run_engine, target_path
from tests.e2e.mimo import make_mimo_target
from tests.e2e.served import MARK, Server
from tests.e2e.tiny import make_tokenizer
from vllm_specplug.bench.server import free_port
from vllm_specplug.registry import method_names

pytestmark = [pytest.mark.e2e, MARK]

ENGINE: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 2, "trust_remote_code": True}
PARAMS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48}


# test_serve.py serves jetspec's head.
@pytest.mark.parametrize("method", sorted({*method_names()} - {"jetspec"}))
def test_tokens_are_those_of_plain_vllm(method: str, tmp_path: Path) -> None:
    model, prompt = target_path(), chat_ids("Write a Python function that reverses a string.")
    if method == "mtp_tree":
        # The module is part of the target.
        folder = tmp_path / "mimo"
        folder.mkdir()
        model, prompt = str(make_mimo_target(folder, make_tokenizer(folder))), [7, 40, 41, 9]
    spec = DEFAULTS.get(method, {"method": method})
    if method == "assistant_tree":
        folder = tmp_path / "target"
        folder.mkdir()
        target, head = make_followed_target(tmp_path, make_tokenizer(folder))
        model, prompt, spec = str(target), [7, 40, 41, 9], {**spec, "model": str(head)}
    engine = engine_args(**ENGINE, model=model)
    plain = run_engine(engine, [{"prompts": [prompt], "params": PARAMS}])
    port = free_port()
    command = [
        model, "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
        "--max-num-seqs", "2", "--trust-remote-code", "--port", str(port),
        "--speculative-config", json.dumps(spec),
    ]  # fmt: skip
    # Drafts for certain: the default budget follows the clock.
    own = {"return_token_ids": True, "vllm_xargs": {"specplug_tree_budget": 8}}
    with Server([command], port, tmp_path) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)
        answer = client.completions.create(model=model, prompt=prompt, **PARAMS, extra_body=own)
        assert answer.choices[0].model_extra["token_ids"] == plain.token_ids()[0]
        assert server.metric("vllm:spec_decode_num_accepted_tokens_total")["0"] > 0
