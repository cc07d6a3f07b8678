# SPDX-License-Identifier: Apache-2.0
"""The two GEMMs of a warpgroup, S = Q K^T and O = O + P V, with their operands and accumulators."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Int32
from cutlass.cute.nvgpu import warpgroup

from .config import TILE_N, WARPGROUP_ROWS, ForwardConfig


class Fragments:
    """MMA fragments of one warpgroup.

    Attributes:
        query: [..., steps, warpgroups]
        key, value: [..., steps, stages]
        scores, output: float32 accumulators; `flat_scores` and `flat_output` are flat views.
        weights: P in 16 bits, operand A of the second GEMM.
    """

    def __init__(
        self,
        config: ForwardConfig,
        dtype,
        mma_scores: cute.TiledMma,
        mma_output: cute.TiledMma,
        s_query: cute.Tensor,
        s_key: cute.Tensor,
        s_value: cute.Tensor,
    ) -> None:
        self.scores_op, self.output_op = mma_scores.op, mma_output.op
        thr_scores, thr_output = mma_scores.get_slice(0), mma_output.get_slice(0)
        self.query = mma_scores.make_fragment_A(thr_scores.partition_A(s_query))
        self.key = mma_scores.make_fragment_B(thr_scores.partition_B(s_key))
        self.value = mma_output.make_fragment_B(thr_output.partition_B(s_value))
        self.scores = thr_scores.make_fragment_C(
            thr_scores.partition_shape_C((WARPGROUP_ROWS, TILE_N))
        )
        self.weights = cute.make_rmem_tensor(
            thr_output.partition_shape_A((WARPGROUP_ROWS, TILE_N)), dtype
        )
        self.output = thr_output.make_fragment_C(
            thr_output.partition_shape_C((WARPGROUP_ROWS, config.head_dim))
        )
        self.flat_scores = _flat(self.scores)
        self.flat_output = _flat(self.output)


# Functions, not methods: the DSL makes an object whose method a loop calls a loop-carried value.


def start_qk(frag: Fragments, wg, stage) -> None:
    """Issues S = Q K^T for the tile in `stage` as one wgmma group."""
    # A new atom per call: one that is set within a dynamic loop is unusable after the loop.
    atom = cute.make_mma_atom(frag.scores_op)
    for step in range(cute.size(frag.query, mode=[2])):
        atom.set(warpgroup.Field.ACCUMULATE, step > 0)
        query, key = frag.query[None, None, step, wg], frag.key[None, None, step, stage]
        cute.gemm(atom, frag.scores, query, key, frag.scores)
    warpgroup.commit_group()


def convert_weights(frag: Fragments) -> None:
    """Converts the scores to P in 16 bits."""
    _flat(frag.weights).store(frag.flat_scores.load().to(frag.weights.element_type))


def convert_weights_now(frag: Fragments) -> None:
    """`convert_weights` at this point of the program, which inline PTX enforces.

    The compiler would move the conversion to just before the GEMM that reads P. Another GEMM is in
    flight there, and ptxas would serialise the two.
    """
    words = cute.recast_tensor(_flat(frag.weights), Int32)
    kind = {BFloat16: "bf16x2", Float16: "f16x2"}[frag.weights.element_type]
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            f"cvt.rn.{kind}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
            write_only_types=[Int32],
            read_only_args=[frag.flat_scores[2 * i + 1], frag.flat_scores[2 * i]],
        )


def start_pv(frag: Fragments, stage) -> None:
    """Issues O = O + P V for the tile in `stage` as one wgmma group."""
    atom = cute.make_mma_atom(frag.output_op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for step in range(cute.size(frag.weights, mode=[2])):
        weights, value = frag.weights[None, None, step], frag.value[None, None, step, stage]
        cute.gemm(atom, frag.output, weights, value, frag.output)
    warpgroup.commit_group()


def _flat(tensor: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(tensor.iterator, cute.make_layout(cute.size(tensor)))
