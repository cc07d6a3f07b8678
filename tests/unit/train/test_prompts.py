# SPDX-License-Identifier: Apache-2.0
"""Prompts of files."""

from __future__ import annotations

import json

from vllm_specplug.rows import LeftOut
from vllm_specplug.train import prompts


def test_prompt_files_of_every_key(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"question": "q"},
        {"prompt": "p"},
        {"turns": ["first", "second"]},
        {"messages": [{"role": "user", "content": "m"}]},
        {"other": "no key"},
    ]
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    left_out = LeftOut()
    read = list(prompts.read_prompt_file(path, left_out))
    assert [p.messages[-1]["content"] for p in read] == ["q", "p", "first", "m"]
    assert {p.source for p in read} == {"mine"}
    assert [p.place for p in read] == [f"{path}:{line}" for line in range(1, 5)]
    assert left_out.places.pop("later turns of a prompt") == [f"{path}:3"]
    assert list(left_out.places.values()) == [[f"{path}:5"]]
