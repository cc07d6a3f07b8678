# SPDX-License-Identifier: Apache-2.0
"""A pretended device: its tensors have shapes and no values, and whoever asks for one fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  stand-ins for what CPUs lack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.unit.vllm_v2.steps import SLOTS, VOCAB, input_batch
from vllm_specplug.tree import step_trees
from vllm_specplug.tree.step_trees import (
    TreeStore,
    attach_trees,
    walk_trees,
)
from vllm_specplug.vllm_v2.step_input import step_rows

N = 16


def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A tensor of the pretended device."""
    return torch.empty(shape, dtype=dtype, device="meta")


class Recorder(TorchDispatchMode):
    """Counts operations on the pretended device, views left out, and launches of Triton's kernels,
    which do not run."""

    operations = 0

    def __enter__(self) -> Any:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction

        def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
            self.operations += 1

        self.replaced = ExitStack()
        for owner, name, new in (
            (InterpretedFunction, "run", launch),
            (JITFunction, "run", launch),
            (step_trees, "has_kernels", lambda device: device.type == "meta"),
        ):
            self.replaced.enter_context(patch.object(owner, name, new))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.replaced.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = tree_leaves((args, kwargs))
        is_on_device = any(isinstance(a, torch.Tensor) and a.is_meta for a in given)
        result = func(*args, **(kwargs or {}))
        # Whatever comes back without an error must have stayed there.
        if is_on_device:
            made = [a for a in tree_leaves(result) if isinstance(a, torch.Tensor)]
            assert all(a.is_meta for a in made), f"{func} reads the device (meta)"
            self.operations += not func.is_view
        return result


def reads_the_device(call: Callable[[], Any]) -> str | None:
    """What `call` fails with for want of a value; None where it needs none."""
    error = None
    try:
        with Recorder():
            call()
    except (RuntimeError, NotImplementedError, AssertionError) as raised:
        error = str(raised)
    if error is not None and "meta" not in error.lower():
        raise RuntimeError(error)
    return error


class Step:
    """A step of three requests on the pretended device."""

    def __init__(self) -> None:
        batch = input_batch([1, 4, 2], [40, 60, 80], [N, N, 3], [0, 5, 0])
        for name, value in vars(batch).items():
            if isinstance(value, torch.Tensor) and name != "seq_lens_cpu_upper_bound":
                setattr(batch, name, value.to("meta"))
        batch.req_ids = ["a", "b", "c"]
        batch.idx_mapping_np = np.array([1, 4, 2])
        self.batch = batch
        self.store = TreeStore(SLOTS, N, VOCAB, torch.device("meta"))
        self.trees = attach_trees(self.store, step_rows(batch, N))
        rows = len(self.trees.depths)
        self.samples, self.tokens = numbers(rows), numbers(rows, dtype=torch.int32)
        self.walk = walk_trees(self.trees, self.samples, self.tokens)
        self.slots = numbers(batch.num_tokens)
