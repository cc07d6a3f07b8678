# SPDX-License-Identifier: Apache-2.0
"""Offline generation with draft trees: `python examples/offline.py`."""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    from vllm import LLM, SamplingParams

    from vllm_specplug.presets import speculative_config
    from vllm_specplug.targets import prepare_target

    llm = LLM(
        str(prepare_target("smollm2", print)),
        speculative_config=speculative_config("smollm2", "jetspec"),
        max_model_len=2048,
        enforce_eager=True,
        disable_log_stats=False,
    )
    prompts = ["What is a prime number?", "Write a haiku about the sea."]
    outputs = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=96),
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n> {prompt}\n{output.outputs[0].text}")

    totals = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    drafts = totals.get("vllm:spec_decode_num_drafts") or 0
    if drafts:
        accepted = totals["vllm:spec_decode_num_accepted_tokens"]
        print(f"\nmean acceptance length: {1 + accepted / drafts:.2f}")


# Engine processes import this file again: nothing may run at its top level.
if __name__ == "__main__":
    main()
