# SPDX-License-Identifier: Apache-2.0
"""Trees on vLLM's Model Runner V2: kept, verified and moved together on the device."""
