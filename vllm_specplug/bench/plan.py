# SPDX-License-Identifier: Apache-2.0
"""What a benchmark measures: servers, traffic, how often. Every field is checked here."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from vllm_specplug.options import tree_option_names
from vllm_specplug.registry import default_method, get_method, method_names

BASELINE = "plain"
CHAIN = "chain"
AUTO = "auto"

# Settings of vLLM's own methods that need no head, as its documentation suggests them.
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
    """vLLM's --speculative-config; none for no speculation."""
    serve_args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, for this server only."""
    url: str | None = Field(default=None, pattern=r"^https?://")
    """A server that runs already, instead of one started here."""


class BenchPlan(BaseModel):
    """Everything that determines the measurements. Times are in seconds, rates in requests/s."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    head: str | None = None
    """Draft head of the servers given by a short name."""
    servers: tuple[ServerEntry, ...]
    """Compared servers, by short name (see `server_entry`) or as a mapping."""
    data: tuple[Path, ...] = Field(min_length=1)
    """JSONL files, or folders of them."""

    dtype: str = "bfloat16"
    max_model_len: int = Field(default=4096, ge=16)
    max_num_seqs: int = Field(default=16, ge=1)
    enforce_eager: bool = False
    """Eager for all servers, plain vLLM too; by default all are compiled, as vLLM is."""
    serve_args: tuple[str, ...] = ("--no-enable-prefix-caching",)
    """More arguments of `vllm serve`. Without prefix caching a prompt met again costs what it
    cost the first time."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the servers; default: any free one."""
    start_timeout: float = Field(default=900.0, gt=0)
    """How long a server may take to start."""
    run_timeout: float = Field(default=3600.0, gt=0)
    """How long one load may take before the server counts as hung."""

    output_len: int = Field(default=128, ge=2)
    """Longest answer, tokens."""
    temperature: float = Field(default=0.0, ge=0.0)
    ignore_eos: bool = False
    """Every answer gets output_len tokens. What comes after an end is repetitive, and easy to
    draft: acceptance is overstated."""
    chat: bool = True
    """Prompts go through the chat template; false sends them as they are."""
    max_prompt_chars: int = Field(default=6000, ge=1)

    rates: Literal["auto"] | tuple[float, ...] = "auto"
    """Poisson request rates. "auto": from one request at a time to past the baseline's
    saturation, both found by measuring the baseline, and all requests at once."""
    points: int = Field(default=5, ge=2, le=50)
    """Rates between these ends, with rates "auto"."""
    overload: float = Field(default=1.5, gt=1.0)
    """Highest rate found, as a multiple of the baseline's saturated throughput."""
    concurrency: tuple[int, ...] = ()
    """Loads with these numbers of requests always in flight."""
    point_time: float = Field(default=30.0, gt=0)
    """How long requests arrive at one rate, within the two limits below."""
    min_requests: int = Field(default=8, ge=1)
    max_requests: int = Field(default=256, ge=1)
    goodput: tuple[str, ...] = ()
    """Service level objectives as `vllm bench serve --goodput` has them, e.g. "tpot:50"
    (milliseconds); a request is good when it meets all of them."""
    dataset_requests: int = Field(default=0, ge=0)
    """Requests of each data set by itself, for its acceptance; 0: none."""
    dataset_concurrency: int = Field(default=4, ge=1)

    repeats: int = Field(default=1, ge=1)
    """Runs of each load; medians are reported."""
    warmup: int = Field(default=4, ge=0)
    """Unmeasured requests to each server after its start."""
    together: bool = False
    """All servers stay up and take turns at each load, all but one paused, so that the machine's
    drift affects all alike. They must fit into memory together."""

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
        parse_goodput(value)
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
        if self.together and self.port is not None:
            raise ValueError("servers that are up together need a port each: leave port out")
        if self.min_requests > self.max_requests:
            raise ValueError(
                f"min_requests={self.min_requests} is above max_requests={self.max_requests}"
            )
        if self.rates == () and not self.concurrency and not self.dataset_requests:
            raise ValueError("nothing to measure: no rates, no concurrency, no dataset_requests")
        return self

    @property
    def execution(self) -> str:
        """How all servers run their models."""
        return "eager" if self.enforce_eager else "compiled"

    @property
    def baseline(self) -> ServerEntry:
        """The server all others are compared with."""
        return next(server for server in self.servers if server.name == BASELINE)

    @property
    def ordered_servers(self) -> tuple[ServerEntry, ...]:
        """The baseline first: its saturation gives the rates of all."""
        rest = [server for server in self.servers if server.name != BASELINE]
        return (self.baseline, *rest)

    def num_requests(self, rate: float | None, concurrency: int | None) -> int:
        """Requests of one run: those that arrive in `point_time` at a rate, four for each one in
        flight, or all at once (both None) enough to fill the server twice."""
        if rate is not None:
            wanted = math.ceil(rate * self.point_time)
        else:
            wanted = 2 * self.max_num_seqs if concurrency is None else 4 * concurrency
        return max(self.min_requests, min(wanted, self.max_requests))


