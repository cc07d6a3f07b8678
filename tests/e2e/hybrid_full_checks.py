# SPDX-License-Identifier: Apache-2.0
"""More of what `hybrid_checks` compares; see test_hybrids_in_full.py."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.e2e import hybrid_checks
from tests.e2e.hybrid_checks import VOCAB, compared, target
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
