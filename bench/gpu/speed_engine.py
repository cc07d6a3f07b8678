# SPDX-License-Identifier: Apache-2.0
"""An engine in its own process, whose target generates a known chain of tokens and whose drafts
have an imposed acceptance.

The target keeps its shape and cost, but its weights make `successors[t]` the token after t, far
from a tie. The drafter runs normally, and then its candidates are overwritten: the target's token
gets the rank that the acceptance model draws, and all other candidates are wrong. Both happen on
the device, inside the captured graphs.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parent))

from acceptance_model import drawn_ranks, rank_probabilities, successors

DRAWS = 1 << 16
# The fractional part of the golden ratio: its multiples cover the draws evenly.
GOLDEN = 0.6180339887498949


class ImposedDrafts:
    """Overwrites the candidates of our heads, or the drafts of vLLM's own chain.

    Args:
        depth, width: numbers of depths and of candidates per depth.
    """

    def __init__(self, vocab_size: int, depth: int, width: int) -> None:
        self.vocab_size, self.depth, self.width = vocab_size, depth, width
        self.successors: Any = None

    def install(self) -> None:
        import torch

        from vllm_specplug.methods.block.drafter import BlockHeadDrafter
        from vllm_specplug.methods.eagle3_tree.drafter import StateDrafter

        of_block = BlockHeadDrafter.candidates
        of_level, of_host_level = StateDrafter.device_expand, StateDrafter.host_expand

        def candidates(drafter: Any, requests: Any, depth: int, width: int) -> Any:
            log_probs = of_block(drafter, requests, depth, width)[1]
            return self.block(torch.as_tensor(requests.anchors, device=log_probs.device), log_probs)

        def device_expand(drafter: Any, requests: Any, *args: Any) -> Any:
            inner, lines = of_level(drafter, requests, *args), None

            def expand(frontier: Any) -> Any:
                nonlocal lines
                log_probs = inner(frontier)[1]
                self.prepare(log_probs.device)
                if lines is None:
                    lines = self.lines(len(log_probs))
                # No descendant of a wrong token is accepted, so any token will do there.
                right = self.successors[frontier.token_ids][..., :1]
                return self.placed(right, self.ranks[lines, frontier.depth, None, None], log_probs)

            return expand

        def host_expand(drafter: Any, requests: Any) -> Any:
            inner, lines = of_host_level(drafter, requests), None

            def expand_on_host(frontier: Any) -> Any:
                nonlocal lines
                log_probs = torch.from_numpy(inner(frontier)[1])
                self.prepare(log_probs.device)
                if lines is None:
                    lines = self.lines(len(requests))
                right = self.successors[torch.from_numpy(frontier.token_ids)][:, :1]
                ranks = self.ranks[lines[torch.from_numpy(frontier.requests)], frontier.depth, None]
                return tuple(found.numpy() for found in self.placed(right, ranks, log_probs))

            return expand_on_host

        BlockHeadDrafter.candidates = candidates  # type: ignore[method-assign]
        StateDrafter.device_expand = device_expand  # type: ignore[method-assign]
        StateDrafter.host_expand = host_expand  # type: ignore[method-assign]

    def install_in_chains(self) -> None:
        """Replaces drafts of vLLM's chains by the target's tokens; vLLM draws which it accepts.

        With random weights, drafts would repeat one token, whose products take less power and thus
        less time.
        """
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
        from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

        def wrap(kind: Any) -> None:
            stock = kind.propose

            def propose(
                speculator: Any, input_batch: Any, attn_metadata: Any, slot_mappings: Any,
                last_hidden_states: Any, aux_hidden_states: Any, num_sampled: Any,
                num_rejected: Any, last_sampled: Any, *args: Any, **kwargs: Any,
            ) -> Any:  # fmt: skip
                drafts = stock(
                    speculator, input_batch, attn_metadata, slot_mappings, last_hidden_states,
                    aux_hidden_states, num_sampled, num_rejected, last_sampled, *args, **kwargs,
                )  # fmt: skip
                if kwargs.get("dummy_run"):
                    return drafts
                self.prepare(drafts.device)
                slots = input_batch.idx_mapping[: len(drafts)].long()
                anchors = last_sampled[slots].view(-1).long()
                drafts.copy_(self.successors[anchors][:, : drafts.shape[1]])
                return drafts

            kind.propose = propose

        for kind in (DFlashSpeculator, EagleSpeculator):
            wrap(kind)

    def prepare(self, device: Any) -> None:
        """Makes the tables on the device, once, because captured graphs read them."""
        # The first drafts are made before graphs are captured.
        if self.successors is not None:
            return
        import torch

        # Drafts update them inside and outside of vLLM's inference mode.
        with torch.inference_mode(False):
            self.ranks = torch.zeros((DRAWS, self.depth), dtype=torch.int64, device=device)
            self.log_probs = torch.zeros(self.width, device=device)
            self.draw = torch.zeros((), dtype=torch.float64, device=device)
            self.places = torch.arange(1024, device=device) * GOLDEN
            table = torch.from_numpy(successors(self.vocab_size, self.depth))
            self.successors = table.to(device)

    def set(self, a: float, nodes: int, device: Any) -> None:
        """Sets the acceptance `a`, see `acceptance_model`, for trees of `nodes` nodes."""
        import numpy as np
        import torch

        self.prepare(device)
        ranks = drawn_ranks(a, nodes, self.depth, self.width, DRAWS)
        self.ranks.copy_(torch.from_numpy(ranks))
        logs = np.log(np.maximum(rank_probabilities(a, self.width), 1e-9))
        self.log_probs.copy_(torch.from_numpy(logs.astype(np.float32)))

    def lines(self, requests: int) -> Any:
        """Draws the next line numbers in `ranks`, int64 [requests]."""
        lines = ((self.draw + self.places[:requests]) % 1.0 * DRAWS).long()
        self.draw.add_(requests * GOLDEN).remainder_(1.0)
        return lines

    def block(self, anchors: Any, log_probs: Any) -> tuple[Any, Any]:
        """Returns candidates of blocks [R, D, W] after the tokens `anchors` [R]."""
        self.prepare(log_probs.device)
        count, depth, _ = log_probs.shape
        right = self.successors[anchors][:, :depth, None]
        return self.placed(right, self.ranks[self.lines(count)][:, :depth, None], log_probs)

    def placed(self, right: Any, ranks: Any, log_probs: Any) -> tuple[Any, Any]:
        """Returns candidates [..., W] with the tokens `right` [..., 1] at `ranks` [..., 1], and
        log-probabilities of the given shape."""
        import torch

        width = log_probs.shape[-1]
        order = torch.arange(width, device=log_probs.device)
        ids = torch.where(order == ranks, right, (right + 1 + order) % self.vocab_size)
        return ids, self.log_probs[:width].expand_as(log_probs).contiguous()


def impose_target(weights: dict[str, Any], vocab_size: int) -> None:
    """Changes weights of a target in place, so that it generates the chain of tokens."""
    import torch

    (embedding,) = (w for name, w in weights.items() if name.endswith("embed_tokens.weight"))
    (lm_head,) = (w for name, w in weights.items() if name.endswith("lm_head.weight"))
    following = torch.from_numpy(successors(vocab_size, 1)[:, 0]).to(embedding.device)
    with torch.no_grad():
        for name, weight in weights.items():
            if "norm" in name:
                weight.fill_(1.0)
        embedding.mul_(1000.0)
        lm_head.zero_()
        lm_head[following] = embedding[:vocab_size]


class Engine:
    """The engine of a job."""

    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import LLM

        self.job = job
        speculative = job.get("speculative")
        self.drafts: ImposedDrafts | None = None
        options: dict[str, Any] = {}
        if speculative is not None:
            options = {"speculative_config": speculative}
            drafts = ImposedDrafts(job["vocab_size"], job["depth"], job["width"])
            if job["stock"]:
                drafts.install_in_chains()
            else:
                self.drafts = drafts
                drafts.install()
        start = time.perf_counter()
        self.llm = LLM(disable_log_stats=False, seed=0, **job["engine"], **options)
        self.start_s = time.perf_counter() - start
        core = self.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        worker = core.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        if job["is_dummy"]:
            impose_target(dict(self.runner.model.named_parameters()), job["vocab_size"])

    def facts(self) -> dict[str, Any]:
        """Returns settings that the engine chose at start."""
        config = self.llm.llm_engine.vllm_config
        compilation = config.compilation_config
        return {
            "start_s": self.start_s,
            "mode": str(compilation.mode),
            "cudagraph_mode": str(compilation.cudagraph_mode),
            "capture_sizes": compilation.cudagraph_capture_sizes,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "attention": str(config.attention_config.backend),
        }

    def call(self, cell: dict[str, Any]) -> dict[str, Any]:
        """Decodes `tokens` tokens of `batch` requests, and times the steps in which all decode."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._impose(cell)
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=cell["tokens"],
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        vocab_size = self.job["vocab_size"]
        prompts = [
            [(7919 * (i + 1) * (j + 1) + i) % (vocab_size - 10) + 5 for j in range(cell["context"])]
            for i in range(cell["batch"])
        ]
        # Later requests hit these prefixes.
        first = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=1)
        self.llm.generate([{"prompt_token_ids": p} for p in prompts], first, use_tqdm=False)
        before = self._counters()
        profile = Profile(cell.get("profile"))
        arrivals = self._run(prompts, params, profile)
        after = self._counters()
        drafts = after["drafts"] - before["drafts"]
        accepted = after["accepted"] - before["accepted"]
        result = {
            **cell, **summary(arrivals), "drafts": drafts, "accepted": accepted,
            "drafted": after["drafted"] - before["drafted"],
            "mean_acceptance": 1 + accepted / drafts if drafts else 1.0,
            "is_chain": self._is_chain(prompts, arrivals),
        }  # fmt: skip
        if cell.get("profile"):
            result["kernels"] = profile.result()
        return result

    def _impose(self, cell: dict[str, Any]) -> None:
        a = cell.get("a")
        if a is None:
            return
        if self.drafts is not None:
            self.drafts.set(a, cell["nodes"], self.runner.device)
        elif self.job["stock"]:
            self.runner.rejection_sampler.synthetic_conditional_rates.fill_(a)

    def _run(self, prompts: list[list[int]], params: Any, profile: Profile) -> list[list[Any]]:
        """Returns (seconds, token ids) of every output of each request."""
        engine = self.llm.llm_engine
        arrivals: dict[str, list[Any]] = {}
        for i, prompt in enumerate(prompts):
            request_id = f"{time.perf_counter_ns()}-{i}"
            arrivals[request_id] = []
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                if ids := list(output.outputs[0].token_ids):
                    arrivals[output.request_id].append((now, ids))
            profile.step(all(arrivals.values()))
        return list(arrivals.values())

    def _is_chain(self, prompts: list[list[int]], arrivals: list[list[Any]]) -> bool:
        following = successors(self.job["vocab_size"], 1)[:, 0]
        for prompt, outputs in zip(prompts, arrivals, strict=True):
            tokens = [prompt[-1], *(token for _, ids in outputs for token in ids)]
            if any(following[a] != b for a, b in zip(tokens, tokens[1:], strict=False)):
                return False
        return True

    def _counters(self) -> dict[str, float]:
        names = {
            "vllm:spec_decode_num_drafts": "drafts",
            "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:spec_decode_num_accepted_tokens": "accepted",
        }
        found = dict.fromkeys(names.values(), 0.0)
        for metric in self.llm.get_metrics():
            if metric.name in names:
                found[names[metric.name]] += metric.value  # type: ignore[attr-defined]
        return found


