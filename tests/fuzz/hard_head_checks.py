# SPDX-License-Identifier: Apache-2.0
"""The state machine with heads that are too sure or broken; see tests/e2e/hard_heads.py."""

from __future__ import annotations

from tests.fuzz.machine_checks import run_method


def check_confident_jetspec() -> None:
    run_method("jetspec-confident")


def check_confident_ddtree() -> None:
    run_method("ddtree-confident")


def check_confident_dels() -> None:
    run_method("dels-confident")


def check_confident_dspark_tree() -> None:
    run_method("dspark_tree-confident")


def check_confident_longspec() -> None:
    run_method("longspec-confident")


def check_confident_eagle3_tree() -> None:
    run_method("eagle3_tree-confident")


def check_confident_mtp_tree() -> None:
    run_method("mtp_tree-confident")


def check_confident_tokenswift() -> None:
    run_method("tokenswift-confident")


def check_confident_ngram_tree() -> None:
    run_method("ngram_tree-confident")


def check_broken_dels() -> None:
    run_method("dels-broken")


def check_broken_tokenswift() -> None:
    run_method("tokenswift-broken")


def check_nan_weights_dels() -> None:
    run_method("dels-nan_weights")


def check_nan_weights_eagle3_tree() -> None:
    run_method("eagle3_tree-nan_weights")


def check_nan_weights_longspec() -> None:
    run_method("longspec-nan_weights")


def check_nan_weights_tokenswift() -> None:
    run_method("tokenswift-nan_weights")
