# SPDX-License-Identifier: Apache-2.0
"""Trees of n-gram branches from the request's own text, without a head."""

from vllm_specplug.drafting.method import Method

METHOD = Method(
    name="ngram_tree",
    summary="branches looked up in the request's own tokens, merged into one tree",
    options="vllm_specplug.methods.ngram_tree.options:NgramTreeOptions",
    drafter="vllm_specplug.methods.ngram_tree.drafter:NgramTreeDrafter",
    needs_head=False,
    presets={"smollm2": {}},
)
