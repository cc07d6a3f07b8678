# SPDX-License-Identifier: Apache-2.0
"""Measures target and draft forwards when an engine starts.

Dummy forwards of the loaded model give the shape of the curves: where rows are nearly free and
where they start to cost. Their level need not be exact, because real steps correct it.

If workers split the target, as tensor parallel ranks or as replicas of a mixture-of-experts target,
every forward is a collective that all of them must run. The first worker's clock decides how many
forwards run, and all workers use its times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from vllm.logger import init_logger

from vllm_specplug.budget.adaptive_budget import AdaptiveBudget
from vllm_specplug.budget.step_cost import Calibration, StepCostModel, draft_rows
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner
from vllm_specplug.vllm_worker.ranks import any_failed, drafting_workers, first_worker_values
from vllm_specplug.vllm_worker.runner_view import RunnerView
from vllm_specplug.vllm_worker.warmup import dummy_requests

logger = init_logger("vllm.specplug.calibration")

Share = Callable[[list[float]], list[float]]
Agree = Callable[[Exception | None], bool]

TIME_LIMIT_S = 5.0
_PASSES = 5
# In the order of measurement, as time may run out. With only the first two, sizes between them look
# a little too expensive rather than too cheap.
_ROWS = (1, 32, 8, 64, 16, 4, 128, 24, 48, 12, 2, 96, 256)
# On a device, more rows are still worth their time.
_DEVICE_ROWS = (*_ROWS, 512, 1024, 384, 192, 768)
# Calls that are timed together on a device. An untimed call before them hides the host's work, as
# in steps that are scheduled ahead.
_DEVICE_CALLS = 3
_SHORT_CONTEXT = 64
_CONTEXT_ROWS = 8
_LONG_CONTEXT = 2048
_MIN_CONTEXT_SPAN = 256


@dataclass(frozen=True)
class _ContextProbe:
    """Forwards of equal rows over a near and a far context, which differ by the context's cost."""

    # rows, or trees
    count: int
    # tokens of context
    near: int
    far: int

    @property
    def extra_tokens(self) -> int:
        """Tokens that the far forward attends beyond the near one."""
        return self.count * (self.far - self.near)


