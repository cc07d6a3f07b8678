# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's Model Runner V2 (`vllm/v1/worker/gpu`): kept, verified and moved on the device."""
