# SPDX-License-Identifier: Apache-2.0
"""Checks PromQL against the metrics of a server, as far as the files in examples/ use PromQL.

Prometheus answers a query of an unknown metric, or of two metrics whose labels do not match, with
nothing and without an error. An alert on such a query never fires.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_TOKEN = re.compile(
    r"""\s*(?: (?P<number>\d+(?:\.\d+)?) | (?P<string>"[^"]*")
    | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\]) | (?P<name>[a-zA-Z_:][\w:]*)
    | (?P<mark>=~|!~|!=|<=|>=|==|[-+*/<>=(){},]) )\s*""",
    re.VERBOSE,
)
_AGGREGATIONS = {"sum", "max", "min", "avg"}
_FUNCTIONS = {
    "rate": ("range",),
    "increase": ("range",),
    "max_over_time": ("range",),
    "scalar": ("vector",),
    "histogram_quantile": ("scalar", "vector"),
}
_OPERATORS = {"+", "-", "*", "/", "<", ">", "<=", ">=", "==", "!=", "and", "or", "unless"}

Metrics = Mapping[str, Mapping[str, set[str]]]
"""The values of each label of each metric."""


class Value(NamedTuple):
    """What a part of a query yields: a "scalar", or a "vector" or "range" with these labels."""

    kind: str
    labels: frozenset[str] = frozenset()


def check_query(query: str, metrics: Metrics) -> None:
    """Fails unless the query is well formed and every name and label in it leads to a result."""
    try:
        parser = _Parser(query, metrics)
        value = parser.expression()
        parser.take("end")
        assert value.kind == "vector", f"it yields a {value.kind}"
    except AssertionError as error:
        raise AssertionError(f"{error}\nin {query}") from None


class _Parser:
    def __init__(self, query: str, metrics: Metrics) -> None:
        self._metrics = metrics
        self._tokens: list[tuple[str, str]] = []
        end = 0
        while end < len(query):
            found = _TOKEN.match(query, end)
            assert found, f"not PromQL: {query[end:]!r}"
            end = found.end()
            self._tokens.append((str(found.lastgroup), found.group().strip()))
        self._tokens.append(("end", ""))

    def _next_is(self, *words: str) -> bool:
        return self._tokens[0][1] in words

    def take(self, *wanted: str) -> str:
        """Returns the next token, which must be one of these words or of this kind."""
        kind, word = self._tokens.pop(0)
        assert kind in wanted or word in wanted, f"{word!r} where {wanted} is due"
        return word

    def expression(self) -> Value:
        """All operators from left to right: their precedence does not change the labels."""
        left = self._operand()
        while self._next_is(*_OPERATORS):
            self.take(*_OPERATORS)
            is_on, named = False, frozenset[str]()
            if self._next_is("on", "ignoring"):
                is_on, named = self.take("name") == "on", self._labels()
            if self._next_is("group_left", "group_right"):
                self.take("name")
                self._labels()
            left = _matched(left, self._operand(), is_on, named)
        return left

    def _operand(self) -> Value:
        if self._tokens[0][0] == "number":
            self.take("number")
            return Value("scalar")
        if self._next_is("("):
            return self._arguments("scalar", "vector")[0]
        name = self.take("name")
        if name in _AGGREGATIONS:
            return self._aggregated()
        if self._next_is("("):
            assert name in _FUNCTIONS, f"unknown function {name}"
            values = self._arguments(*_FUNCTIONS[name])
            assert tuple(value.kind for value in values) == _FUNCTIONS[name], (name, values)
            dropped = {"le"} if name == "histogram_quantile" else set()
            assert dropped <= values[-1].labels, f"{name} of what is no histogram"
            return Value("scalar" if name == "scalar" else "vector", values[-1].labels - dropped)
        return self._series(name)

    def _arguments(self, *kinds: str) -> list[Value]:
        self.take("(")
        values = [self.expression()]
        while self._next_is(","):
            self.take(",")
            values.append(self.expression())
        self.take(")")
        assert all(value.kind in kinds for value in values), f"{values}, not {kinds}"
        return values

    def _aggregated(self) -> Value:
        keeps, named = True, frozenset[str]()
        if self._next_is("by", "without"):
            keeps, named = self.take("name") == "by", self._labels()
        (value,) = self._arguments("vector")
        assert named <= value.labels, f"no label {named - value.labels}"
        return Value("vector", named if keeps else value.labels - named)

    def _labels(self) -> frozenset[str]:
        self.take("(")
        labels = set()
        while not self._next_is(")"):
            labels.add(self.take("name"))
            if not self._next_is(")"):
                self.take(",")
        self.take(")")
        return frozenset(labels)

    def _series(self, name: str) -> Value:
        assert name in self._metrics, f"no metric {name}"
        labels = self._metrics[name]
        if self._next_is("{"):
            self.take("{")
            while not self._next_is("}"):
                label = self.take("name")
                assert label in labels, f"no label {label} of {name}"
                is_pattern = self.take("=", "!=", "=~", "!~").endswith("~")
                value = self.take("string").strip('"')
                wanted = set(value.split("|") if is_pattern else [value])
                # The dashboard's variable has any value.
                assert wanted <= {*labels[label], "$model"}, f"{name} has no {label} {wanted}"
                if not self._next_is("}"):
                    self.take(",")
            self.take("}")
        if self._tokens[0][0] == "range":
            self.take("range")
            return Value("range", frozenset(labels))
        return Value("vector", frozenset(labels))


def _matched(left: Value, right: Value, is_on: bool, named: frozenset[str]) -> Value:
    assert "range" not in (left.kind, right.kind), f"an operator on {left} and {right}"
    if "scalar" in (left.kind, right.kind):
        return right if left.kind == "scalar" else left
    if is_on:
        assert named <= left.labels & right.labels, f"{named} of {left} and {right}"
    else:
        assert named <= left.labels | right.labels, f"{named} of {left} and {right}"
        assert left.labels - named == right.labels - named, f"{left} never matches {right}"
    return left
