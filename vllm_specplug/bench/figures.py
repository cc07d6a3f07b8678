# SPDX-License-Identifier: Apache-2.0
"""Colours, axes and SVG of all plots."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vllm_specplug.registry import method_names

COLORS = {
    "plain": "#858b95",
    "ngram": "#d4680a",
    "suffix": "#9a7b0a",
}
"""Colours of systems other than our methods."""
_FREE_COLORS = (
    "#2f66d0", "#d4680a", "#16855a", "#8b49c4", "#cc3a66", "#0b8296", "#9a7b0a", "#6f9cf0",
    "#f2b279", "#5cc49a", "#c795f2", "#ef86a6", "#57b9c9", "#a5754a", "#12a3c7", "#76a51c",
)  # fmt: skip
_TEXT, _GRID = "#444b55", "#d9dce1"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.unicode_minus": False,
    "grid.color": _GRID,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    # Text stays text: small files, and the page's own font.
    "svg.fonttype": "none",
}


def system_colors(names: Iterable[str]) -> dict[str, str]:
    """Returns the colour of each system of a page.

    Names of `COLORS` and of methods have the same colours on all pages, others take free colours in
    order.
    """
    distinct = list(dict.fromkeys(names))
    own = [color for color in _FREE_COLORS if color not in COLORS.values()]
    fixed = {**dict(zip(method_names(), own, strict=False)), **COLORS}
    taken = {fixed[name] for name in distinct if name in fixed}
    free = [color for color in _FREE_COLORS if color not in taken]
    others = [name for name in distinct if name not in fixed]
    found = {name: free[place % len(free)] for place, name in enumerate(others)}
    return {name: fixed.get(name) or found[name] for name in distinct}


def new_figure(height: float = 3.0) -> tuple[Figure, Any]:
    """Returns a figure of a height in inches, and its axes."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.6, height), layout="constrained")
        return figure, figure.subplots()


def place_measured(axis: Axes, labels: Mapping[float, str]) -> None:
    """Makes the x axis logarithmic, with a labelled tick at each measured value."""
    axis.set_xscale("log")
    axis.set_xticks(list(labels), list(labels.values()))
    axis.minorticks_off()


def to_svg(figure: Figure, name: str) -> str:
    """Returns the figure as an SVG element. The page colours its text and lines.

    Args:
        name: unique in the page; ids are made from it.
    """
    stream = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata=nothing)
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "var(--soft)").replace(_GRID, "var(--line)")
    return text.replace("<svg ", '<svg role="img" ', 1)