class PlanError(ValueError):
    """A plan that cannot be run; one line per mistake."""


def make_plan(values: dict[str, Any]) -> BenchPlan:
    """A checked plan.

    Raises:
        PlanError: naming every wrong field, what it was and what it must be.
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
    """The settings in a YAML or JSON file, by name, unchecked. Relative data paths are taken
    relative to the file.

    Raises:
        PlanError: when it cannot be read or is not a mapping.
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
        import yaml
    except ModuleNotFoundError:
        raise ValueError("YAML needs the package PyYAML; install it, or write JSON") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds by name.

    Raises:
        ValueError: for anything but "NAME:MILLISECONDS" with a known name and a limit above 0.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = math.nan
        if not colon or name not in SLO_NAMES or not (math.isfinite(limit) and limit > 0):
            raise ValueError(
                f"objective {pair!r} cannot be read; write NAME:MILLISECONDS with NAME one of "
                f"{', '.join(SLO_NAMES)}, for example tpot:50"
            )
        if name in limits:
            raise ValueError(f"objective {name!r} is given twice")
        limits[name] = limit
    return limits


def split_list(text: str) -> tuple[str, ...]:
    """The parts of a comma-separated list."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def server_entry(name: str, head: str | None) -> ServerEntry:
    """The server a short name or NAME=VALUE stands for.

    Short names: "plain"; "ngram" and "suffix" (vLLM's own); METHOD[-NODES][-chain][-auto] with a
    method of this plugin. NODES fixes the tree's budget; with "auto" it is the most a tree may
    have. "chain" is a tree of width 1 from the head only, without n-gram branches. VALUE: a
    --speculative-config as JSON, or the URL of a server that runs already.

    Raises:
        ValueError: for any other name, or a method that needs a head when there is none.
    """
    short, equals, value = name.partition("=")
    if equals:
        return _explicit_entry(short, value)
    return ServerEntry(name=name, speculative_config=method_config(name, head))


def _explicit_entry(name: str, value: str) -> ServerEntry:
    if value.startswith(("http://", "https://")):
        return ServerEntry(name=name, url=value.rstrip("/"))
    try:
        config = json.loads(value)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(
            f"server {name!r}: {value!r} is neither a --speculative-config as JSON nor an "
            "http:// address"
        )
    return ServerEntry(name=name, speculative_config=config)


def method_config(name: str, head: str | None) -> dict[str, Any] | None:
    """The speculative config a short name stands for (see `server_entry`); None for plain vLLM.

    Raises:
        ValueError: for any other name, or a method that needs a head when there is none.
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
        config["num_speculative_tokens"] = int(nodes[0])
    if "tree_budget" in tree_option_names():
        if nodes and not auto:
            config["tree_budget"] = int(nodes[0])
        elif auto:
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
