# SPDX-License-Identifier: Apache-2.0
"""The plan of a benchmark: servers, traffic, repeats."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_specplug.registry import default_method, get_method, method_names

BASELINE = "plain"
CHAIN = "chain"
AUTO = "auto"

# vLLM's own methods that need no head, with the settings of its documentation.
VLLM_CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 6,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
    "suffix": {"method": "suffix", "num_speculative_tokens": 16},
}

SLO_NAMES = ("ttft", "tpot", "e2el")


class ServerEntry(BaseModel):
    """One server of the comparison."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=40, pattern=r"^[^\s/,=]+$")
    """Its name in every table."""
    speculative_config: dict[str, Any] | None = None
    """vLLM's --speculative-config; None for no speculation."""
    serve_args: tuple[str, ...] = ()
    """More arguments of `vllm serve` for this server."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """Address of a running server, which is used instead of a new one."""


class BenchPlan(BaseModel):
    """All settings of a benchmark. Times are in seconds, rates in requests/s."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    head: str | None = None
    """Draft head of servers with a short name."""
    servers: tuple[ServerEntry, ...]
    """Servers to compare, by short name (see `server_entry`) or as a mapping."""
    data: tuple[Path, ...] = Field(min_length=1)
    """JSONL files, or folders of them."""

    dtype: str = "bfloat16"
    max_model_len: int = Field(default=4096, ge=16)
    max_num_seqs: int = Field(default=16, ge=1)
    enforce_eager: bool = False
    """Whether all servers run eager. By default all are compiled, as in vLLM."""
    serve_args: tuple[str, ...] = ("--no-enable-prefix-caching",)
    """More arguments of `vllm serve`. With prefix caching a repeated prompt would cost less."""

    output_len: int = Field(default=128, ge=2)
    """Longest answer, tokens."""
    temperature: float = Field(default=0.0, ge=0.0)
    ignore_eos: bool = False
    """Whether every answer gets output_len tokens. Text after the end is repetitive and easy to
    draft, so acceptance is overstated."""
    chat: bool = True
    """Whether prompts go through the chat template."""
    max_prompt_chars: int = Field(default=6000, ge=1)

    rates: Literal["auto"] | tuple[float, ...] = "auto"
    """Poisson request rates. "auto": from one request at a time to past the baseline's saturation,
    both measured on the baseline, and all requests at once."""
    points: int = Field(default=5, ge=2, le=50)
    """Number of rates with "auto"."""
    concurrency: tuple[int, ...] = ()
    """Loads with these numbers of requests always in flight."""
    point_time: float = Field(default=30.0, gt=0)
    """Seconds of arrivals at each rate, within the two limits below."""
    min_requests: int = Field(default=8, ge=1)
    max_requests: int = Field(default=256, ge=1)
    goodput: tuple[str, ...] = ()
    """Objectives as for `vllm bench serve --goodput`, e.g. "tpot:50" (milliseconds). A good request
    meets all of them."""
    dataset_requests: int = Field(default=0, ge=0)
    """Requests that measure the acceptance of each data set; 0: none."""

    repeats: int = Field(default=1, ge=1)
    """Runs of each load; medians are reported."""
    together: bool = False
    """Whether all servers stay up and take turns at each load, all but one paused, so that the
    machine's drift affects all equally. They must fit into memory together."""

    @field_validator("servers", mode="before")
    @classmethod
    def _expand_names(cls, value: Any, info: Any) -> Any:
        if isinstance(value, str):
            value = split_list(value)
        if not isinstance(value, (list, tuple)):
            return value
        head = info.data.get("head")
        return [server_entry(v, head) if isinstance(v, str) else v for v in value]

    @field_validator("data", mode="before")
    @classmethod
    def _one_path(cls, value: Any) -> Any:
        return [value] if isinstance(value, (str, Path)) else value

    @field_validator("rates")
    @classmethod
    def _rates_positive(cls, value: Any) -> Any:
        if value != AUTO:
            for rate in value:
                if not (math.isfinite(rate) and rate > 0):
                    raise ValueError(f"a request rate must be above 0 requests/s, not {rate:g}")
        return value if value == AUTO else tuple(sorted(set(value)))

    @field_validator("concurrency")
    @classmethod
    def _concurrency_positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for number in value:
            if number < 1:
                raise ValueError(f"concurrency must be at least 1 request, not {number}")
        return tuple(sorted(set(value)))

    @field_validator("goodput")
    @classmethod
    def _goodput_readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = []
        for pair in value:
            match = re.fullmatch(rf"({'|'.join(SLO_NAMES)}):(\d*\.?\d+)", pair)
            if match is None or float(match[2]) == 0:
                raise ValueError(
                    f"objective {pair!r} cannot be read; write NAME:MILLISECONDS with NAME one of "
                    f"{', '.join(SLO_NAMES)}, for example tpot:50"
                )
            if match[1] in names:
                raise ValueError(f"objective {match[1]!r} is given twice")
            names.append(match[1])
        return value

    @model_validator(mode="after")
    def _consistent(self) -> BenchPlan:
        if not self.servers:
            raise ValueError("no server to measure: name at least 'plain'")
        names = [server.name for server in self.servers]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two servers are called {name!r}; give one another name")
        if BASELINE not in names:
            raise ValueError(f"servers must contain {BASELINE!r}: every speed-up is a ratio to it")
        if self.min_requests > self.max_requests:
            raise ValueError(
                f"min_requests={self.min_requests} is above max_requests={self.max_requests}"
            )
        if self.rates == () and not self.concurrency and not self.dataset_requests:
            raise ValueError("nothing to measure: no rates, no concurrency, no dataset_requests")
        return self

    @property
    def execution(self) -> str:
        """How all servers run the model."""
        return "eager" if self.enforce_eager else "compiled"

    @property
    def baseline(self) -> ServerEntry:
        """The server with which all others are compared."""
        return next(server for server in self.servers if server.name == BASELINE)

    @property
    def ordered_servers(self) -> tuple[ServerEntry, ...]:
        """The baseline first, because its throughput determines the rates."""
        rest = [server for server in self.servers if server.name != BASELINE]
        return (self.baseline, *rest)

    def num_requests(self, rate: float | None, concurrency: int | None) -> int:
        """Returns the requests of a run: those that arrive in `point_time` at a rate, four times
        those in flight, or (both None) enough to fill the server twice."""
        if rate is not None:
            wanted = math.ceil(rate * self.point_time)
        else:
            wanted = 2 * self.max_num_seqs if concurrency is None else 4 * concurrency
        return max(self.min_requests, min(wanted, self.max_requests))


