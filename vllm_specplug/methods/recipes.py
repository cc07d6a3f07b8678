# SPDX-License-Identifier: Apache-2.0
"""Published recipes of training, read from recipes.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def all_recipes() -> dict[str, dict[str, Any]]:
    """Returns the values of every recipe by its name."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def recipes_of(command: str) -> dict[str, dict[str, Any]]:
    """Returns the options that the recipes of a command of `specplug train` set."""
    return {
        name: {key: value for key, value in values.items() if key not in ("command", "paper")}
        for name, values in all_recipes().items()
        if values["command"] == command
    }