def summary(arrivals: list[list[Any]]) -> dict[str, Any]:
    """Returns rates of the time in which all requests decode."""
    start = max(outputs[0][0] for outputs in arrivals)
    end = min(outputs[-1][0] for outputs in arrivals)
    inside = [[o for o in outputs if start < o[0] <= end] for outputs in arrivals]
    times = sorted({at for outputs in inside for at, _ in outputs})
    gaps = [b - a for a, b in zip([start, *times], times, strict=False)]
    tokens = sum(len(ids) for outputs in inside for _, ids in outputs)
    steps = sum(len(outputs) for outputs in inside)
    per_token = sorted(
        (outputs[-1][0] - outputs[0][0]) / sum(len(ids) for _, ids in outputs[1:])
        for outputs in arrivals
    )
    return {
        "tokens_per_s": tokens / (end - start),
        "step_ms": 1e3 * (end - start) / len(times),
        "median_step_ms": 1e3 * median(gaps),
        "steps": len(times),
        "tokens_per_step": tokens / steps,
        "tpot_ms": 1e3 * median(per_token),
        "p99_tpot_ms": 1e3 * per_token[min(len(per_token) - 1, int(0.99 * len(per_token)))],
    }


class Profile:
    """A profile of kernels, operations and Python functions of a few steps in which all requests
    decode."""

    SKIPPED, TAKEN = 6, 8

    def __init__(self, is_asked: bool | None) -> None:
        self.kernels: Any = None
        self.seen = 0
        if is_asked:
            from torch.profiler import ProfilerActivity, profile

            self.kernels = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self.functions = cProfile.Profile()

    def step(self, all_decode: bool) -> None:
        """Must be called after each step."""
        if self.kernels is None or not all_decode:
            return
        self.seen += 1
        # One after the other, because each slows the host down.
        if self.seen == self.SKIPPED:
            self.kernels.start()
            self.start = time.perf_counter()
        elif self.seen == self.SKIPPED + self.TAKEN:
            self.wall_ms = 1e3 * (time.perf_counter() - self.start) / self.TAKEN
            self.kernels.stop()
        elif self.seen == self.SKIPPED + 2 * self.TAKEN:
            self.functions.enable()
        elif self.seen == self.SKIPPED + 3 * self.TAKEN:
            self.functions.disable()

    def result(self) -> dict[str, Any]:
        """Returns calls and microseconds per step by name, the largest first."""
        self.functions.disable()
        called = pstats.Stats(self.functions).stats  # type: ignore[attr-defined]
        rows = []
        for event in self.kernels.key_averages():
            us = getattr(event, "self_device_time_total", 0.0) / self.TAKEN
            on_device = "CUDA" in str(event.device_type)
            host_us = 0.0 if on_device else event.self_cpu_time_total / self.TAKEN
            rows.append((event.key[:120], on_device, event.count / self.TAKEN, us, host_us))
        device = sorted((r for r in rows if r[1]), key=lambda r: -r[3])
        host = sorted((r for r in rows if not r[1]), key=lambda r: -r[4])
        functions = [
            ("/".join((*Path(file).parts[-2:], name)), calls / self.TAKEN,
             round(1e6 * own / self.TAKEN, 1), round(1e6 * total / self.TAKEN, 1))
            for (file, _, name), (calls, _, own, total, _) in called.items()
        ]  # fmt: skip
        return {
            "wall_ms": self.wall_ms,
            "device_ms": sum(r[3] for r in device) / 1e3,
            "launches": sum(r[2] for r in device),
            "device": [(r[0], r[2], round(r[3], 1)) for r in device[:70]],
            "host": [(r[0], r[2], round(r[4], 1)) for r in host[:70]],
            "functions": sorted(functions, key=lambda r: -r[3])[:120],
        }


def serve(job: dict[str, Any], connection: Any) -> None:
    """Starts the job's engine and answers calls until None. Errors are also sent as answers."""
    with Path(job["log"]).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Weights and drafts can only be imposed in this process.
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **job["env"]})
    try:
        engine = Engine(job)
        connection.send(engine.facts())
        answer(engine.call, connection)
    except Exception as error:
        traceback.print_exc()
        connection.send({"problem": f"{type(error).__name__}: {error}"[:2000]})


def answer(call: Callable[[dict[str, Any]], dict[str, Any]], connection: Any) -> None:
    while (cell := connection.recv()) is not None:
        result = call(cell)
        print(json.dumps({k: v for k, v in result.items() if k != "kernels"}), flush=True)
        connection.send(result)
