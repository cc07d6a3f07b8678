# SPDX-License-Identifier: Apache-2.0
"""Parameters of single requests, in `SamplingParams.extra_args`, or `vllm_xargs` over HTTP."""

from __future__ import annotations

import difflib
from typing import Any

from vllm_specplug.options import REQUEST_BUDGET_ARG, is_integer, short_repr

PENALTY_ARGS = ("specplug_penalty_window", "specplug_penalty")
REQUEST_ARGS = (REQUEST_BUDGET_ARG, *PENALTY_ARGS)
"""Parameters that a request may set."""
DEFAULT_PENALTY_WINDOW = 1024
MIN_PENALTY, MAX_PENALTY = 1e-3, 1e3
"""Outside this range a float32 logit may overflow."""


def unknown_request_arg(extra_args: dict[str, Any] | None) -> tuple[str, str] | None:
    """Returns the first unknown parameter with the plugin's prefix, and a message for the user."""
    for name in extra_args or ():
        if not isinstance(name, str) or not name.lower().startswith("specplug"):
            continue
        if name not in REQUEST_ARGS:
            near = difflib.get_close_matches(name.lower()[:80], REQUEST_ARGS, n=1)
            meant = f"Did you mean {near[0]}?" if near else f"Legal: {', '.join(REQUEST_ARGS)}."
            return name[:80], f"{name[:80]} is not a request parameter of vllm-specplug. {meant}"
    return None


def named_arg(error: ValueError) -> str | None:
    """Returns the parameter name that an error message begins with; None if there is none."""
    # The longest match, because one name is a prefix of another.
    matches = [name for name in REQUEST_ARGS if str(error).startswith(name)]
    return max(matches, key=len, default=None)


def parse_penalty(
    extra_args: dict[str, Any] | None, max_window: int | None = None
) -> tuple[int, float] | None:
    """Returns a request's contextual penalty (window in tokens, theta); None without one.

    Args:
        extra_args: the request's `extra_args` (`vllm_xargs` over HTTP).
        max_window: maximum window; None for no limit.

    Raises:
        ValueError: naming the parameter, its value and what is legal.
    """
    window_arg, theta_arg = PENALTY_ARGS
    extra = extra_args or {}
    if window_arg not in extra and theta_arg not in extra:
        return None
    window, theta = extra.get(window_arg, DEFAULT_PENALTY_WINDOW), extra.get(theta_arg)
    if theta is None:
        raise ValueError(
            f"{theta_arg} is missing: {window_arg} has no effect without it; give both"
        )
    if (
        not is_integer(window)
        or window < 0
        or (max_window is not None and window_arg in extra and window > max_window)
    ):
        upper = "or more" if max_window is None else f"to max_model_len={max_window}"
        raise ValueError(
            f"{window_arg}={short_repr(window)} is not usable: a number of tokens from 0 (no "
            f"penalty) {upper}. Give an integer such as 1024"
        )
    is_numeric = isinstance(theta, int | float) and not isinstance(theta, bool)
    if not is_numeric or not MIN_PENALTY <= theta <= MAX_PENALTY:
        raise ValueError(
            f"{theta_arg}={short_repr(theta)} is not usable: a number from {MIN_PENALTY} to "
            f"{MAX_PENALTY:.0f}; 1 changes nothing. Give a number such as 1.2"
        )
    if window == 0 or theta == 1:
        return None
    return window, float(theta)
