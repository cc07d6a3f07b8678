# SPDX-License-Identifier: Apache-2.0
"""Memory of a server's worker under load, by what it is for.

    python -m tests.soak.serve_memory --method jetspec --seconds 780
    python -m tests.soak.serve_memory --method none --requests 5000

Serves the demo's model to clients that never repeat a prompt, and notes every 20 seconds how much
the worker keeps resident, in MiB: in all, in heaps, in large blocks and of files; and what of its
heaps glibc counts as in use and as free. At the end it names the mappings that grew most.
docs/operations.md says what grows and why.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_specplug.bench.server import ServerSpec, VllmServer
from vllm_specplug.presets import speculative_config
from vllm_specplug.targets import cache_dir, prepare_target

EVERY_S = 20.0
TOPICS = ("rivers", "prime numbers", "a lost dog", "sorting a list", "bread", "the moon", "chess")
_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+\s*(.*)$")
_MIB = 1 << 20
# Of glibc's: an arena's heaps lie at multiples of their largest size.
_ARENA_HEAP = 64 * _MIB


@dataclass(frozen=True)
class Mapping:
    """One line of a process's memory map."""

    start: int
    size: int
    name: str
    resident: int

    @property
    def kind(self) -> str:
        """What uses it: files, malloc's heaps, or large blocks that malloc maps one by one."""
        if self.name.startswith("/"):
            return "files"
        if self.name == "[heap]" or self.start % _ARENA_HEAP == 0:
            return "heaps"
        return "blocks"


def mappings(pid: int) -> dict[int, Mapping]:
    """The memory map of a process, by address."""
    found: dict[int, Mapping] = {}
    start = size = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if header := _HEADER.match(line):
            start = int(header[1], 16)
            size, name = int(header[2], 16) - start, header[4]
        elif line.startswith("Rss:"):
            found[start] = Mapping(start, size, name, int(line.split()[1]) * 1024)
    return found


def worker_of(server: int) -> int:
    """Process id of the server's worker."""
    children = psutil.Process(server).children(recursive=True)
    return max(children, key=lambda child: child.memory_info().rss).pid


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class HeapOfWorker:
    """What the server's worker gets as its extension."""

    def heap_use(self) -> dict[str, int]:
        """MiB in glibc's heaps, in use and free."""
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Mallinfo2
        info = mallinfo2()
        return {"heap_in_use": info.uordblks // _MIB, "heap_free": info.fordblks // _MIB}


def heap_use(server: VllmServer) -> dict[str, int]:
    """The answer of the server's worker."""
    answer = post(server, "/collective_rpc", {"method": "heap_use"})
    use: dict[str, int] = answer["results"][0]
    return use


def post(server: VllmServer, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        server.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


class Clients:
    """Threads that each send one request after the other."""

    def __init__(self, server: VllmServer, number: int, most: int | None) -> None:
        self.server, self.most = server, most
        self.sent = self.done = self.tokens = 0
        self.stopped = False
        self._lock = threading.Lock()
        self.threads = [threading.Thread(target=self._run, args=(i,)) for i in range(number)]
        for thread in self.threads:
            thread.start()

    def _run(self, index: int) -> None:
        rng = random.Random(index)
        while not self.stopped:
            with self._lock:
                if self.most is not None and self.sent >= self.most:
                    return
                self.sent += 1
            words = " ".join(str(rng.randrange(1000)) for _ in range(rng.randint(2, 60)))
            body = {
                "model": self.server.spec.model,
                "messages": [{"role": "user", "content": f"{rng.choice(TOPICS)}: {words}"}],
                "max_tokens": rng.randint(16, 128),
                "temperature": rng.choice((0.0, 0.8)),
            }
            answer = post(self.server, "/v1/chat/completions", body)
            with self._lock:
                self.done += 1
                self.tokens += answer["usage"]["total_tokens"]


def watch(server: VllmServer, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Samples while clients talk; prints each."""
    worker = worker_of(server.pid)
    before = mappings(worker)
    clients = Clients(server, args.clients, args.requests)
    start, samples = time.monotonic(), list[dict[str, Any]]()
    while any(thread.is_alive() for thread in clients.threads):
        kinds = dict.fromkeys(("blocks", "heaps", "files"), 0)
        for mapping in mappings(worker).values():
            kinds[mapping.kind] += mapping.resident
        sample = {
            "s": round(time.monotonic() - start), "requests": clients.done,
            "tokens": clients.tokens, "rss": sum(kinds.values()) // _MIB,
            **{kind: size // _MIB for kind, size in kinds.items()}, **heap_use(server),
            "api_server": psutil.Process(server.pid).memory_info().rss // _MIB,
            "engine_core": psutil.Process(psutil.Process(worker).ppid()).memory_info().rss // _MIB,
        }  # fmt: skip
        samples.append(sample)
        print(json.dumps(sample), flush=True)
        if args.requests is None and sample["s"] >= args.seconds:
            clients.stopped = True
        time.sleep(EVERY_S)
    grown = sorted(
        mappings(worker).values(),
        key=lambda m: m.resident - (before[m.start].resident if m.start in before else 0),
        reverse=True,
    )
    for mapping in grown[:12]:
        old = before[mapping.start].resident if mapping.start in before else 0
        print(
            f"{mapping.start:#x} {mapping.kind:6} {mapping.size / _MIB:8.1f} MiB mapped, "
            f"{old / _MIB:8.1f} -> {mapping.resident / _MIB:8.1f} MiB resident {mapping.name}"
        )
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="jetspec", help='default: jetspec; "none": plain vLLM')
    parser.add_argument("--seconds", type=float, default=780, help="how long; default: 780")
    parser.add_argument("--requests", type=int, help="how many instead of how long")
    parser.add_argument("--clients", type=int, default=8, help="requests at once; default: 8")
    args = parser.parse_args()
    trees = None if args.method == "none" else speculative_config("smollm2", args.method)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # or it has no /collective_rpc
    extension = ("--worker-extension-cls", "tests.soak.serve_memory.HeapOfWorker")
    model = str(prepare_target("smollm2"))
    spec = ServerSpec(args.method, model, trees, enforce_eager=True, extra_args=extension)
    with VllmServer(spec, cache_dir() / "logs" / f"memory_{args.method}.log") as server:
        server.wait_healthy()
        watch(server, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