class Calibrator:
    """Measures one runner's forwards.

    It measures all of them several times in turn and takes the best time of each. A machine that is
    busy for a second then spoils one time of each forward, not all times of one forward.

    Args:
        state: view of a tree runner that is ready to serve, with no requests.
        share: replaces values by the first worker's.
        any_failed: returns whether any worker failed, given this worker's exception.
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
        # (part, size) of a forward -> its least milliseconds
        self._times: dict[tuple[str, float], float] = {}
        self._calls = 1 if state.is_host else _DEVICE_CALLS

    def measure(self) -> Calibration:
        """Returns times by rows, by context, and of the draft forward, equal on all workers.

        Raises:
            RuntimeError: on every worker, if a forward, a draft or the creation of dummy adapters
                failed on any.
        """
        with ExitStack() as stack:
            # Adapters take memory, which one worker may lack.
            self.run(lambda: stack.enter_context(self.state.dummy_adapters()))
            return self._measure()

    def _measure(self) -> Calibration:
        context = max(1, min(_SHORT_CONTEXT, self.state.max_model_len - 1))
        # The first forward of a process allocates memory, so its time does not count.
        self.run(lambda: self.state.dummy_forward(1, context), self._calls)
        sizes: list[int] = []
        for rows in filter(self._fits, self._sizes()):
            # Stop early enough for at least two more passes.
            if len(sizes) >= 2 and self._has_passed(0.25):
                break
            self._time_rows(rows, context)
            sizes.append(rows)
        drafts = self._draft_sizes()
        row_probe, tree_probe = self._row_probe(context), self._tree_probe(context)
        passes = 0
        # At least two: one alone may have been interrupted.
        while passes < 2 or (passes < _PASSES and not self._has_passed(1.0)):
            if passes:
                for rows in sizes:
                    self._time_rows(rows, context)
            for num_requests, depth in drafts:
                self._time_draft(num_requests, depth)
            if row_probe is not None:
                self._time_forward("near", row_probe.count, row_probe.near)
                self._time_forward("far", row_probe.count, row_probe.far)
            if tree_probe is not None:
                self._time_trees("near trees", tree_probe.count, tree_probe.near)
                self._time_trees("far trees", tree_probe.count, tree_probe.far)
            passes += 1
        return self._calibration(row_probe, tree_probe)

    def _row_probe(self, context: int) -> _ContextProbe | None:
        """Returns the probe for rows; None if the model's length has no room for one."""
        far = min(self.state.max_model_len, _LONG_CONTEXT)
        if far - context < _MIN_CONTEXT_SPAN:
            return None
        return _ContextProbe(min(_CONTEXT_ROWS, self.state.max_rows), context, far)

    def _tree_probe(self, context: int) -> _ContextProbe | None:
        """Returns the probe for trees; None on a host, for layers with a recurrent state, which
        take rows of trees only with their states, and if there is no room for one."""
        far = min(self.state.max_model_len, _LONG_CONTEXT)
        tree_rows = self.state.drafter_options.num_nodes + 1
        # Rows of a tree attend each other.
        near = max(context, tree_rows)
        trees = min(_CONTEXT_ROWS, self.state.max_requests, self.state.max_rows // tree_rows)
        if self.state.is_host or self.state.state_layers.names or far - near < _MIN_CONTEXT_SPAN:
            return None
        return _ContextProbe(trees, near, far) if trees else None

    def _sizes(self) -> tuple[int, ...]:
        """Returns the numbers of rows to time, the most informative first."""
        if self.state.is_host:
            return _ROWS
        # vLLM's memory profile included the logits of no larger step.
        most = self.state.max_requests * (self.state.drafter_options.num_nodes + 1)
        limit = self.state.vllm_config.speculative_config.max_step_rows or most
        return tuple(rows for rows in _DEVICE_ROWS if rows <= min(most, limit))

    def _fits(self, rows: int) -> bool:
        """Returns whether vLLM's dummy batch of `rows` fits the block tables, which have room for
        the model's length. Kernels would read past their end."""
        requests = min(rows, self.state.max_requests)
        longest = rows // requests + rows % requests
        return rows <= self.state.max_rows and longest <= self.state.max_model_len

    def _calibration(
        self, row_probe: _ContextProbe | None, tree_probe: _ContextProbe | None
    ) -> Calibration:
        """Returns the best times, broadcast from the first worker."""
        keys = list(self._times)
        best = self.share([max(self._times[key], 1e-4) for key in keys])
        by_part: dict[str, dict[float, float]] = {}
        for (part, size), ms in zip(keys, best, strict=True):
            by_part.setdefault(part, {})[size] = ms
        rows = tuple(sorted(by_part["rows"]))
        draft = by_part.get("draft", {1.0: 0.05})
        draft_rows = tuple(sorted(draft))

        def token_ms(near: str, far: str, probe: _ContextProbe) -> float:
            (near_ms,), (far_ms,) = by_part[near].values(), by_part[far].values()
            return max(0.0, far_ms - near_ms) / probe.extra_tokens

        context_ms = 0.0 if row_probe is None else token_ms("near", "far", row_probe)
        attention_ms = context_ms
        if tree_probe is not None:
            tree_ms = token_ms("near trees", "far trees", tree_probe)
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
        key = (part, rows)
        self._times[key] = min(elapsed_ms, self._times.get(key, elapsed_ms))

    def run(self, call: Callable[[], object], calls: int = 1) -> float:
        """Returns the milliseconds of a `call` on this worker, once it succeeded on all.

        Args:
            calls: number of calls to time in a row; more than one follow an untimed call.

        Raises:
            RuntimeError: on every worker, if it failed on any.
        """
        elapsed_ms = 0.0
        failure: Exception | None = None
        try:
            elapsed_ms = max(self._timed(call, calls), 1e-4)
        except Exception as error:
            failure = error
        if self.any_failed(failure):
            reason = "another worker failed; its log says why"
            if failure is not None:
                reason = f"{type(failure).__name__}: {failure}"
            raise RuntimeError(
                f"Step costs cannot be measured: {reason}. The same call would fail while serving. "
                'Where serving needs less, set tree_budget to a number: only "auto" measures costs.'
            ) from failure
        return elapsed_ms

    def _timed(self, call: Callable[[], object], calls: int) -> float:
        """Returns the mean milliseconds of `calls` calls in a row."""
        if calls > 1:
            call()
        clock = self.state.clock
        start = clock.mark()
        for _ in range(calls):
            call()
        end = clock.mark()
        self.state.wait_for_device()
        return clock.between(start, end) / calls

    def _time_rows(self, rows: int, context: int) -> None:
        """Times a forward of `rows` and the logits of all of them."""
        context = min(max(context, rows), self.state.max_model_len)
        hidden = self._time_forward("rows", rows, context)
        logits = partial(self.state.logits, hidden[:rows])
        self._note("rows logits", float(rows), self.run(logits, self._calls))

    def _time_forward(self, part: str, rows: int, context: int) -> torch.Tensor:
        """Times a forward of the target and returns its hidden states."""
        hidden: list[torch.Tensor] = []

        def forward() -> None:
            hidden[:] = [self.state.tree_forward(rows, context)]

        self._note(part, float(rows), self.run(forward, self._calls))
        return hidden[0]

    def _time_trees(self, part: str, trees: int, context: int) -> None:
        forward = partial(self.state.trees_forward, trees, context)
        self._note(part, float(trees), self.run(forward, self._calls))

    def _draft_sizes(self) -> list[tuple[int, int]]:
        """Returns number of requests and depth of each draft forward to time; none if the method
        has no draft forward."""
        depth = self.state.drafter.forward_depth
        if not depth:
            return []
        most = self.state.max_requests
        counts = sorted({1, min(4, most), min(16, most)})
        sizes = [(count, depth) for count in counts]
        if depth > 1:
            # By level, a shallow draft for many requests costs less than a deep one for few.
            shallow = counts if self.state.drafter.drafts_by_level else [1]
            sizes += [(count, 1) for count in shallow]
        return sizes

    def _time_draft(self, num_requests: int, depth: int) -> None:
        """Times a draft forward of dummy requests."""
        drafter = self.state.drafter
        # Under an adaptive budget, heads that draft by level expand a few nodes in each.
        nodes = 2 * depth if drafter.drafts_by_level else None
        rows = float(draft_rows(num_requests, depth, drafter.drafts_by_level))
        with dummy_requests(self.state, num_requests, depth, nodes=nodes) as requests:
            draft_ms = self.run(lambda: self.state.draft(requests), self._calls)
            self._note("draft", rows, draft_ms)


def start_budget(planner: DraftPlanner, state: RunnerView) -> None:
    """Measures step costs for an adaptive budget. Call it once the model is ready to serve.

    Raises:
        RuntimeError: on every worker, if a forward or a draft failed on any.
    """
    if not planner.is_adaptive:
        return
    start = time.perf_counter()
    calibration = Calibrator(state, first_worker_values, any_failed).measure()
    if drafting_workers().is_first_rank:
        _log(calibration, time.perf_counter() - start)
    planner.adaptive = AdaptiveBudget(
        StepCostModel(calibration, state.drafter.drafts_by_level),
        planner.row_budget,
        state.drafter.forward_depth,
    )
    planner.adaptive.lookups.is_on = drafting_workers().world_size == 1


def _log(calibration: Calibration, elapsed_s: float) -> None:
    rows, forward_ms, logits_ms = calibration.rows, calibration.forward_ms, calibration.logits_ms
    times = ", ".join(
        f"{forward + logits:.1f} ms at {int(count)}"
        for count, forward, logits in zip(rows, forward_ms, logits_ms, strict=True)
    )
    logger.info("Tree budget: measured step costs in %.1f s (rows: %s)", elapsed_s, times)
