# SPDX-License-Identifier: Apache-2.0
"""Entry point of the vLLM general plugin.

vLLM calls `register` in the API server, in the engine core and in every worker. The call
is not guarded there, so it must never raise: on a vLLM that this release does not know,
our methods become refusals and everything else keeps working.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Installs the speculative methods into vLLM. Safe to call any number of times."""
    try:
        from vllm_specplug.engine import install

        install()
    except Exception:
        logging.getLogger("vllm.specplug").exception(
            "vllm-specplug could not be installed into this vLLM; its methods are unavailable. All "
            "that the error does not name is as it was. Run `specplug doctor` for more."
        )
