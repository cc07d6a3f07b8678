# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests with the plugin installed and unused: nothing may change.

    SPECPLUG_VLLM_SOURCE=/path/to/vllm python scripts/vllm_own_tests.py [--both] [--only PATH ...]

The source must be of the installed version: a checkout of its tag, or the unpacked sdist
(`pip download vllm==0.32.0 --no-deps --no-binary vllm`). Tests run against the installed vLLM,
never against the source beside them. `--both` runs them a second time without the plugin and
fails where the outcome of any test differs: tests that need a GPU or a model from the hub fail
either way and say nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

VARIABLE = "SPECPLUG_VLLM_SOURCE"
# What the plugin touches: speculation, the scheduler, its caches, grammars, samplers, configs.
SELECTION = (
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
# Configs that scheduler tests ask the hub for; shape only, no weights.
STAND_INS = {"facebook/opt-125m": "OPTConfig"}


def write_stand_ins(cache: Path) -> None:
    """A hub cache that holds these configs, for machines without network."""
    import transformers

    for name, config in STAND_INS.items():
        folder = cache / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "0"
        made = getattr(transformers, config)(
            architectures=["OPTForCausalLM"], torch_dtype="float16"
        )
        made.save_pretrained(snapshot)
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("0")


def run(
    tests: Path, selection: list[str], extra: list[str], plugins: str | None, folder: Path
) -> dict[str, str]:
    """Outcome of every test by name: passed, failed, error or skipped."""
    # Only the tests are visible from here: the source's own `vllm` would hide the installed one.
    root = folder / ("plain" if plugins == "" else "plugin")
    root.mkdir()
    (root / "tests").symlink_to(tests)
    (root / "pytest.ini").write_text("[pytest]\n")
    report = root / "report.xml"
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider",
               "--continue-on-collection-errors", "-c", str(root / "pytest.ini"),
               "--rootdir", str(root), f"--junitxml={report}",
               *extra, *(f"tests/{path}" for path in selection)]  # fmt: skip
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
    counts: dict[str, int] = {}
    for outcome in outcomes.values():
        counts[outcome] = counts.get(outcome, 0) + 1
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
