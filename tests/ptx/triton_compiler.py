# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton kernels to PTX on request, in a process of its own: where kernels run in the
interpreter they cannot be compiled.

`python -m tests.ptx.triton_compiler` reads pickled `Request`s and answers each with an
`Answer`, or with the text of an error.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Request:
    """One variant of a kernel, as Triton would compile it for a launch."""

    module: str
    kernel: str
    arch: int
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Answer:
    ptx: str
    shared_bytes: int


class Compiler:
    """A running process that compiles. Close it when done."""

    def __init__(self) -> None:
        # Without fused multiply-adds Triton would serve another PTX than on a device.
        settings = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env={**os.environ, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, request: Request) -> Answer:
        """
        Raises:
            RuntimeError: what Triton says.
        """
        assert self._process.stdin and self._process.stdout
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        answer = pickle.load(self._process.stdout)
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)


def _compile(request: Request) -> Answer:
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=getattr(import_module(request.module), request.kernel),
        signature=request.signature,
        constexprs=request.constants,
        attrs=request.attributes,
    )
    target = GPUTarget("cuda", request.arch, 32)
    compiled = triton.compile(source, target=target, options=request.options)
    return Answer(compiled.asm["ptx"], compiled.metadata.shared)


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    # What Triton prints must not end up between answers.
    os.dup2(2, 1)
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Answer | str = _compile(request)
        except Exception as error:
            answer = f"{request.kernel}: {error!r}"
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    # Pickled objects name this module, not the one that runs.
    from tests.ptx import triton_compiler

    triton_compiler.main()
