# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled CPU kernels, once per process."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Instruction sets in the order of their number in csrc/cpu/isa.h.
ISAS = ("plain", "avx2", "avx512", "avx512_bf16", "amx")
ISA_VARIABLE = "SPECPLUG_CPU_ISA"


def requested_isa() -> str | None:
    """The value of SPECPLUG_CPU_ISA: an upper limit from `ISAS`, "reference", or None."""
    value = os.environ.get(ISA_VARIABLE, "").strip().lower()
    if not value:
        return None
    if value not in (*ISAS, "reference"):
        raise ValueError(
            f"{ISA_VARIABLE}={value!r} is not an instruction set; use one of "
            f"{', '.join(ISAS)}, reference, or leave it unset"
        )
    return value


# Setting of the running engine: a process may have several.
_is_reference_chosen = False


def choose_reference(chosen: bool) -> None:
    """Sets whether this process uses the torch reference from now on."""
    global _is_reference_chosen
    _is_reference_chosen = chosen


def is_reference_asked() -> bool:
    """Whether the torch reference is used, by this engine or by the whole process."""
    return _is_reference_chosen or requested_isa() == "reference"


def cpu_extension_error() -> str | None:
    """Returns why the operators of torch.ops.specplug must not be used, or None."""
    return "the torch reference is asked for" if _is_reference_chosen else library_error()


@functools.cache
def library_error() -> str | None:
    """Loads the operators of torch.ops.specplug at the first call.

    Returns:
        Why they cannot be used, logged as a warning the first time; None if they can.
    """
    isa = requested_isa()
    if isa == "reference":
        return f"{ISA_VARIABLE}=reference asks for the torch reference"
    reason = _load()
    if reason is not None:
        logger.warning(
            "The compiled CPU kernels are not available (%s); using the slow torch reference "
            "instead. Reinstall vllm-specplug with a C++17 compiler and --no-build-isolation.",
            reason,
        )
    elif isa is not None:
        torch.ops.specplug.set_cpu_isa(ISAS.index(isa))
    return reason


def has_cpu_extension() -> bool:
    """Whether the operators of torch.ops.specplug can be used; see `cpu_extension_error`."""
    return cpu_extension_error() is None


def _load() -> str | None:
    libraries = sorted(Path(__file__).parent.glob("_cpu*.so"))
    if not libraries:
        return "the extension was not built at install"
    try:
        torch.ops.load_library(str(libraries[0]))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"{libraries[0].name} does not load: {error}"
    return None


def supported_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this machine can run; none without the extension."""
    if not has_cpu_extension():
        return ()
    return _names(torch.ops.specplug.cpu_isas())


def allowed_isas() -> tuple[str, ...]:
    """Returns those within the limit that is set."""
    return _names(torch.ops.specplug.allowed_cpu_isas()) if has_cpu_extension() else ()


def _names(mask: int) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(ISAS) if mask >> i & 1)
