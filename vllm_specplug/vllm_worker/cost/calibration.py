# SPDX-License-Identifier: Apache-2.0
"""Times of target and draft forwards on this machine, taken once and kept on disk.

Dummy forwards of the loaded model give the shape of the curves: where rows are nearly free and
where they start to cost. Their level need not be exact, real steps correct it while serving.
Where workers split the target, among tensor parallel ranks or replicas of a mixture-of-experts
target, every forward is a collective and all must run the same ones: the first worker's clock and
its cached file decide how many, and its times are what all use.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import torch
import vllm
from vllm.distributed import get_world_group
from vllm.logger import init_logger

from vllm_specplug import __version__
from vllm_specplug.budget import AdaptiveBudget, Calibration, StepCostModel, draft_rows
from vllm_specplug.kernels.packed_linear import packs_target
from vllm_specplug.targets import cache_dir
from vllm_specplug.vllm_attention.full_graphs import wants_full_graphs
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner
from vllm_specplug.vllm_worker.ranks import any_failed as any_failed_worker
from vllm_specplug.vllm_worker.ranks import first_worker_values
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.warmup import dummy_requests

logger = init_logger("vllm.specplug.calibration")

Share = Callable[[list[float]], list[float]]
Agree = Callable[[Exception | None], bool]

TIME_LIMIT_S = 5.0
_PASSES = 5
_MAX_NOISE = 1.3
_MAX_FALL = 1.05
# In the order they are first measured, for when time runs out: with the first two, sizes between
# them look a little too expensive rather than too cheap.
_ROWS = (1, 32, 8, 64, 16, 4, 128, 24, 48, 12, 2, 96, 256)
# Of a device, where more rows are still worth their time.
_DEVICE_ROWS = (*_ROWS, 512, 1024, 384, 192, 768)
# Calls that are timed together on a device, behind one that hides the host's part of them, as in
# steps that are scheduled ahead.
_DEVICE_CALLS = 3
_SHORT_CONTEXT = 64
_CONTEXT_ROWS = 8
# Whether rows are timed as those of trees, whose context is read once.
_TREES_ATTEND = True
_MIN_ATTENTION_SPAN = 256


class CalibrationError(RuntimeError):
    """Step costs could not be measured on some worker; raised on all of them."""


class TargetForwardError(RuntimeError):
    """A forward of the target failed on some worker; raised on all of them."""


class Calibrator:
    """Measures one runner's forwards.

    All of them once, then all of them again, a few times, the best time of each counting: a machine
    that is busy for a second then spoils one time of each and not all times of one.

    Args:
        state: of a tree runner, ready to serve, with no requests.
        share: replaces values by those of the first worker.
        any_failed: whether something failed on any worker, given what failed here.
    """

    def __init__(
        self,
        state: RunnerView,
        share: Share,
        any_failed: Agree = bool,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self.state = state
        self.share = share
        self.any_failed = any_failed
        self.time_limit_s = time_limit_s
        self.start = time.perf_counter()
        # By what was timed, milliseconds of each pass.
        self._times: dict[tuple[str, float], list[float]] = {}
        self._calls = 1 if state.is_host else _DEVICE_CALLS

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too busy for the times to be worth keeping."""
        # The first pass includes one-time costs.
        later = [times[1:] if len(times) > 2 else times for times in self._times.values()]
        return median(median(times) / max(min(times), 1e-4) for times in later) > _MAX_NOISE

    def measure(self) -> Calibration:
        """Times by rows, by context, and of the draft forward.

        Raises:
            CalibrationError: on every worker, when a draft failed on any.
            TargetForwardError: likewise, when a forward of the target did.
        """
        longest = self.state.max_model_len
        context = max(1, min(_SHORT_CONTEXT, longest - 1))
        # The first forward of a process allocates; it is not counted.
        self._together_on_target(lambda: self.state.dummy_forward(1, context))
        sizes: list[int] = []
        for rows in filter(self._fits, self._sizes()):
            # Early enough for at least two more passes.
            if len(sizes) >= 2 and self._has_passed(0.25):
                break
            self._time_forward("rows", rows, min(max(context, rows), longest))
            sizes.append(rows)
        warmups = self._warmups()
        most = min(longest, 2048)
        span = most - context if most - context >= _MIN_ATTENTION_SPAN else 0
        probe_rows = min(_CONTEXT_ROWS, self.state.max_rows)
        tree_rows = self.state.drafter_options.num_nodes + 1
        trees = min(_CONTEXT_ROWS, self.state.max_requests, self.state.max_rows // tree_rows)
        # Their rows attend each other.
        short = max(context, tree_rows)
        tree_span = max(0, most - short)
        # Layers with a state take rows of trees only beside their states.
        if self.state.is_host or self.state.state_layers.names or tree_span < _MIN_ATTENTION_SPAN:
            trees = 0
        passes = 0
        # Never a single one: it may have been interrupted.
        while passes < 2 or (passes < _PASSES and not self._has_passed(1.0)):
            if passes:
                for rows in sizes:
                    self._time_forward("rows", rows, min(max(context, rows), longest))
            for count, reach in warmups:
                self._time_draft(count, reach)
            if span:
                self._time_forward("near", probe_rows, context)
                self._time_forward("far", probe_rows, most)
            if trees:
                self._time_trees("near trees", trees, short)
                self._time_trees("far trees", trees, most)
            passes += 1
        return self._calibration(probe_rows * span, trees * tree_span)

    def _sizes(self) -> tuple[int, ...]:
        """Rows to time, the most telling first."""
        if self.state.is_host:
            return _ROWS
        # vLLM's memory profile had the logits of no larger step.
        most = self.state.max_requests * (self.state.drafter_options.num_nodes + 1)
        limit = self.state.vllm_config.speculative_config.max_step_rows or most
        return tuple(rows for rows in _DEVICE_ROWS if rows <= min(most, limit))

    def _fits(self, rows: int) -> bool:
        """Whether vLLM's dummy batch of that many rows fits the block tables, which have room for
        the model's length: kernels would read past their end."""
        requests = min(rows, self.state.max_requests)
        longest = rows // requests + rows % requests
        return rows <= self.state.max_rows and longest <= self.state.max_model_len

    def _calibration(self, attended: int, attended_by_trees: int) -> Calibration:
        """Values broadcast from the first worker.

        Args:
            attended: tokens that the rows of "far" forwards attend more than those of "near" ones.
            attended_by_trees: the same of trees, each counted once.
        """
        keys = list(self._times)
        best = self.share([max(min(self._times[key]), 1e-4) for key in keys])
        by_part: dict[str, dict[float, float]] = {}
        for (part, size), ms in zip(keys, best, strict=True):
            by_part.setdefault(part, {})[size] = ms
        rows = tuple(sorted(by_part["rows"]))
        draft = by_part.get("draft", {1.0: 0.05})
        draft_rows = tuple(sorted(draft))

        def longer_ms(near: str, far: str) -> float:
            (short,), (long,) = by_part[near].values(), by_part[far].values()
            return max(0.0, long - short)

        context_ms = longer_ms("near", "far") / attended if attended else 0.0
        attention_ms = context_ms
        if "far trees" in by_part:
            tree_ms = longer_ms("near trees", "far trees") / attended_by_trees
            nodes = self.state.drafter_options.num_nodes
            attention_ms = max(0.0, tree_ms - context_ms) / nodes
        return Calibration(
            rows=rows,
            forward_ms=tuple(by_part["rows"][r] for r in rows),
            logits_ms=tuple(by_part["rows logits"][r] for r in rows),
            context_ms=context_ms,
            attention_ms=attention_ms,
            draft_rows=draft_rows,
            draft_ms=tuple(draft[r] for r in draft_rows),
        )

    def _has_passed(self, share_of_limit: float) -> bool:
        left = share_of_limit * self.time_limit_s - (time.perf_counter() - self.start)
        return self.share([left])[0] < 0

    def _note(self, part: str, rows: float, elapsed_ms: float) -> None:
        self._times.setdefault((part, rows), []).append(elapsed_ms)

    def together(self, call: Callable[[], object], calls: int = 1) -> float:
        """Milliseconds that a `call` took here; the workers part only once it succeeded on all.

        Args:
            calls: to time one after the other, behind one more that is not timed where there are
                several.
        """
        elapsed_ms = 0.0
        failure: Exception | None = None
        try:
            elapsed_ms = max(self._timed(call, calls), 1e-4)
        except Exception as error:
            failure = error
        if self.any_failed(failure):
            reason = "another worker failed"
            if failure is not None:
                reason = f"{type(failure).__name__}: {failure}"
            raise CalibrationError(reason) from failure
        return elapsed_ms

    def _timed(self, call: Callable[[], object], calls: int) -> float:
        """Milliseconds of a call, on average over some in a row."""
        if calls > 1:
            call()
        clock = self.state.clock
        start = clock.mark()
        for _ in range(calls):
            call()
        end = clock.mark()
        self.state.wait_for_device()
        return clock.between(start, end) / calls

    def _together_on_target(self, call: Callable[[], object]) -> float:
        """`together`, of what the engine cannot serve without."""
        try:
            return self.together(call, self._calls)
        except CalibrationError as error:
            raise TargetForwardError(
                f"A forward of the target failed while step costs were measured ({error}); it "
                "would fail while serving"
            ) from error.__cause__

    def _time_forward(self, part: str, rows: int, context: int) -> None:
        """One forward of the target, and the logits of its rows."""
        hidden: list[torch.Tensor] = []

        def forward() -> None:
            hidden[:] = [self.state.tree_forward(rows, context)]

        def logits() -> None:
            self.state.logits(hidden[0][:rows])

        self._note(part, float(rows), self._together_on_target(forward))
        if part == "rows":
            self._note("rows logits", float(rows), self._together_on_target(logits))

    def _time_trees(self, part: str, trees: int, context: int) -> None:
        forward = partial(self.state.trees_forward, trees, context)
        self._note(part, float(trees), self._together_on_target(forward))

    def _warmups(self) -> list[tuple[int, int]]:
        """Requests and depth of the draft forwards to time; empty when the method has none."""
        depth = self.state.drafter.forward_depth
        if not depth:
            return []
        most = self.state.max_requests
        counts = sorted({1, min(4, most), min(16, most)})
        found = [(count, depth) for count in counts]
        if depth == 1:
            return found
        # By level a shallow draft for many costs less than a deep one for few.
        shallow = counts if self.state.drafter.drafts_by_level else [1]
        return [*found, *((count, 1) for count in shallow)]

    def _time_draft(self, count: int, reach: int) -> None:
        """One draft forward of `count` dummy requests."""
        drafter = self.state.drafter
        # Heads that draft by levels expand a few nodes in each where the budget is adaptive.
        nodes = 2 * reach if drafter.drafts_by_level else None
        rows = float(draft_rows(count, reach, drafter.drafts_by_level))
        with dummy_requests(self.state, count, reach, nodes=nodes) as requests:
            draft_ms = self.together(lambda: self.state.draft(requests), self._calls)
            self._note("draft", rows, draft_ms)


def calibrate(
    state: RunnerView, share: Share, is_first_rank: bool, any_failed: Agree = bool
) -> Calibration:
    """The calibration of this runner: the cached one, or a new one that is then cached.

    Raises:
        CalibrationError: on every worker, when a draft failed on any, or dummy adapters did.
        TargetForwardError: likewise, when a forward of the target did.
    """
    try:
        path = cache_dir() / "calibration" / f"{_digest(state)}.json"
    except RuntimeError:  # a user without a home
        path = None
    cached = _read(path) if is_first_rank and path is not None else None
    if cached is not None and _falls(cached):
        cached = None
    values = [0.0] if cached is None else [1.0, *_flat(cached)]
    # All take the first worker's file; theirs may be another machine's or missing.
    size = int(share([float(len(values))])[0])
    shared = share((values + [0.0] * size)[:size])
    if shared[0]:
        calibration = _unflat(shared[1:])
        logger.info("Tree budget: step costs from an earlier calibration (%s)", path)
        return calibration
    start = time.perf_counter()
    calibrator = Calibrator(state, share, any_failed)
    with ExitStack() as stack:
        # Making them takes memory, which one worker may lack.
        calibrator.together(lambda: stack.enter_context(state.dummy_adapters()))
        calibration = calibrator.measure()
    if is_first_rank:
        stored = "not stored"
        if calibrator.is_noisy:
            stored += ", the machine was busy"
        elif _falls(calibration):
            stored += ", fewer rows took longer than more"
        elif path is not None:
            _write(path, calibration)
            stored = f"stored in {path}"
        times = ", ".join(
            f"{a + b:.1f} ms at {int(r)}"
            for r, a, b in zip(
                calibration.rows, calibration.forward_ms, calibration.logits_ms, strict=True
            )
        )
        logger.info(
            "Tree budget: measured step costs in %.1f s (rows: %s); %s",
            time.perf_counter() - start,
            times,
            stored,
        )
    return calibration


def start_budget(planner: DraftPlanner, state: RunnerView) -> None:
    """Measures step costs for an adaptive budget; nothing where it is fixed. Call once the model is
    ready to serve.

    Where they cannot be measured on some worker, the budget is fixed on all.

    Raises:
        TargetForwardError: on every worker, when a forward of the target failed on any.
    """
    if not planner.is_adaptive:
        return
    is_first = get_world_group().is_first_rank
    try:
        calibration = calibrate(state, first_worker_values, is_first, any_failed_worker)
    except CalibrationError as error:
        logger.warning(
            "Tree budget: step costs could not be measured (%s); trees take a fixed budget of "
            "num_speculative_tokens nodes",
            error,
        )
        return
    planner.adaptive = AdaptiveBudget(
        StepCostModel(calibration, state.drafter.drafts_by_level),
        planner.row_budget,
        state.drafter.forward_depth,
    )
    planner.adaptive.lookups.is_on = get_world_group().world_size == 1


def _falls(calibration: Calibration) -> bool:
    """Whether some rows took clearly longer than more of them, as on a machine that is busy."""
    c = calibration
    times = [a + b for a, b in zip(c.forward_ms, c.logits_ms, strict=True)]
    return any(ms > _MAX_FALL * min(times[i:]) for i, ms in enumerate(times))


def _digest(state: RunnerView) -> str:
    """Everything that changes the times, as a file name."""
    config = state.vllm_config
    spec = config.speculative_config
    factors = [
        # How it is measured.
        _DEVICE_ROWS,
        _DEVICE_CALLS,
        _PASSES,
        __version__,
        vllm.__version__,
        torch.__version__,
        config.model_config.model,
        str(config.model_config.dtype),
        config.model_config.max_model_len,
        str(config.model_config.quantization),
        config.model_config.enforce_eager,
        str(config.compilation_config.cudagraph_mode),
        wants_full_graphs(config),
        config.cache_config.block_size,
        config.cache_config.cache_dtype,
        config.cache_config.kv_cache_dtype_skip_layers,
        config.cache_config.mamba_cache_dtype,
        config.cache_config.mamba_ssm_cache_dtype,
        config.parallel_config.tensor_parallel_size,
        config.parallel_config.data_parallel_size,
        config.scheduler_config.max_num_seqs,
        state.max_rows,
        spec.plugin_method,
        spec.head_path,
        spec.num_speculative_tokens,
        spec.draft_depth,
        spec.tree_width,
        spec.tree_kernel,
        spec.draft_weights,
        state.device.type == "cpu" and packs_target(spec.target_products),
        _TREES_ATTEND,
        repr(state.drafter_options),
        len(state.state_layers.names),
        state.drafter.forward_depth,
        state.drafter.drafts_by_level,
        None if state.runner.lora_config is None else state.runner.lora_config.compute_hash(),
        torch.get_num_threads(),
        os.cpu_count(),
        _device_name(state.device),
    ]
    return hashlib.sha256(json.dumps(factors).encode()).hexdigest()[:20]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "|".join(sorted({line for line in lines if line.startswith(wanted)}))


def _read(path: Path) -> Calibration | None:
    try:
        return Calibration.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("Tree budget: calibrating again, %s cannot be used: %s", path, error)
        return None


def _write(path: Path, calibration: Calibration) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that an engine that starts meanwhile never reads half a file.
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as stream:
            json.dump(calibration.to_json(), stream, indent=1)
        os.replace(stream.name, path)
    except OSError as error:
        logger.warning("Tree budget: step costs could not be stored: %s", error)


def _flat(calibration: Calibration) -> list[float]:
    """The calibration as a list of numbers, for a broadcast."""
    c = calibration
    counts = (float(len(c.rows)), float(len(c.draft_rows)))
    return [
        *counts,
        c.context_ms,
        c.attention_ms,
        *c.rows,
        *c.forward_ms,
        *c.logits_ms,
        *c.draft_rows,
        *c.draft_ms,
    ]


def _unflat(values: list[float]) -> Calibration:
    num_rows, num_draft = int(values[0]), int(values[1])
    rest = iter(values[4:])

    def take(count: int) -> tuple[float, ...]:
        return tuple(next(rest) for _ in range(count))

    return Calibration(
        rows=take(num_rows),
        forward_ms=take(num_rows),
        logits_ms=take(num_rows),
        context_ms=values[2],
        attention_ms=values[3],
        draft_rows=take(num_draft),
        draft_ms=take(num_draft),
    )
