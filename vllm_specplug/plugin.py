# SPDX-License-Identifier: Apache-2.0
"""Entry point of the vLLM general plugin.

vLLM calls `register` in the API server, in the engine core and in every worker. vLLM does not catch
its errors, so it must never raise. On a vLLM that this release does not support, our methods are
refused and everything else keeps working.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Installs the speculative methods into vLLM; idempotent."""
    try:
        from vllm_specplug.engine import install

        install()
    except Exception:
        logging.getLogger("vllm.specplug").exception(
            "vllm-specplug could not be installed into this vLLM, and its methods are unavailable. "
            "All changes were undone. Run `specplug doctor` for more."
        )
