# SPDX-License-Identifier: Apache-2.0
"""Parameters over HTTP, by vLLM's own request models and error handlers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.utils import api_utils

from vllm_specplug.engine import install

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    install()
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    init_exception_handler(app)

    @app.post("/chat", dependencies=[Depends(api_utils.validate_json_request)])
    async def chat(request: ChatCompletionRequest) -> dict[str, Any]:
        return {"vllm_xargs": request.vllm_xargs}

    with TestClient(app) as client:
        yield client


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"specplug_tree_budget": True}, "specplug_tree_budget=true is not usable: neither a n"),
        ({"specplug_tree_budget": False}, "specplug_tree_budget=false is not usable"),
        ({"specplug_tree_budget": None}, "specplug_tree_budget=null is not usable"),
        ({"specplug_tree_budget": {"a": 1}}, "specplug_tree_budget={'a': 1} is not"),
        ({"specplug_penalty": True}, "specplug_penalty=true is not usable"),
    ],
)
def test_values_that_would_be_read_as_others(
    client: TestClient, xargs: dict[str, Any], message: str
) -> None:
    answer = client.post("/chat", json={**CHAT, "vllm_xargs": xargs})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(message), error
    assert error["param"] == next(iter(xargs))


@pytest.mark.parametrize("xargs", [{"specplug_tree_budget": 1}, {"other": True}, {}, None])
def test_all_others_pass(client: TestClient, xargs: Any) -> None:
    answer = client.post("/chat", json={**CHAT, "vllm_xargs": xargs, "another": 1})
    assert answer.status_code == 200 and answer.json()["vllm_xargs"] == xargs


def test_vllms_own_check_of_the_body_stays(client: TestClient) -> None:
    answer = client.post("/chat", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 400
