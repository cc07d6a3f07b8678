# SPDX-License-Identifier: Apache-2.0
# make setup | demo | test | test-full | lint | docs | clean     (TIER=ci|fast|full)

SHELL := /bin/sh
PYTHON ?= python3.11
BIN := .venv/bin
TIER ?= ci
# A test run starts many interpreters that import vLLM. Without a bytecode cache each of them
# compiles thousands of modules again.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(TIER),fast)
PYTEST_ARGS := -m "not slow and not e2e and not full"
else ifeq ($(TIER),ci)
PYTEST_ARGS := -m "not full"
TARGET := $(BIN)/specplug target smollm2
else ifeq ($(TIER),full)
PYTEST_ARGS :=
TARGET := $(BIN)/specplug target smollm2
test: export SPECPLUG_FUZZ_EXAMPLES ?= 40
else
$(error TIER=$(TIER) is not a test tier; use TIER=ci (each promise), fast (no engines) or full (all))
endif

.PHONY: help setup demo test test-full test-033 fuzz lint docs gpu-check gpu-bench gpu-speed clean

help:
	@echo "make setup   .venv with everything, for a CPU-only machine"
	@echo "make demo    serve a real model with draft trees and plainly, and compare"
	@echo "make test    set up, then run the tests (TIER=fast: without real engines)"
	@echo "make test-full   every row: long fuzz, the demo's real servers, the long tail"
	@echo "make test-033    trees on vLLM 0.33's Python tree (docs/vllm_releases.md)"
	@echo "make lint    style, types and the import table"
	@echo "make docs    the documentation as a site in out/site, links checked"
	@echo "make gpu-check | gpu-bench | gpu-speed    on a machine with a GPU"
	@echo "make clean   remove .venv and build outputs"

setup:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found. Install Python 3.11, or name an interpreter:" >&2; \
	  echo "  make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) scripts/setup_env.py

demo: setup
	@$(BIN)/specplug demo $(ARGS)

# Fast tests first, so that a plain mistake shows early. The last ones are small, so that both
# workers end together.
test: setup
	@$(TARGET)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup --durations=25 $(PYTEST_ARGS) \
	  tests/unit tests/kernels tests/ptx tests/fuzz tests/e2e $(ARGS)

# What `make test` has no time for as well.
test-full:
	@$(MAKE) test TIER=full

# vLLM 0.33 has no CPU wheel: its Python tree over 0.32's compiled library, in .venv-033. Of the
# tests those that compare engines, and what 0.33 changed below them. Compiled engines come last:
# they fill the memory.
TESTS_033 := tests/unit/engine/test_structured_output.py tests/unit/engine/test_versions.py \
  tests/unit/seams/test_seam.py tests/unit/vllm_v2 tests/kernels/test_cpu_kernels.py tests/fuzz \
  tests/e2e/lossless tests/e2e/options tests/e2e/heads tests/e2e/targets tests/e2e/cuda \
  $(addprefix tests/e2e/serve/test_,serve.py methods.py metrics.py nodes.py stranger.py)
COMPILED_033 := tests/e2e/lossless/test_compiled.py

test-033: setup
	@$(BIN)/specplug target smollm2
	@$(BIN)/python scripts/setup_033.py
	OMP_NUM_THREADS=1 .venv-033/bin/python -m pytest -n 2 --dist loadgroup --durations=15 \
	  -m "not full" -v $(TESTS_033) $(addprefix --ignore=,$(COMPILED_033)) $(ARGS)
	OMP_NUM_THREADS=1 .venv-033/bin/python -m pytest -v $(COMPILED_033) $(ARGS)

# Thousands of runs of the fuzzed state machine; `make test` has a few for each method.
fuzz: export SPECPLUG_FUZZ_EXAMPLES ?= 150
fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/lint_imports.py
	$(BIN)/clang-format --dry-run --Werror csrc/cpu/*.cpp csrc/cpu/*.h csrc/cpu/*.inl
	$(BIN)/mypy

# A page, link or anchor that does not exist fails; with --quiet warnings would not count.
docs: export NO_MKDOCS_2_WARNING := 1
docs: setup
	$(BIN)/mkdocs build --site-dir out/site
	@echo "out/site/index.html"

# On a machine with a GPU; results as they come in GPU_OUT. See scripts/gpu/README.md.
GPU_OUT ?= $(or $(OUT),out/gpu)
GPU_PYTHON ?= python3

gpu-check:
	$(GPU_PYTHON) scripts/gpu/check.py --out $(GPU_OUT) $(ARGS)

gpu-bench:
	$(GPU_PYTHON) bench/gpu/kernels.py --out $(GPU_OUT) $(ARGS)

gpu-speed:
	$(GPU_PYTHON) bench/gpu/products.py --out $(GPU_OUT)
	$(GPU_PYTHON) bench/gpu/speed.py --out $(GPU_OUT) $(ARGS)

clean:
	rm -rf .venv .venv-033 build *.egg-info kernels/src/*.so
