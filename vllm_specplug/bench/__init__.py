# SPDX-License-Identifier: Apache-2.0
"""The demo, and the acceptance of a head in a server: `vllm serve` as a subprocess, over HTTP."""
