# SPDX-License-Identifier: Apache-2.0
"""A step's times reach the cost model, and nothing waits for a device on the way."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.vllm_worker.planning import planner_of
from vllm_specplug.tree import DraftTree
from vllm_specplug.vllm_worker.cost.draft_planner import DraftPlanner, StepRequest
from vllm_specplug.vllm_worker.cost.step_clock import DeviceClock, StepClock


class Device:
    """A pretended one that passes events later than the host records them.

    Reading an event that was not passed fails: a real one would make the host wait.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[Event] = []

    def make_event(self) -> Event:
        return Event(self)

    def catch_up(self, behind: int = 0) -> None:
        """Passes all events but the last few."""
        for event in self.events[: len(self.events) - behind]:
            event.passed = True


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.passed = device, False

    def record(self) -> None:
        self.at = self.device.now
        self.device.events.append(self)

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, end: Event) -> float:
        assert self.passed and end.passed, "the host would wait"
        return 1e3 * (end.at - self.at)


def test_a_device_is_read_once_it_has_passed_and_in_order() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    times: list[float] = []
    start = clock.mark()
    device.now += 0.25
    middle = clock.mark()
    clock.measure(start, middle, times.append)
    device.now += 0.5
    clock.measure(middle, clock.mark(), times.append)
    clock.poll()
    assert times == []
    device.catch_up(behind=1)
    clock.poll()
    assert times == [250.0]
    device.catch_up()
    clock.poll()
    clock.poll()
    assert times == [250.0, 500.0]


def test_a_device_far_behind_does_not_pile_up_events() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    times: list[float] = []
    for _ in range(1000):
        clock.measure(clock.mark(), clock.mark(), times.append)
        clock.poll()
    assert not times and len(clock._pending) < 100
    device.catch_up()
    clock.poll()
    assert times and not clock._pending


def test_later_only_every_fourth_step_is_timed_and_whole() -> None:
    device = Device()
    clock = DeviceClock(device.make_event)
    whole: list[float] = []
    parts: list[tuple[int, float]] = []
    before = clock.begin_step()
    for step in range(1, 101):
        device.now += 1.0
        clock.measure(before, clock.mark(), lambda ms, step=step: parts.append((step, ms)))
        device.now += 2.0
        began = clock.begin_step()
        clock.measure(before, began, whole.append)
        before = began
        device.catch_up()
        clock.poll()
    later = list(range(68, 101, 4))
    assert parts == [(step, 1000.0) for step in (*range(1, 65), *later)]
    # And the step before each, which ends where it begins.
    assert whole[64:] == [3000.0] * len(whole[64:]) and len(whole) >= 64 + len(later)


TREE = DraftTree.chain([1, 2, 3, 4], [-0.1, -0.2, -0.3, -0.4])


def _serve(planner: DraftPlanner, clock: Any, steps: int, device: Device) -> None:
    """Steps of five rows: 200 ms to the walk, 6 ms of everything else. The device is a step behind
    the host."""
    for _ in range(steps):
        planner.begin_step()
        device.now += 0.2
        walked = clock.mark()
        request = StepRequest(0, 0, 5, 100, TREE, [0, 1])
        planner.observe([request], ["a"], walked)
        device.now += 0.006
        device.catch_up(behind=2)


@pytest.mark.parametrize("late", [False, True])
def test_the_cost_model_learns_at_once_or_from_a_device_a_step_late(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    device = Device()
    monkeypatch.setattr("time.perf_counter", lambda: device.now)
    clock = DeviceClock(device.make_event) if late else StepClock()
    planner = planner_of(clock=clock)
    assert planner.adaptive is not None
    costs = planner.adaptive.costs
    learnt: list[float] = []
    observe = costs.observe_verify
    costs.observe_verify = lambda *args, **more: (  # type: ignore
        learnt.append(args[3]),
        observe(*args, **more),
    )
    # What the host reads of a device is two steps old.
    _serve(planner, clock, 3 + 2 * late, device)
    assert learnt == []
    _serve(planner, clock, 1, device)
    # The fourth step is the first that means something.
    assert learnt == pytest.approx([200.0])
    assert len(planner.stats.milliseconds["verify"]) == 4
    _serve(planner, clock, 160, device)
    assert float(costs.verify_ms(5, 5, 500, has_trees=True)) == pytest.approx(200, rel=0.1)
    assert costs.rest_ms + costs.tree_rest_ms == pytest.approx(6.0, rel=0.1)
    # Later only every fourth step of a device is timed.
    assert planner.stats.predicted_actual == (178 if late else 2 * 164)
    expected = planner.stats.predicted_actual
    assert planner.stats.predicted_accepted == pytest.approx(expected, rel=0.25)


def test_a_step_may_be_looked_at_when_others_are_over() -> None:
    """Its walk is then measured after the whole of it."""
    device = Device()
    clock = DeviceClock(device.make_event)
    planner = planner_of(clock=clock)
    assert planner.adaptive is not None
    planner.nodes_for("a", None, 1)
    costs = planner.adaptive.costs
    late: list[Any] = []
    for _ in range(160):
        planner.begin_step()
        device.now += 0.2
        late.append((clock.mark(), planner.running))
        device.now += 0.006
        device.catch_up(behind=2)
        if len(late) > 2:
            walked, running = late.pop(0)
            request = StepRequest(0, 0, 5, 100, TREE, [0, 1])
            planner.observe([request], ["a"], walked, running)
    assert float(costs.verify_ms(5, 5, 500, has_trees=True)) == pytest.approx(200, rel=0.1)
    assert costs.rest_ms + costs.tree_rest_ms == pytest.approx(6.0, rel=0.1)
