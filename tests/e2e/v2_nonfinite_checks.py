# SPDX-License-Identifier: Apache-2.0
"""`nonfinite_checks` on Model Runner V2."""

from __future__ import annotations

from tests.e2e.nonfinite_checks import (
    compare,
    differs_as_they_are,
    gemma_4,
    llama,
    siblings,
    waves,
    with_overflowing_head,
)
from tests.e2e.pair import Pair, pair
from vllm_specplug.vllm_v2.plain_engine import use_v2

use_v2()


def ahead() -> Pair:
    return pair("oracle", model=llama(), skip_tokenizer_init=True, tree={"async_scheduling": True})


def check_siblings() -> None:
    compare(siblings())


def check_siblings_scheduled_ahead() -> None:
    compare(ahead())


def check_a_heads_keys_where_the_target_has_values() -> None:
    waves(with_overflowing_head(kv_heads=2))


def check_keys_where_another_group_has_values() -> None:
    made = pair("oracle", model=gemma_4(), skip_tokenizer_init=True)
    for _ in range(3):
        compare(made)


# Last: see `differs_as_they_are`.
def check_stored_as_they_are_they_change_answers() -> None:
    differs_as_they_are(siblings())
    differs_as_they_are(ahead())
