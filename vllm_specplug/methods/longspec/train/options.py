# SPDX-License-Identifier: Apache-2.0
"""Options of `specplug train longspec`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from vllm_specplug.train.options import DistillationRecipe, NewHeadOptions


@dataclass(frozen=True, kw_only=True)
class LongSpecRun(NewHeadOptions):
    """Folders and shape of a run. `init_from` is the head of the previous stage."""

    shape_options: ClassVar[tuple[str, ...]] = (*NewHeadOptions.shape_options, "window_size")
    features: Annotated[
        Path | None, Option(help="Folder made by `specplug data longspec-features`.")
    ] = None
    window_size: Annotated[
        int, Option(help="Tokens that self-attention looks back; not with --init-from.")
    ] = 512


@dataclass(frozen=True, kw_only=True)
class LongSpecRecipe(DistillationRecipe):
    """Recipe of a run; sft is the published loss."""

    tokens_per_step: Annotated[int, Option(min=2, help="Packed positions per step.")] = 4096
    max_staleness: Annotated[
        int, Option(min=1, help="Noisy training: the cache ends 1..N positions early; 1: off.")
    ] = 4
    gradient_checkpointing: Annotated[
        bool, Option(help="Recompute the layer in the backward pass.")
    ] = False
