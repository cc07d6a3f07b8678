# SPDX-License-Identifier: Apache-2.0
"""What the inner loop of FlashAttention 4 costs with a tree as its mask: compiled for sm_90a,
without a GPU, from a package that is not part of this project's environment.

    pip install --no-deps --target FOLDER flash-attn-4==4.0.0b36 quack-kernels torch-c-dlpack-ext
    PYTHONPATH=FOLDER python -m scripts.fa4_loop [--plain] [--page 16]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from scripts import sass

ROOT = Path(__file__).resolve().parents[1]
HEADS, KV_HEADS, HEAD_DIM, ROWS, PAGES = 32, 8, 128, 65, 40
# FlashAttention's tile of this head size, and the warps of its two warpgroups that compute.
TILE, WARPS = (128, 128), 8


def compiled(page: int, masked: bool) -> bytes:
    """Machine code of the forward over a paged cache, of one request's tree of 64 nodes."""
    import torch
    from flash_attn.cute import flash_attn_varlen_func
    from torch._subclasses.fake_tensor import FakeTensorMode

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="cuda")

    more = {}
    # Tensors without memory: it compiles, and launches nothing.
    with FakeTensorMode():
        if masked:
            sys.path.append(str(ROOT / "bench" / "gpu"))
            from fa4_mask import WORD_BITS, make_tree_mask

            words = empty(ROWS, -(-ROWS // WORD_BITS))
            more = {"mask_mod": make_tree_mask(), "aux_tensors": [words]}
        query = empty(ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        keys, values = (
            empty(PAGES, page, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16) for _ in range(2)
        )
        flash_attn_varlen_func(
            query, keys, values, cu_seqlens_q=empty(2), max_seqlen_q=ROWS, seqused_k=empty(1),
            max_seqlen_k=PAGES * page, page_table=empty(1, PAGES), softmax_scale=HEAD_DIM**-0.5,
            **more,
        )  # fmt: skip
    (cubin,) = Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.cubin")
    return cubin.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="without the mask")
    parser.add_argument("--page", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Before the first import of cutlass. The number of multiprocessors is an H100's.
        os.environ |= {
            "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_KEEP": "cubin",
            "CUTE_DSL_DUMP_DIR": folder, "FLASH_ATTENTION_NUM_SMS": "132",
        }  # fmt: skip
        loop = sass.inner_loop(compiled(args.page, not args.plain))
    name = f"FA4, pages of {args.page}, {'no' if args.plain else 'tree'} mask"
    print(sass.table({name: loop.row(*TILE, HEAD_DIM, WARPS)}))


if __name__ == "__main__":
    main()
