# SPDX-License-Identifier: Apache-2.0
"""More of test_latent.py: on V1, other families, drafters and options, two ranks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.e2e.fork_server import run_forked
from tests.e2e.harness import EngineResult, assert_drafted, run_engine
from tests.e2e.latent import BACKEND, make_latent_target
from tests.e2e.pair import written_checks
from tests.e2e.tiny import make_head
from tests.e2e.tiny_engine import PARAMS, PROMPTS, VOCAB, tiny_engine

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.xdist_group("latent_checks")]

RUNNERS = pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
CALLS = [
    {"prompts": PROMPTS, "params": PARAMS},
    {"prompts": PROMPTS, "params": {**PARAMS, "temperature": 0.8, "seed": 7}},
]


def rows() -> list[tuple[str, bool, str]]:
    """(module, whether on V1, check)."""
    return [
        (module, on_v1, check)
        for module in ("latent_checks", "latent_full_checks", "latent_compiled_checks")
        for on_v1 in ((True,) if module == "latent_checks" else (False, True))
        for check in written_checks(module)
    ]


@cache
def failures(module: str, on_v1: bool) -> dict[str, str | None]:
    """Of all checks of a module, run in one process."""
    with TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        arguments = [f"tests.e2e.{module}", str(result)]
        run_forked("tests.e2e.pair", arguments, log, env={"SPECPLUG_LATENT_V1": str(int(on_v1))})
        assert result.is_file(), log.read_text()[-6000:]
        return json.loads(result.read_text())


@pytest.mark.parametrize(("module", "on_v1", "name"), rows())
def test_equals_plain_decoding(module: str, on_v1: bool, name: str) -> None:
    assert failures(module, on_v1)[name] is None


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent-modes")
    make_latent_target(folder / "target", "DeepseekV3", vocab_size=VOCAB)
    make_head(folder / "head", VOCAB, hidden=64)
    return folder


def _tokens(models: Path, v2: bool, drafts: bool, **engine: Any) -> list[list[list[int]]]:
    speculative = {
        "method": "jetspec", "model": str(models / "head"), "num_speculative_tokens": 12,
        "tree_budget": 12, "max_step_rows": 512,
    }  # fmt: skip
    result: EngineResult = run_engine(
        {**tiny_engine(models / "target"), **BACKEND, **engine},
        CALLS,
        speculative=speculative if drafts else None,
        own_processes="tensor_parallel_size" in engine,
        v2=v2,
    )
    if drafts:
        assert_drafted(result, least_acceptance=0.0)
    return [result.token_ids(call) for call in range(len(CALLS))]


@RUNNERS
def test_compiled(tmp_path: Path, v2: bool) -> None:
    """Experts are scored by a softmax here; plain vLLM is compiled, too."""
    make_latent_target(tmp_path / "target", "DeepseekV2", vocab_size=VOCAB)
    make_head(tmp_path / "head", VOCAB, hidden=64)
    plain = _tokens(tmp_path, v2, False, enforce_eager=False)
    assert _tokens(tmp_path, v2, True, enforce_eager=False) == plain
    assert _tokens(tmp_path, v2, False) == plain


def test_experts_that_are_not_compiled_as_written_are_refused(models: Path) -> None:
    with pytest.raises(AssertionError, match=r"scoring_func='sigmoid' and a bias.*eager"):
        _tokens(models, True, True, enforce_eager=False)


@pytest.mark.skipif(not BACKEND, reason="without AMX vLLM takes CPU_MLA itself")
@RUNNERS
def test_vllms_backend_for_amx_is_refused(models: Path, v2: bool) -> None:
    with pytest.raises(AssertionError, match="AMXMLAImpl.*--attention-backend CPU_MLA"):
        _tokens(models, v2, True, attention_backend="AMX_MLA", dtype="bfloat16")


@RUNNERS
def test_two_ranks(models: Path, v2: bool) -> None:
    """Each has half the heads, over a latent cache that both have whole."""
    two = {"tensor_parallel_size": 2}
    assert _tokens(models, v2, True, **two) == _tokens(models, v2, False, **two)
