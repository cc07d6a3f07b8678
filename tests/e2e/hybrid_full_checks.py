# SPDX-License-Identifier: Apache-2.0
"""More of what `hybrid_checks` compares; see test_hybrids_in_full.py."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e import hybrid_checks
from tests.e2e.hybrid_checks import VOCAB, changed, compared, target
from tests.e2e.pair import pair
from tests.e2e.tiny import make_eagle3_head, make_head

FAMILY = "Qwen3Next"


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="specplug-hybrid-"))


def check_as_many_value_heads_as_key_heads() -> None:
    made = hybrid_checks.engines(model=target(FAMILY, value_heads=2))
    compared(made, least_accepted=60)


def check_drafts_from_the_own_text() -> None:
    compared(hybrid_checks.engines("ngram_tree"), least_accepted=0, branching=False)


def check_heads_that_read_hidden_states() -> None:
    folder = _folder()
    heads: dict[str, Any] = {
        "jetspec": make_head(folder / "jetspec", VOCAB, hidden=64),
        "eagle3_tree": make_eagle3_head(folder / "eagle3", VOCAB),
    }
    for method, head in heads.items():
        made = hybrid_checks.engines(method, speculative={"model": str(head)})
        compared(made, least_accepted=0)


def check_chains() -> None:
    """A chain's state waits for acceptance as a tree's does."""
    made = hybrid_checks.engines(speculative={"tree_width": 1})
    compared(made, least_accepted=60, branching=False)


def check_costs_are_measured_with_trees() -> None:
    """What the adaptive budget starts from, in layers with a state: rows of trees and their commit,
    as many as each measured forward has; a single row is decoded."""
    os.environ["SPECPLUG_CACHE"] = str(_folder())
    run: list[int] = []
    commits: list[int] = []

    def noted(stock: Any, step: Any, layer: Any, trees: Any, inputs: Any, *args: Any) -> Any:
        run.append(len(inputs))
        return stock(step, layer, trees, inputs, *args)

    def committed(stock: Any, step: Any, last_rows: Any) -> None:
        commits.append(len(step.rows))
        stock(step, last_rows)

    with changed("_run_trees", noted), changed("commit", committed):
        made = hybrid_checks.engines(speculative={"tree_budget": "auto", "max_step_rows": 40})
    runner = made.runner
    measured = runner.planner.adaptive.costs.forward.rows.tolist()
    assert len(measured) > 2 and measured[0] == 1, measured
    assert {float(rows) for rows in run} == {float(rows) for rows in commits} == {*measured[1:]}
    layers = len(runner.state.state_layers.names)
    assert len(run) == layers * len(commits)
    # Once it serves, its dummies are vLLM's again, and so are its outputs.
    assert runner.rehearsed_states is None
    compared(made, least_accepted=0, branching=False)


def check_a_scheduler_that_works_ahead() -> None:
    if hybrid_checks.V2:
        made = hybrid_checks.engines(tree={"async_scheduling": True})
        counts = compared(made, least_accepted=60)
        assert counts.stale > 0, counts


def check_grammars() -> None:
    from tests.e2e.grammar_checks import KINDS, every_kind
    from tests.e2e.hybrids import make_hybrid_target
    from tests.e2e.tiny import make_tokenizer

    folder = _folder() / "target"
    folder.mkdir()
    make_hybrid_target(folder, FAMILY, make_tokenizer(folder))
    kinds = {name: KINDS[name] for name in ("regex", "choice", "ebnf")}
    made = pair("oracle", model=str(folder), speculative=hybrid_checks.SPECULATIVE)
    every_kind(made, kinds, prunes=not hybrid_checks.V2)
