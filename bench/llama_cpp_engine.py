# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with the part of vLLM's engine that `interleave.Serving` uses: greedy requests that are
decoded together, on one thread.

Needs the package llama-cpp-python, built for this machine.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

_MOST_TOKENS = 2048  # of a step


@dataclass
class _Request:
    seq: int
    waiting: list[int]
    """Tokens that the next step computes."""
    most: int
    ignores_eos: bool
    position: int = 0
    output: list[int] = field(default_factory=list)


class LlamaCppEngine:
    """Serves a GGUF file.

    Raises:
        ImportError: without llama-cpp-python.
        RuntimeError: if llama.cpp cannot load the file.
    """

    def __init__(self, path: Path, requests: int, context: int) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        # Kept, because llama.cpp holds the pointer.
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if model is None:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._eos = llama_cpp.llama_vocab_eos(vocab)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = requests * context, requests
        params.n_batch = params.n_ubatch = _MOST_TOKENS
        params.n_threads = params.n_threads_batch = 1
        self._context = llama_cpp.llama_init_from_model(model, params)
        self._batch = llama_cpp.llama_batch_init(_MOST_TOKENS, 0, 1)
        self._free = list(range(requests))
        self._running: dict[str, _Request] = {}
        self.llm_engine = self

    def add_request(self, req_id: str, prompt: dict[str, Any], params: Any) -> None:
        ids = list(prompt["prompt_token_ids"])
        self._running[req_id] = _Request(
            self._free.pop(), ids, params.max_tokens, params.ignore_eos
        )

    def step(self) -> list[Any]:
        """Computes the waiting tokens of as many requests as fit, and returns their outputs."""
        batch, rows = self._batch, {}
        batch.n_tokens = 0
        for req_id, request in self._running.items():
            if batch.n_tokens + len(request.waiting) > _MOST_TOKENS:
                break
            for token in request.waiting:
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, request.position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, request.seq
                batch.logits[i] = 0
                request.position += 1
                batch.n_tokens += 1
            batch.logits[batch.n_tokens - 1] = 1
            rows[req_id] = batch.n_tokens - 1
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [self._output(req_id, row) for req_id, row in rows.items()]

    def _output(self, req_id: str, row: int) -> Any:
        request = self._running[req_id]
        logits = self._lib.llama_get_logits_ith(self._context, row)
        token = int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())
        request.output.append(token)
        request.waiting = [token]
        is_end = token == self._eos and not request.ignores_eos
        finished = is_end or len(request.output) >= request.most
        if finished:
            memory = self._lib.llama_get_memory(self._context)
            self._lib.llama_memory_seq_rm(memory, request.seq, -1, -1)
            self._free.append(request.seq)
            del self._running[req_id]
        outputs = [SimpleNamespace(token_ids=request.output)]
        return SimpleNamespace(request_id=req_id, outputs=outputs, finished=finished)
