# SPDX-License-Identifier: Apache-2.0
"""The plan is fixed, shards are complete or absent, and generation resumes."""

from __future__ import annotations

import random

import pytest

from vllm_specplug.train import answers
from vllm_specplug.train.answers import (
    Answer,
    answer_shards,
    generate_missing,
    is_repetitive,
    keep_answer,
    plan_requests,
    read_answers,
    read_plan,
    refuse_other_settings,
    write_answers,
    write_plan,
)
from vllm_specplug.train.features import read_split

PROMPTS = [("a", [1, i]) for i in range(10)] + [("b", [1, 3])]


def planned(folder):
    requests = plan_requests(PROMPTS, sampled_share=0.5, temperatures=[0.7, 1.0], seed=1)
    write_plan(folder, requests, {"seed": 1})
    return requests


class Target:
    """Answers with the prompt's tokens; fails on the call numbered `fail_at`."""

    def __init__(self, fail_at=None):
        self.calls, self.fail_at = 0, fail_at

    def __call__(self, requests):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyboardInterrupt
        return [((*r.prompt_ids, 7), True) for r in requests]


def test_plan_is_deterministic_without_duplicate_prompts(tmp_path):
    requests = planned(tmp_path)
    assert len(requests) == 10
    assert read_plan(tmp_path) == requests == planned(tmp_path / "again")
    assert {r.temperature for r in requests} <= {0.0, 0.7, 1.0}
    assert 0 < sum(r.temperature > 0 for r in requests) < 10


def test_interrupted_generation_resumes_without_redoing(tmp_path):
    planned(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(generate_missing(tmp_path, Target(fail_at=3), shard_size=3))
    assert len(answer_shards(tmp_path)) == 2
    before = [p.stat().st_mtime_ns for p in answer_shards(tmp_path)]
    second = Target()
    made = generate_missing(tmp_path, second, shard_size=3)
    assert [len(shard) for shard in made] == [3, 1]
    assert second.calls == 2
    assert [p.stat().st_mtime_ns for p in answer_shards(tmp_path)][:2] == before
    answers = [a for path in answer_shards(tmp_path) for a in read_answers(path)]
    assert [a.prompt_ids for a in answers] == [r.prompt_ids for r in read_plan(tmp_path)]
    assert all(a.answer_ids == (*a.prompt_ids, 7) and a.finished for a in answers)
    third = Target()
    assert list(generate_missing(tmp_path, third, shard_size=3)) == []
    assert third.calls == 0


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="specplug data generate"):
        read_plan(tmp_path)
    requests = plan_requests(PROMPTS, sampled_share=0.0, temperatures=[1.0], seed=1)
    write_plan(tmp_path, requests, {"max_tokens": 8})
    with (tmp_path / "prompts.jsonl").open("a") as plan:
        plan.write('{"source": "a", "prom')
    with pytest.raises(ValueError, match=f"prompts.jsonl:{len(requests) + 1} is damaged"):
        read_plan(tmp_path)


def test_an_interruption_leaves_no_plan_without_its_settings(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(answers.os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            write_plan(tmp_path, [], {"max_tokens": 8})
    assert not (tmp_path / "prompts.jsonl").exists()
    write_plan(tmp_path, [], {"max_tokens": 9})
    refuse_other_settings(tmp_path, {"max_tokens": 9})
    # As an import that was interrupted after its plan.
    (tmp_path / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"has prompts.jsonl without settings.json.*name another"):
        refuse_other_settings(tmp_path, {"max_tokens": 9})


def test_loops_are_recognised_and_partly_dropped():
    loop = tuple([5, 6, 7, 8] * 60)
    varied = tuple(range(240))
    assert is_repetitive(loop)
    assert not is_repetitive(varied)
    assert not is_repetitive(loop[:100])  # too short to tell

    def kept(ids):
        rng = random.Random(0)
        return sum(keep_answer(Answer("a", (1,), ids, 0.0, True), rng, 0.3) for _ in range(200))

    assert kept(varied) == 200
    assert 30 < kept(loop) < 90
    assert kept((1, 2)) == 0


def test_equal_answers_are_split_by_their_places(tmp_path):
    write_answers(tmp_path, [Answer("a", (1,), tuple(range(8)), 0.0, True)] * 5)
    ((_, aside, rest),), remarks = read_split(tmp_path, 2, 1.0)
    assert (len(aside), len(rest), remarks) == (2, 3, [])
