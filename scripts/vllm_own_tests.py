# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests with the plugin installed and unused: nothing may change.

    SPECPLUG_VLLM_SOURCE=/path/to/vllm python scripts/vllm_own_tests.py [--both] [--only PATH ...]

The source must be of the installed version: a checkout of its tag, or the unpacked sdist
(`pip download vllm==0.32.0 --no-deps --no-binary vllm`). The tests run against the installed vLLM.
`--both` runs them again without the plugin and fails if the outcome of any test differs. Tests that
need a GPU or a model from the hub fail both times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

VARIABLE = "SPECPLUG_VLLM_SOURCE"
# Tests of what the plugin patches: speculation, scheduler, caches, grammars, samplers, configs.
SELECTION = (
    "v1/e2e/test_cpu_spec_decode.py",
    "v1/spec_decode/test_dynamic_sd.py",
    "v1/spec_decode/test_ngram.py",
    "v1/spec_decode/test_request_acceptance.py",
    "v1/spec_decode/test_adaptive_verification.py",
    "v1/core/test_scheduler.py",
    "v1/core/test_async_scheduler.py",
    "v1/core/test_prefix_caching.py",
    "v1/core/test_kv_cache_utils.py",
    "v1/core/test_single_type_kv_cache_manager.py",
    "v1/core/test_output.py",
    "v1/core/test_priority_scheduler_random.py",
    "v1/core/test_repetition_detection.py",
    "v1/metrics",
    "v1/sample/test_rejection_sampler.py",
    "v1/sample/test_sampler.py",
    "v1/sample/test_thinking_budget_state.py",
    "v1/sample/test_topk_topp_sampler.py",
    "v1/logits_processors/test_correctness.py",
    "v1/structured_output",
    "v1/worker/test_gpu_input_batch.py",
    "plugins_tests",
)
# Models that tests request from the hub. For these a config of the right shape is enough.
CONFIGS = {
    "facebook/opt-125m": ("OPTConfig", "OPTForCausalLM"),
    "Qwen/Qwen1.5-7B": ("Qwen2Config", "Qwen2ForCausalLM"),
}
# For these the prepared SmolLM2 is used, which generates text and has a tokenizer.
MODELS = ("Qwen/Qwen3-0.6B", "openai-community/gpt2", "gpt2", "distilbert/distilgpt2")
# Tests of Triton kernels run in its interpreter without a GPU. vLLM's CPU build uses Triton only
# with a backend "cpu".
KERNEL_TESTS = ("v1/sample/test_rejection_sampler.py",)
INTERPRETER = """
import os

os.environ["TRITON_INTERPRET"] = "1"
from triton.backends import backends


class Driver:
    @staticmethod
    def is_active():
        return True


class Backend:
    driver = Driver


backends["cpu"] = Backend
"""


def write_stand_ins(cache: Path) -> None:
    """Writes a hub cache with these models, for machines without network."""
    import transformers

    from vllm_specplug.targets import prepare_target

    def snapshot(name: str) -> Path:
        folder = cache / "hub" / f"models--{name.replace('/', '--')}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0")
        (folder / "snapshots").mkdir()
        return folder / "snapshots" / "0"

    for name, (config, architecture) in CONFIGS.items():
        made = getattr(transformers, config)(architectures=[architecture], torch_dtype="float16")
        made.save_pretrained(snapshot(name))
    target = prepare_target("smollm2")
    for name in MODELS:
        snapshot(name).symlink_to(target)


def run(
    tests: Path, selection: list[str], extra: list[str], plugins: str | None, folder: Path
) -> dict[str, str]:
    """Returns the outcome of every test by name: passed, failure, error or skipped."""
    # Only the tests are linked: the source's own `vllm` would hide the installed one.
    root = folder / ("plain" if plugins == "" else "plugin")
    root.mkdir()
    (root / "tests").symlink_to(tests)
    (root / "pytest.ini").write_text("[pytest]\n")
    (root / "triton_interpreted.py").write_text(INTERPRETER)
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    outcomes: dict[str, str] = {}
    for files, options in (
        ([path for path in selection if path not in KERNEL_TESTS], []),
        ([path for path in selection if path in KERNEL_TESTS], ["-p", "triton_interpreted"]),
    ):
        if files:
            outcomes |= _pytest(root, files, [*options, *extra], environment)
    return outcomes


def _pytest(
    root: Path, files: list[str], options: list[str], environment: dict[str, str]
) -> dict[str, str]:
    report = root / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", "-c", str(root / "pytest.ini"),
               "--rootdir", str(root), f"--junitxml={report}",
               *options, *(f"tests/{path}" for path in files)]  # fmt: skip
    subprocess.run(command, cwd=root, env=environment, check=False)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case]
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[name] = next(
            (kind for kind in ("error", "failure", "skipped") if kind in kinds), "passed"
        )
    return outcomes


def summary(outcomes: dict[str, str]) -> str:
    counts = Counter(outcomes.values())
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--both", action="store_true", help="compare with a run without plugin")
    parser.add_argument("--only", nargs="+", metavar="PATH", help="below tests/, not all of them")
    arguments, extra = parser.parse_known_args()
    source = os.environ.get(VARIABLE)
    if not source or not (Path(source) / "tests" / "v1").is_dir():
        parser.error(f"{VARIABLE}={source!r} is not a vLLM source with tests/v1")
    tests = Path(source).resolve() / "tests"
    asked = tuple(arguments.only or SELECTION)
    selection = [path for path in asked if (tests / path).exists()]
    for path in asked:
        if path not in selection:
            print(f"not in this source: {path}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_stand_ins(folder / "hf")
        with_plugin = run(tests, selection, extra, None, folder)
        print(f"with the plugin:    {summary(with_plugin)}")
        if not arguments.both:
            return int(any(kind in ("failure", "error") for kind in with_plugin.values()))
        without = run(tests, selection, extra, "", folder)
        print(f"without the plugin: {summary(without)}")
        changed = [
            f"{test}: {without.get(test, 'missing')} -> {with_plugin.get(test, 'missing')}"
            for test in sorted(set(with_plugin) | set(without))
            if with_plugin.get(test) != without.get(test)
        ]
    print("\n".join(changed) or "no test changed its outcome")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
