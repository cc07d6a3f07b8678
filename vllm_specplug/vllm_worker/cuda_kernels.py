# SPDX-License-Identifier: Apache-2.0
"""Tree kernels on CUDA: which of them serves, and the compilation of their variants."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm._custom_ops import reshape_and_cache_flash
from vllm.logger import init_logger

from vllm_specplug.kernels import TreeAttnMetadata
from vllm_specplug.kernels.cuda_contract import FULL_GRAPHS_VARIABLE
from vllm_specplug.kernels.cuda_dispatch import (
    ChosenKernel,
    KernelShape,
    LayerShape,
    by_layer_shape,
    choose_cuda_kernel,
)
from vllm_specplug.kernels.features import PLAIN, AttnFeatures, FeatureKind
from vllm_specplug.vllm_attention.full_graphs import replays_decoding, wants_full_graphs
from vllm_specplug.vllm_attention.gpu import gpu_cache_views, warm_up_store, without_scales
from vllm_specplug.vllm_attention.tree_rows import CacheViews
from vllm_specplug.vllm_worker.memory.cache_groups import CacheGroup
from vllm_specplug.vllm_worker.ranks import slowest_rank_values
from vllm_specplug.vllm_worker.runner_view import RunnerView

if TYPE_CHECKING:
    from vllm_specplug.kernels.kv_compact_triton import LayerCaches

logger = init_logger("vllm.specplug.cuda")


@dataclass(frozen=True)
class StepLimits:
    """The size of the largest possible step."""

    num_requests: int
    num_rows: int
    """Rows of the target forward."""
    tree_rows: int
    """Rows of one tree."""
    context: int
    """Maximum tokens of a request (`max_model_len`)."""

    @classmethod
    def of(cls, state: RunnerView) -> StepLimits:
        """Returns the limits of a runner."""
        return cls(
            num_requests=state.max_requests,
            num_rows=state.max_rows,
            tree_rows=state.vllm_config.speculative_config.num_speculative_tokens + 1,
            context=state.max_model_len,
        )


def _place(kv_cache: torch.Tensor) -> tuple[int, torch.Size]:
    """Returns what identifies a cache: its address, and the shape of a page."""
    return kv_cache.data_ptr(), kv_cache.shape[1:]


@dataclass(frozen=True)
class LayerSample:
    """One attention layer, as the sample of its kind."""

    num_heads: int
    """Query heads on this rank."""
    features: AttnFeatures
    # each [num_blocks, block_size, Hkv, Dh]
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def shape(self) -> LayerShape:
        _, block_size, num_kv_heads, head_dim = self.keys.shape
        return self.num_heads, num_kv_heads, head_dim, block_size


class CudaKernels:
    """The kernels of `kernels.cuda_dispatch` over vLLM's GPU cache.

    Args:
        requested: the option `tree_kernel`.
        num_heads: query heads of this rank.
    """

    def __init__(
        self,
        requested: str,
        num_heads: int,
        limits: StepLimits,
        device: torch.device,
        # for `wants_full_graphs`
        vllm_config: Any = None,
    ) -> None:
        self.requested = requested
        self.vllm_config = vllm_config
        self.num_heads = num_heads
        self.limits = limits
        self.device = device
        # The model's dtype, also where caches are quantised; set when the caches are bound.
        self.dtype: torch.dtype
        # A ChosenKernel once the caches are bound; None while vLLM measures graphs.
        self.kernel: Any = None
        # Index and layers of each KV cache group of the target.
        self.groups: list[tuple[int, LayerCaches]] = []
        self.samples: list[LayerSample] = []

    # -- where the device's memory is reached; the interpreter's backend differs here ---------

    def views_of(self, kv_cache: torch.Tensor) -> CacheViews:
        """Returns the views through which kernels read a layer's cache."""
        return gpu_cache_views

    def capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    def cache_writer(self) -> Callable[..., None]:
        """Returns the function that writes keys and values [M, Hkv, Dh] at slots [M] of a cache."""
        one = torch.ones((), dtype=torch.float32, device=self.device)

        def write(
            key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            reshape_and_cache_flash(key, value, *gpu_cache_views(kv_cache), slots, "auto", one, one)

        return write

    # -- set-up -----------------------------------------------------------------------------

    def make_workspace(self) -> torch.Tensor:
        """Allocates the temporary memory that the target's attention takes in one layer: partial
        results of a split context, or the outputs and log-sum-exps of another kernel."""
        from vllm_specplug.kernels.tree_attn_flash import MAX_HEAD_DIM
        from vllm_specplug.kernels.tree_attn_triton import most_workspace_bytes

        outputs = self.limits.num_rows * self.num_heads * (2 * MAX_HEAD_DIM + 4)
        size = max(most_workspace_bytes(self.device), outputs)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def bind(self, groups: list[CacheGroup]) -> None:
        from vllm_specplug.kernels.kv_compact_triton import LayerCaches

        view = self.views_of(next(iter(groups[0].caches.values())))
        # Made once: a view costs as much as a launch. Layers of two groups may share memory, with
        # pages of equal bytes but different numbers of tokens.
        table = {
            _place(c): without_scales(view(c), group.cache_dtype)
            for group in groups
            for c in group.caches.values()
        }
        self.views: CacheViews = lambda kv_cache: table[_place(kv_cache)]
        # Whole caches: scales stored behind a token's numbers must move with them.
        self.groups = [
            (group.index, LayerCaches.of([view(c) for c in group.own_caches]))
            for group in groups
            if group.own_caches
        ]
        samples: dict[tuple[LayerShape, FeatureKind], LayerSample] = {}
        for group in groups:
            for name, cache in group.caches.items():
                features = group.features.get(name, PLAIN)
                heads = group.num_heads or self.num_heads
                sample = LayerSample(heads, features, *self.views(cache))
                samples.setdefault((sample.shape, features.kind), sample)
        self.samples = list(samples.values())
        self.block_size = self.samples[0].keys.shape[1]
        self.dtype = groups[0].key_dtype or self.samples[0].keys.dtype
        self.kernel = by_layer_shape(
            {
                shape: self.choose(
                    KernelShape.of(shape, self.dtype, [k for s, k in samples if s == shape])
                )
                for shape in dict.fromkeys(shape for shape, _ in samples)
            }
        )
        logger.info("Tree attention: %s kernel (%s)", self.kernel.name, self.kernel.reason)
        if wants_full_graphs(self.vllm_config) and not self.captures_trees():
            # vLLM would capture, and replay, stock attention for trees.
            raise ValueError(
                f"{FULL_GRAPHS_VARIABLE}=1, legal: 0 or unset where the {self.kernel.name} kernel "
                "serves, which waits for the host; unset it, or make another tree_kernel work "
                "(see: specplug doctor)"
            )

    def captures_trees(self) -> bool:
        """Whether batches of trees are captured as full graphs."""
        if not wants_full_graphs(self.vllm_config) or self.kernel is None:
            return False
        return "reference" not in self.kernel.names

    def choose(self, shape: KernelShape, for_drafts: bool = False) -> ChosenKernel:
        """Returns the kernel for one attention shape, the same on all tensor parallel ranks."""
        requested = self.requested
        if for_drafts and requested != "reference" and any(kind.window for kind in shape.kinds):
            # Only Triton's kernel gives rows of a bidirectional block a position.
            requested = "triton"
        return choose_cuda_kernel(
            requested,
            shape,
            self.device,
            self.capability(),
            for_drafts,
            slowest_rank_values,
            from_graphs=replays_decoding(self.vllm_config),
        )

    def warm_up(self) -> None:
        """Compiles the Triton variants that steps of this model launch.

        The CuTe kernel was loaded when it was chosen.
        """
        if self.device.type == "cuda":
            self.run_every_variant(lambda: torch.cuda.synchronize(self.device))

    def run_every_variant(self, synchronize: Callable[[], None]) -> None:
        """Runs each Triton kernel of a step in each of its variants, over the empty cache."""
        from vllm_specplug.kernels.kv_compact_triton import compact_paths_triton
        from vllm_specplug.kernels.tree_builder_triton import warm_up_builder

        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        blocks = torch.zeros(
            1, -(-self.limits.context // self.block_size), dtype=torch.int32, device=self.device
        )
        for _, layers in self.groups:
            # An empty list of moves.
            compact_paths_triton(layers, zero[None], zero, zero, zero.long(), blocks)
        warm_up_builder(self.limits.tree_rows - 1, self.device)
        # One sample of each combination that Triton compiles a variant for.
        kinds = {(s.shape, s.values.dtype, s.features.token_scales): s for s in self.samples}
        for sample in kinds.values():
            warm_up_store(sample.keys, sample.values, self.dtype, sample.features)
        if not self.kernel.reads_words:
            return
        shapes = [(s, *shape) for s in self.samples for shape in self._warm_up_shapes(s)]
        for sample, trees, rows in shapes:
            features, head_dim = sample.features, sample.keys.shape[3]
            query = torch.zeros(
                trees * rows, sample.num_heads, head_dim, dtype=self.dtype, device=self.device
            )
            asked = query if features.query_scales is None else query.to(sample.keys.dtype)
            more = {} if features.is_plain else {"features": features}
            # Trees in adjacent rows, as in most steps, or apart, as beside prompt chunks. A context
            # bound of 0 gives an unsplit context, the limit a split one, as in a captured graph.
            for apart, context in itertools.product((False, True), (0, self.limits.context)):
                metadata = self._chains(trees, rows, blocks.repeat(trees, 1))
                metadata.max_context = context
                if apart:
                    metadata.query_starts = None
                self.fill_words(metadata)
                output = torch.empty_like(query)
                self.kernel.run(
                    asked, sample.keys, sample.values, output, metadata, head_dim**-0.5, **more
                )
                # A failing variant must raise here.
                synchronize()

    def _chains(self, trees: int, rows: int, block_table: torch.Tensor) -> TreeAttnMetadata:
        """Returns the metadata of `trees` chains of `rows` rows without a context."""
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        starts = torch.arange(0, trees * rows + 1, rows, **ints)
        none, counts = torch.zeros(trees, **ints), torch.full((trees,), rows, **ints)
        words = (trees * rows, -(-rows // 64))
        return TreeAttnMetadata(
            torch.stack([torch.arange(trees, **ints), starts[:-1], counts, none, starts[:-1]]),
            block_table,
            max_rows=rows,
            max_context=0,
            mask_words=torch.zeros(words, dtype=torch.int64, device=self.device),
            parent_rows=torch.arange(-1, rows - 1, **ints).repeat(trees),
            query_starts=starts,
        )

    def _warm_up_shapes(self, sample: LayerSample) -> list[tuple[int, int]]:
        """Returns pairs (number of trees, rows of each) that together need every variant of tile
        size and of words per row."""
        from vllm_specplug.kernels.tree_attn_triton import config_for, tail_config

        num_heads, num_kv_heads, head_dim, _ = sample.shape
        group = num_heads // num_kv_heads
        shapes: dict[tuple[Any, ...], tuple[int, int]] = {}
        for rows in range(1, self.limits.tree_rows + 1):
            config = config_for(self.device, rows * group, head_dim, self.dtype.itemsize)
            for trees in range(1, self.limits.num_requests + 1):
                tail = tail_config(config, self.device, trees, num_kv_heads, rows * group)
                shapes.setdefault((config, tail, -(-rows // 64)), (trees, rows))
                if tail == config:
                    break
        return list(shapes.values())

    # -- the step ---------------------------------------------------------------------------

    def fill_words(self, metadata: TreeAttnMetadata, kernel: ChosenKernel | None = None) -> None:
        """Computes the ancestor words for a kernel that does not make them itself; by default the
        target's kernel."""
        if (kernel or self.kernel).reads_words:
            from vllm_specplug.kernels.tree_words_triton import fill_tree_words

            assert metadata.mask_words is not None
            fill_tree_words(
                metadata.plan, metadata.parent_rows, metadata.mask_words, metadata.max_rows
            )
