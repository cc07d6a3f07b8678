# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: earlier stages verify trees that the last stage drafts and walks.

test_lossless.py runs the real target on two stages with a server's mix of requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import EngineResult, assert_drafted, run_engine, with_own_budgets
from tests.e2e.latent import BACKEND, latent_target
from tests.e2e.tiny import make_adapter, make_eagle3_head, make_head, make_target
from tests.e2e.tiny_engine import CALLS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("two_ranks")]

METHODS: dict[str, dict[str, Any]] = {
    "ngram_tree": {"method": "ngram_tree"},
    "jetspec": {"method": "jetspec", "model": "causal", "ngram_topk": 3},
    "eagle3_tree": {"method": "eagle3_tree", "model": "eagle3"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    target = make_target(folder / "target", VOCAB, num_layers=3)
    make_adapter(folder / "adapter", target, ("q_proj", "v_proj", "down_proj"), seed=1)
    make_head(folder / "causal", VOCAB)
    make_eagle3_head(folder / "eagle3", VOCAB)
    return folder


def _run(
    models: Path, method: str | None, *sabotage: str, calls: Any = CALLS, **engine: Any
) -> EngineResult:
    engine = {**tiny_engine(models / "target"), **engine}
    if method is None:
        return run_engine(engine, calls)
    spec = {"num_speculative_tokens": 12, "max_step_rows": 512, **METHODS[method]}
    if "model" in spec:
        spec["model"] = str(models / spec["model"])
    return run_engine(
        {"pipeline_parallel_size": 2, **engine}, [with_own_budgets(call) for call in calls],
        speculative=spec, sabotage=sabotage, own_processes=True,
    )  # fmt: skip


def _assert_equal(tree: EngineResult, plain: EngineResult) -> None:
    for call in range(len(plain.calls)):
        assert tree.token_ids(call) == plain.token_ids(call)
    assert_drafted(tree, least_acceptance=0.0)


@pytest.mark.full
@pytest.mark.parametrize(("method", "stages"), [*((name, 2) for name in METHODS), ("jetspec", 3)])
def test_stages_keep_the_output(models: Path, method: str, stages: int) -> None:
    _assert_equal(_run(models, method, pipeline_parallel_size=stages), _run(models, None))


@pytest.mark.full
def test_stages_of_two_ranks_keep_the_output(models: Path) -> None:
    tree = _run(models, "jetspec", "clock", "drafts", tensor_parallel_size=2)
    _assert_equal(tree, _run(models, None))


@pytest.mark.full
def test_stages_apply_adapters(models: Path) -> None:
    adapters = [None, ("adapter", 1, str(models / "adapter"))] * 3
    calls = [{**call, "prompts": [call["prompts"][0]] * 6, "adapters": adapters} for call in CALLS]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    plain = _run(models, None, calls=calls, **lora)
    assert plain.token_ids()[0] != plain.token_ids()[1], "the adapter is idle"
    _assert_equal(_run(models, "jetspec", calls=calls, **lora), plain)


@pytest.mark.parametrize(
    "broken", ["stage_paths", pytest.param("stage_trees", marks=pytest.mark.full)]
)
def test_output_differs_without_paths_or_trees(models: Path, broken: str) -> None:
    """Negative controls: earlier stages lack the accepted paths, or the next trees."""
    tree, plain = _run(models, "jetspec", broken), _run(models, None)
    assert tree.token_ids() != plain.token_ids()
    assert_drafted(tree, least_acceptance=0.0)


@pytest.mark.full
def test_stages_of_latent_attention_keep_the_output() -> None:
    engine = {**tiny_engine(Path(latent_target())), **BACKEND}
    # Without penalties the answers repeat, so n-gram drafts are accepted.
    params = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True, "detokenize": False}
    calls = [{"prompts": PROMPTS, "params": params}]
    plain = run_engine(engine, calls)
    tree = run_engine(
        {**engine, "pipeline_parallel_size": 2},
        [with_own_budgets(call) for call in calls],
        speculative={"method": "ngram_tree", "num_speculative_tokens": 12},
        own_processes=True,
    )
    _assert_equal(tree, plain)
