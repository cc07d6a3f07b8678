# SPDX-License-Identifier: Apache-2.0
"""Random trees over a paged cache, for any device and large contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from vllm_specplug.kernels import TreeAttnMetadata, cuda_dispatch

TREE_KERNELS = ("triton", "flash", "cute")


@dataclass(frozen=True)
class ProblemSpec:
    """Shapes of a call. `trees` are (context length, nodes)."""

    trees: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    dtype: torch.dtype = torch.bfloat16
    shape: str = "tree"
    """Of a tree: "tree", "chain", or "full" (a bidirectional block)."""
    dense: bool = False
    """Whether the trees' own keys are dense tails."""
    poison: bool = True
    """Whether free slots hold NaN."""
    skipped: int = 0
    """Number of trees without rows at the end of the plan."""
    adjacent: bool = False
    """Whether trees are adjacent, as the kernel with FlashAttention needs. Otherwise rows of other
    requests are before each tree and after the last."""
    seed: int = 0

    def replace(self, **changes) -> ProblemSpec:
        return replace(self, **changes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, which must be read at least once."""
        slots = sum(c + n + 1 for c, n in self.trees)
        return slots * self.num_kv_heads * self.head_dim * 2 * self.dtype.itemsize

    def label(self) -> str:
        contexts, nodes = zip(*self.trees, strict=True)
        return (
            f"B{len(self.trees)} ctx {min(contexts)}-{max(contexts)} nodes {min(nodes)}-"
            f"{max(nodes)} H{self.num_heads}/{self.num_kv_heads} D{self.head_dim} "
            f"page {self.page} {str(self.dtype).removeprefix('torch.')} {self.shape}"
            f"{' dense' * self.dense}{f' +{self.skipped}' * bool(self.skipped)}"
            f"{' adjacent' * self.adjacent}"
        )


def unsupported(name: str, spec: ProblemSpec, device: torch.device) -> str | None:
    """Returns why a kernel does not serve such layers on a device (a CPU counts as Hopper), or
    None."""
    capability = (9, 0)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    shape = cuda_dispatch.KernelShape(
        spec.head_dim, spec.dtype, spec.page, spec.num_heads, spec.num_kv_heads
    )
    return cuda_dispatch.unsupported_by(name, shape, capability)


class Problem:
    """Tensors of a call, in the memory order of vLLM's GPU cache."""

    def __init__(self, spec: ProblemSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        draw = torch.Generator(device=device).manual_seed(spec.seed)
        rng = np.random.default_rng(spec.seed)
        self.scale = spec.head_dim**-0.5

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=draw, device=device, dtype=torch.float32).to(
                spec.dtype
            )

        contexts = np.array([c for c, _ in spec.trees])
        rows = np.array([n + 1 for _, n in spec.trees])
        self.rows = rows
        owned = contexts if spec.dense else contexts + rows
        per_request = -(-int((contexts + rows).max()) // spec.page)
        num_blocks = len(rows) * per_request + 1
        order = rng.permutation(num_blocks)[: len(rows) * per_request].reshape(len(rows), -1)
        self.block_table = torch.from_numpy(order.astype(np.int32)).to(device)
        # [num_blocks, page, Hkv, 2 * Dh]
        self.cache = normal(num_blocks, spec.page, spec.num_kv_heads, 2 * spec.head_dim)
        if spec.poison:
            free = np.ones((num_blocks, spec.page), dtype=bool)
            for blocks, count in zip(order, owned, strict=True):
                position = np.arange(count)
                free[blocks[position // spec.page], position % spec.page] = False
            self.cache[torch.from_numpy(free).to(device)] = float("nan")
        self.key_cache, self.value_cache = self.cache.split(spec.head_dim, dim=-1)
        gap = 0 if spec.adjacent else 1
        starts = np.cumsum([gap, *(rows[:-1] + gap)])
        first = np.cumsum([0, *rows[:-1]])
        plan = np.zeros((5, len(rows) + spec.skipped), dtype=np.int32)
        plan[:, : len(rows)] = (range(len(rows)), starts, rows, contexts, first)
        parents = [self._parents(int(n), rng) for n in rows]
        self.meta = TreeAttnMetadata(
            plan=torch.from_numpy(plan).to(device),
            parent_rows=torch.from_numpy(np.concatenate(parents).astype(np.int32)).to(device),
            block_table=self.block_table,
            max_rows=int(rows.max()),
            max_context=int(contexts.max()),
            mask_kind="full" if spec.shape == "full" else "tree",
            query_starts=(
                torch.from_numpy(np.append(starts, rows.sum()).astype(np.int32)).to(device)
                if spec.adjacent
                else None
            ),
        )
        self.starts = starts
        total = int(starts[-1] + rows[-1] + gap)
        # A slice of a joined projection, as vLLM hands it over.
        joined = normal(total, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        self.query = joined[:, : spec.num_heads]
        self.tail = {}
        if spec.dense:
            size = (int(rows.sum()), spec.num_kv_heads, spec.head_dim)
            self.tail = {"tail_key": normal(*size), "tail_value": normal(*size)}
        self.tree_rows = torch.from_numpy(
            np.concatenate([np.arange(s, s + n) for s, n in zip(starts, rows, strict=True)])
        ).to(device)

    def _parents(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        """Returns the parent row of each row, of bushy trees."""
        index = np.arange(rows)
        if self.spec.shape != "tree":
            return index - 1
        reach = rng.integers(1, 9, rows)
        return np.where(index > 0, np.maximum(0, index - reach), -1)

    def call(self, run, output: torch.Tensor) -> None:
        """Calls `run` by the contract of `kernels.cuda_contract`."""
        run(self.query, self.key_cache, self.value_cache, output, self.meta, self.scale,
            **self.tail)  # fmt: skip

    def expected(self) -> torch.Tensor:
        """Returns the reference's output, float32 [T, Hq, Dh]; only tree rows are set."""
        from vllm_specplug.kernels.reference import tree_attn_cuda_reference

        output = torch.zeros(self.query.shape, dtype=torch.float32, device=self.device)
        tail = {name: tensor.float() for name, tensor in self.tail.items()}
        tree_attn_cuda_reference(
            self.query.float(), self.key_cache.float(), self.value_cache.float(), output,
            self.meta, self.scale, **tail,
        )  # fmt: skip
        return output

    def error(self, run) -> tuple[float, float]:
        """Returns the relative error ||out - ref|| / ||ref|| over tree rows, and the largest
        difference.

        Raises:
            AssertionError: if a tree row was not written, or another row was.
        """
        output = torch.full_like(self.query, 7.0, memory_format=torch.contiguous_format)
        output[self.tree_rows] = float("nan")
        self.call(run, output)
        expected = self.expected()[self.tree_rows]
        actual = output[self.tree_rows].float()
        assert not actual.isnan().any(), "NaN: a row was not written, or a free slot was read"
        output[self.tree_rows] = 7.0
        assert bool((output == 7.0).all()), "a row of no tree was written"
        difference = actual - expected
        return (
            float(difference.norm() / expected.norm()),
            float(difference.abs().max()),
        )
