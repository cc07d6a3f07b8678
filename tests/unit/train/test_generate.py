# SPDX-License-Identifier: Apache-2.0
"""The engine that answers prompts is asked for no more memory than it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from typer.testing import CliRunner

from tests.unit.train.chat_targets import chat_target, word_tokenizer
from vllm_specplug.rows import Conversation, LeftOut
from vllm_specplug.train import generate
from vllm_specplug.train.answers import read_plan
from vllm_specplug.train.chat import ChatTokenizer
from vllm_specplug.train.cli import data_app
from vllm_specplug.train.generate import VllmGenerator, render_all

runner = CliRunner()


class Engine:
    """Notes what vLLM would read of the environment."""

    def __init__(self, target: str, **options: Any) -> None:
        self.kv_cache_gib = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
        self.options = options

    def generate(self, prompts: Any, params: Any, **options: Any) -> Any:
        """A short turn, a cut one, a cut one without a sentence, and a good one."""
        assert len({p.seed for p in params}) == len(prompts) == 4
        texts = ["Hi.", "A question? An answer. And th", "no end of this", " How are you?  "]
        stops = ("stop", "length", "length", "stop")
        return [
            SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=stop)])
            for text, stop in zip(texts, stops, strict=True)
        ]


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("6", "6")])
def test_the_engine_has_a_kv_cache_and_reads_the_longest_prompt_at_once(
    monkeypatch: pytest.MonkeyPatch, given: str | None, used: str
) -> None:
    # Set first, so that what the generator sets is taken back as well.
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", given or "")
    if given is None:
        del os.environ["VLLM_CPU_KVCACHE_SPACE"]
    monkeypatch.setattr(vllm, "LLM", Engine)
    chat = ChatTokenizer(word_tokenizer("plain"))
    engine: Any = VllmGenerator("somewhere", chat, max_prompt_tokens=5000, max_tokens=100).llm
    assert engine.kv_cache_gib == used
    options = engine.options
    assert (options["max_model_len"], options["max_num_batched_tokens"]) == (5100, 5100)


def test_the_target_writes_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "LLM", Engine)
    made = VllmGenerator("somewhere", ChatTokenizer(word_tokenizer("plain"))).user_turns(4, 0)
    texts = [prompt.messages[-1]["content"] for prompt in made]
    assert texts == ["A question? An answer.", "How are you?"]


def test_long_prompts_are_counted_with_their_places() -> None:
    chat, left_out = ChatTokenizer(word_tokenizer("plain")), LeftOut()
    prompts = [
        Conversation(({"role": "user", "content": " ".join(["w9"] * n)},), place=f"a.jsonl:{n}")
        for n in (2, 9, 1)
    ]
    kept = list(render_all(prompts, chat, 6, left_out))
    assert [len(ids) for _, ids in kept] == [5, 4]
    assert left_out.places == {"prompt of more than 6 tokens": ["a.jsonl:9"]}


class Generator:
    """Answers every prompt with four tokens."""

    made: list[dict[str, Any]] = []

    def __init__(self, target: Any, chat: Any, **options: Any) -> None:
        self.made.append(options)

    def __call__(self, requests: Any) -> Any:
        return [([9, 10, 11, 2], True) for _ in requests]


def test_a_base_model_writes_no_turns_of_users(tmp_path: Path, target_folder: Path) -> None:
    target = chat_target(tmp_path / "chat", target_folder, None)
    command = ["generate", "--target", str(target), "--out", str(tmp_path / "data")]
    result = runner.invoke(data_app, [*command, "--make", "3"])
    assert result.exit_code == 2
    assert "--make 3, legal: 0, because the target has no chat template" in result.stderr


@pytest.mark.parametrize("template", ["plain", None])
def test_prompts_of_any_length_are_answered_also_by_base_models(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch, template: str | None
) -> None:
    monkeypatch.setattr(generate, "VllmGenerator", Generator)
    Generator.made.clear()
    target = chat_target(tmp_path / "chat", target_folder, template)
    rows = [
        {"prompt": "w9 " * 200},
        {"prompt": "w10"},
        {"question": "w10"},
        {"prompt": "w11 " * 240},
        {"other": 1},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["generate", "--target", str(target), "--prompts", str(path), "--max-tokens", "40"]
    result = runner.invoke(data_app, [*command, "--out", str(tmp_path / "data")])
    assert result.exit_code == 0, result.output
    assert "1 repeated prompts left out" in result.stderr
    # The context of 256 tokens, without the answer's.
    assert f"1 x prompt of more than 216 tokens: {path}:4" in result.stderr.replace("\n", "")
    assert f"{path}:5" in result.stderr.replace("\n", "")
    framed = 0 if template is None else 3
    lengths = sorted(len(r.prompt_ids) for r in read_plan(tmp_path / "data"))
    assert lengths == [1 + framed, 200 + framed]
    assert Generator.made[0]["max_prompt_tokens"] == 200 + framed
    result = runner.invoke(
        data_app, [*command, "--out", str(tmp_path / "less"), "--max-prompt-tokens", "100"]
    )
    assert result.exit_code == 0, result.output
    assert "2 x prompt of more than 100 tokens" in result.stderr.replace("\n", "")
    assert len(read_plan(tmp_path / "less")) == 1


def test_a_finished_folder_is_refused_for_other_settings(
    tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "VllmGenerator", Generator)
    target = chat_target(tmp_path / "chat", target_folder, "plain")
    for name in ("mine", "other"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "w9"}) + "\n")
    own = {"target": target, "out": tmp_path / "data", "prompts": tmp_path / "mine.jsonl",
           "max-tokens": 40}  # fmt: skip

    def run(**changed: Any) -> Any:
        options = {**own, **{name.replace("_", "-"): value for name, value in changed.items()}}
        return runner.invoke(data_app, ["generate", *(f"--{k}={v}" for k, v in options.items())])

    for told in ("new answer tokens in", "all 1 answers of the plan are in"):
        result = run()
        assert result.exit_code == 0 and told in result.stdout, result.output
    for field, changed in (
        ("target", {"target": tmp_path}),
        ("files", {"prompts": tmp_path / "other.jsonl"}),
        ("num_made", {"make": 2}),
        ("max_tokens", {"max_tokens": 41}),
        ("sampled_share", {"sampled_share": 0.5}),
        ("temperatures", {"temperatures": "0.5"}),
        ("chat_template_kwargs", {"chat_template_kwargs": '{"enable_thinking": false}'}),
        ("seed", {"seed": 1}),
    ):
        result = run(**changed)
        assert result.exit_code == 2, (field, result.output)
        words = " ".join(result.stderr.split())
        assert f"error: {field} = " in words and "was begun with" in words
