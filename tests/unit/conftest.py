# SPDX-License-Identifier: Apache-2.0
"""A tiny random Llama-like target, answers of it, and their features."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_specplug.train.features import TokenSequence, write_shard

LAYERS = (0, 2)
VOCAB = 64


@pytest.fixture(scope="module")
def installed() -> None:
    """The plugin, as in every process of vLLM."""
    from vllm_specplug.engine import install

    install()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 12 tokens."""
    from tests.e2e.tiny import make_target

    return make_target(tmp_path_factory.mktemp("target"), 12)


@pytest.fixture(scope="module")
def vllm_kernels() -> None:
    """vLLM's own operators, as its workers load them."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()


@pytest.fixture(scope="module")
def cpu_kernels() -> Iterator[None]:
    """Our stand-ins for vLLM's Triton kernels where there is no Triton."""
    from vllm.triton_utils import HAS_TRITON

    from vllm_specplug.seams.listing_runner import CPU_KERNELS

    if HAS_TRITON or CPU_KERNELS.is_applied:
        yield
        return
    CPU_KERNELS.apply()
    yield
    CPU_KERNELS.undo()


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
        initializer_range=0.4,
    )
    folder = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_model(target_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.bfloat16).eval()


def greedy_sequences(model, count: int, seed: int) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    sequences = []
    for i in range(count):
        prompt = torch.from_numpy(rng.integers(3, VOCAB, size=(1, 4 + i % 5)))
        with torch.no_grad():
            out = model.generate(
                prompt, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=2
            )
        sequences.append(TokenSequence(out[0], prompt.shape[1], f"kind{i % 2}/x"))
    return sequences


@pytest.fixture(scope="session")
def feature_folders(target_model, tmp_path_factory) -> tuple[Path, Path]:
    """(training features of two shards, held-out features)."""
    root = tmp_path_factory.mktemp("features")
    for shard in range(2):
        write_shard(
            root / "train" / f"shard-{shard:05d}",
            greedy_sequences(target_model, 6, shard),
            target_model,
            LAYERS,
            tokens_per_batch=100,
        )
    write_shard(
        root / "held" / "shard-00000", greedy_sequences(target_model, 4, 9), target_model, LAYERS
    )
    return root / "train", root / "held"


@pytest.fixture(scope="session")
def kv_folders(target_model, tmp_path_factory) -> tuple[Path, Path]:
    """(training features of last-layer keys and values, held-out ones)."""
    from vllm_specplug.methods.longspec.train.features import draw_offset, write_kv_shard

    root, rng = tmp_path_factory.mktemp("keys"), np.random.default_rng(0)
    for name, count, seed in (("train", 12, 0), ("held", 4, 9)):
        sequences = greedy_sequences(target_model, count, seed)
        offsets = [draw_offset(len(s.tokens), 256, rng) for s in sequences]
        write_kv_shard(
            root / name / "shard-00000", sequences, offsets, target_model, tokens_per_batch=100
        )
    return root / "train", root / "held"


@pytest.fixture
def make_job(target_folder, feature_folders, kv_folders, tmp_path):
    """`make_job(kind, out, **options)` is a training of 12 steps in a folder of its own."""
    from tests.unit.train.heads import job

    def make(kind: str, out: str = "run", **options):
        data = {"layers": feature_folders, "keys": kv_folders}
        return job(kind, data, target_folder, tmp_path / out, **options)

    return make
