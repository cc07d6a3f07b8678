# SPDX-License-Identifier: Apache-2.0
"""Timing of kernels on a device, by replaying graphs with data that no cache holds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch


def time_us(
    calls: Sequence[Callable[[], None]], device: torch.device, budget_s: float = 0.15
) -> float:
    """Returns microseconds of a call: the median over replays of a graph with all calls.

    The data of all calls must exceed the device's L2.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        calls[0]()
        return 1e6 * (time.perf_counter() - start)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(1e3 * events[0].elapsed_time(events[1]))
    return median(times) / len(calls)


def copy_bandwidth(device: torch.device) -> float:
    """Returns bytes read plus bytes written per second by a large copy on the device."""
    size = 2**30 if device.type == "cuda" else 2**24
    source = torch.randint(0, 100, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = time_us([lambda: target.copy_(source)], device, budget_s=0.5)
    return 2 * size / (us * 1e-6)


def product_rate(device: torch.device) -> float:
    """Returns operations per second of a large bfloat16 product on the device."""
    size = 8192 if device.type == "cuda" else 128
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    output = torch.empty_like(a)
    us = time_us([lambda: torch.mm(a, b, out=output)], device, budget_s=0.5)
    return 2 * size**3 / (us * 1e-6)
