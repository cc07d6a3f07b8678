# SPDX-License-Identifier: Apache-2.0
"""KV connectors with trees: what they save and load holds committed tokens, of draft layers too."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from tests.e2e.connectors import MemoryConnector, Store, transfer_config
from tests.e2e.pair import Pair, generate, pair, sequences_of, watch_preemptions
from tests.e2e.requests import greedy, seeded

pytestmark = [pytest.mark.e2e, pytest.mark.own_process]

# Longer than the cache of a small engine together.
LONG = [[6 + i] * 20 for i in range(6)]
METHODS = ("oracle", "jetspec", "eagle3_tree")
PROMPTS = [[(5 * i + n) % 250 + 5 for i in range(n)] for n in (21, 50, 70)]
# Behind an answer: another question of the same user.
QUESTION = [11, 12, 13, 14, 15]


def with_connector(method: str, config: dict[str, Any] | None = None, **engine: Any) -> Pair:
    """A pair whose tree engine has a connector, with an empty store."""
    # A process has one worker's connector, which vLLM makes once.
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    MemoryConnector.store = Store()
    made = pair(method, tree={"kv_transfer_config": config or transfer_config(), **engine})
    kv_transfer_state._KV_CONNECTOR_AGENT = made.runner.kv_connector.kv_connector
    return made


def second_turns(made: Pair) -> list[list[int]]:
    """Runs first turns and returns the prompts of the second ones."""
    params = [greedy(max_tokens=40), seeded(1, max_tokens=40), greedy(max_tokens=40)]
    first, counts = made.compare(PROMPTS, params)
    assert counts.skipping > 0, counts
    return [[*tokens, *QUESTION] for tokens in sequences_of(first)]


@pytest.mark.full
@pytest.mark.parametrize("method", ["dels", "longspec", "mtp_tree", "tokenswift"])
def test_second_turns_of_other_methods(method: str) -> None:
    made = with_connector(method)
    made.compare(second_turns(made), greedy(max_tokens=24))
    assert MemoryConnector.store.loaded_tokens > 0


@pytest.mark.parametrize("method", METHODS)
def test_second_turns_load_what_decoding_saved(method: str) -> None:
    made = with_connector(method)
    prompts = second_turns(made)
    _, counts = made.compare(prompts, greedy(max_tokens=24))
    # All whole blocks of the first turns, whose last token has no keys and values yet.
    saved = [len(prompt) - len(QUESTION) - 1 for prompt in prompts]
    store = MemoryConnector.store
    assert store.loaded_tokens == sum(count // 32 * 32 for count in saved)
    assert store.saved_layers == set(made.runner.state.layers)
    # Draft layers' context came along: drafts are those of an engine that computes all of it.
    with patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", None):
        _, computed = pair(method).compare(prompts, greedy(max_tokens=24))
    assert computed.accepted == counts.accepted


def test_layers_saved_before_compaction_diverge() -> None:
    """The control: a connector that reads the pages during the forward."""
    made = with_connector("oracle")
    with patch.object(made.runner.saves, "_has_trees", lambda: False):
        prompts = second_turns(made)
    with pytest.raises(AssertionError, match="request"):
        made.compare(prompts, greedy(max_tokens=24))
    assert MemoryConnector.store.loaded_tokens > 0


def test_preempted_requests_load_their_own_blocks() -> None:
    for method in ("oracle", "jetspec"):
        made = with_connector(method, num_gpu_blocks_override=9)
        preempted = watch_preemptions(made.tree)
        made.compare(LONG, greedy(max_tokens=90))
        assert preempted and MemoryConnector.store.loaded_tokens > 0


def _example(folder: Path, role: str) -> dict[str, Any]:
    """`kv_transfer_config` of vLLM's example connector, which saves prompts' layers to files."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    several = {"kv_connector": "MultiConnector", "kv_role": role}
    return {**several, "kv_connector_extra_config": {"connectors": [example]}}


def test_a_prefill_engine_and_a_decode_engine(tmp_path: Path) -> None:
    prefill = with_connector("jetspec", _example(tmp_path, "kv_producer"))
    generate(prefill.tree, PROMPTS, greedy(max_tokens=1))
    # One folder per prompt with a file per layer, draft layers included.
    files = [sorted(path.name for path in folder.iterdir()) for folder in tmp_path.iterdir()]
    layers = sorted(f"{name}.safetensors" for name in prefill.runner.state.layers)
    assert files == [layers] * len(PROMPTS)

    decode = with_connector("jetspec", _example(tmp_path, "kv_consumer"))
    decode.compare(PROMPTS, greedy(max_tokens=30))
    loaded = generate(decode.tree, PROMPTS, greedy(max_tokens=1))
    assert [output.num_cached_tokens for output in loaded] == [0, 32, 64]