class PlanError(ValueError):
    """A plan with mistakes, one line for each."""


def make_plan(values: dict[str, Any]) -> BenchPlan:
    """Returns a checked plan.

    Raises:
        PlanError: naming every wrong field and what it must be.
    """
    try:
        return BenchPlan.model_validate(values)
    except ValidationError as error:
        lines = []
        for mistake in error.errors():
            path = [str(part) for part in mistake["loc"] if not isinstance(part, type)]
            reason = mistake["msg"].removeprefix("Value error, ")
            if mistake["type"] == "extra_forbidden":
                known = BenchPlan.model_fields if len(path) == 1 else ServerEntry.model_fields
                reason = f"no such setting; known: {', '.join(sorted(known))}"
            lines.append(f"{'.'.join(path)}: {reason}" if path else reason)
        raise PlanError("\n".join(dict.fromkeys(lines))) from error


def read_plan_file(path: Path) -> dict[str, Any]:
    """Returns the unchecked settings in a YAML or JSON file. Data paths are relative to the file.

    Raises:
        PlanError: if it cannot be read or is not a mapping.
    """
    try:
        values = _parse(path.read_text(), path)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise PlanError(f"{path} must hold settings by name, e.g. 'rates: [0.5, 1, 2]'")
    data = values.get("data")
    if isinstance(data, str):
        data = [data]
    if isinstance(data, list) and all(isinstance(entry, str) for entry in data):
        values["data"] = [path.parent / entry for entry in data]
    return values


def _parse(text: str, path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def split_list(text: str) -> tuple[str, ...]:
    """Returns the parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def server_entry(name: str, head: str | None) -> ServerEntry:
    """Returns the server of a short name or NAME=VALUE.

    Short names: "plain"; "ngram" and "suffix" (vLLM's own); METHOD[-NODES][-chain][-auto] with a
    method of this plugin. NODES is the tree budget, with "auto" its maximum. "chain" is a tree of
    width 1 without n-gram branches. VALUE: a --speculative-config as JSON, or the URL of a running
    server.

    Raises:
        ValueError: for any other name, or if the method needs a head and there is none.
    """
    short, equals, value = name.partition("=")
    if equals:
        return _explicit_entry(short, value)
    return ServerEntry(name=name, speculative_config=method_config(name, head))


def _explicit_entry(name: str, value: str) -> ServerEntry:
    if value.startswith(("http://", "https://")):
        return ServerEntry(name=name, url=value.rstrip("/"))
    config = json_object(value)
    if config is None:
        raise ValueError(
            f"server {name!r}: {value!r} is neither a --speculative-config as JSON nor an "
            "http:// address"
        )
    return ServerEntry(name=name, speculative_config=config)


def json_object(text: str) -> dict[str, Any] | None:
    """Returns a JSON object; None for any other text."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def method_config(name: str, head: str | None) -> dict[str, Any] | None:
    """Returns the speculative config of a short name (see `server_entry`); None for plain vLLM.

    Raises:
        ValueError: for any other name, or if the method needs a head and there is none.
    """
    if name == BASELINE:
        return None
    if name in VLLM_CONFIGS:
        return dict(VLLM_CONFIGS[name])
    method, *parts = name.split("-")
    nodes = [part for part in parts if part.isdigit()]
    chain = parts.count(CHAIN)
    auto = parts.count(AUTO)
    too_many = len(nodes) > 1 or chain > 1 or auto > 1
    known = len(nodes) + chain + auto == len(parts)
    if method not in method_names() or too_many or not known:
        raise ValueError(
            f"server {name!r} is unknown. Use {BASELINE}, {', '.join(VLLM_CONFIGS)}, "
            f"METHOD[-NODES][-{CHAIN}][-auto] with METHOD one of {', '.join(method_names())} (for "
            f"example {default_method().name}-16), or NAME=JSON with any --speculative-config"
        )
    config: dict[str, Any] = {"method": method}
    if nodes:
        config["num_speculative_tokens"] = config["tree_budget"] = int(nodes[0])
    if auto:
        config["tree_budget"] = AUTO
    if get_method(method).needs_head:
        if head is None:
            raise ValueError(f"server {name!r} needs a draft head: add --head")
        config["model"] = head
        if chain:
            config["ngram_topk"] = 0
    if chain:
        config["tree_width"] = 1
    return config
