# SPDX-License-Identifier: Apache-2.0
"""Heads of the library speculators draft here what they draft there, and heads of our trainers
there what they draft here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.conftest import LAYERS, VOCAB
from tests.unit.train.heads import Job
from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.train.blocks import pack_blocks, run_blocks
from vllm_specplug.methods.dspark_tree.checkpoint import load_dspark_head
from vllm_specplug.methods.eagle3_tree.checkpoint import load_eagle3_head
from vllm_specplug.methods.eagle3_tree.train.objective import pack, run_anchors
from vllm_specplug.registry import recognise_head
from vllm_specplug.train.features import FeatureSequence, FeatureStore
from vllm_specplug.train.target import TargetWeights

pytest.importorskip("speculators", reason="the library speculators is not installed")

MASK = VOCAB - 1
STEPS = 3
# Options of our trainer, by the kind of head.
OURS: dict[str, dict[str, Any]] = {
    "eagle3": {"speculators": True},
    "dflash": {"mask_token_id": MASK},
    "dspark": {"mask_token_id": MASK},
}
METHODS = {"eagle3": "eagle3_tree", "dflash": "ddtree", "dspark": "dspark_tree"}


@pytest.fixture
def sequence(feature_folders: tuple[Path, Path]) -> FeatureSequence:
    return FeatureStore(feature_folders[1])[0]


def our_logits(kind: str, folder: Path, target: Path, sequence: FeatureSequence) -> torch.Tensor:
    """Draft logits of a sequence: [runs, rows, V'] of an EAGLE-3 head, else [blocks, slots, V']."""
    weights = TargetWeights(target)
    tables = weights.tables()
    embed = tables.embed_tokens.float()
    sequence = FeatureSequence(
        sequence.tokens, sequence.prompt_len, sequence.aux.float(), sequence.hidden.float()
    )
    bias: Any = 0
    if kind == "eagle3":
        head, extras = load_eagle3_head(folder, weights.config)
        rows = torch.arange(len(sequence.tokens) - 1 - STEPS)
        hidden = run_anchors(head.float(), pack([sequence], [rows], STEPS), embed)
    else:
        if kind == "dspark":
            head, extras, markov, _ = load_dspark_head(folder, weights.config)
        else:
            head, extras = load_block_head(folder, weights.config)
        config = head.config
        head = head.float()
        assert extras.mask_from_embedding and config.mask_token_id == MASK
        head.mask_embedding.copy_(embed[MASK])
        anchors = anchors_of(sequence, config.block_size)
        batch = pack_blocks([sequence], [anchors], config.block_size, first_slot=config.first_slot)
        hidden = run_blocks(head, batch, embed).view(len(anchors), -1, config.hidden_size)
        if kind == "dspark":
            assert config.sample_from_anchor
            before = sequence.tokens[anchors[:, None] + torch.arange(config.block_size)]
            w1, w2 = markov.embed_tokens.weight.float(), markov.low_rank_lm_head.weight.float()
            bias = w1[before] @ w2.t()
    lm_head = extras.lm_head
    if lm_head is None:
        lm_head = tables.lm_head if extras.target_ids is None else tables.lm_head[extras.target_ids]
    return hidden @ lm_head.float().t() + bias


def anchors_of(sequence: FeatureSequence, block_size: int) -> torch.Tensor:
    """All anchors that have a whole block after them."""
    return torch.arange(1, len(sequence.tokens) - block_size)


def their_logits(
    kind: str, model: Any, sequence: FeatureSequence, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """The same from speculators' training forward, which hands them to its loss."""
    found: list[torch.Tensor] = []

    def keep(logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        found.append(logits[0])
        return torch.zeros(()), {}

    core = importlib.import_module(f"speculators.models.{kind}.core")
    monkeypatch.setattr(core, "compute_metrics", keep)
    tokens, aux, hidden = sequence.tokens, sequence.aux.float(), sequence.hidden.float()
    inputs: dict[str, Any] = {"ttt_steps": STEPS}
    if kind == "eagle3":
        # Row i takes the token at i + 1.
        tokens, aux, hidden = tokens[1:], aux[:-1], hidden[1:]
    else:
        anchors = anchors_of(sequence, model.block_size)
        mask = torch.zeros(1, len(tokens), dtype=torch.bool)
        mask[0, anchors] = True
        inputs = {"loss_mask": mask, "max_anchors": len(anchors)}
    with torch.no_grad():
        model.eval()(
            hidden_states=aux[None], input_ids=tokens[None],
            verifier_last_hidden_states=hidden[None],
            document_ids=torch.zeros(1, len(tokens), dtype=torch.long), **inputs,
        )  # fmt: skip
    if kind == "eagle3":
        return torch.stack(found)[:, :-STEPS]
    logits = found[0].view(len(anchors), model.block_size, -1)
    return logits if model.config.sample_from_anchor else logits[:, 1:]


def loaded(folder: Path) -> Any:
    """A head as speculators loads it, in float32 and with the plain attention."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32)


def agree(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in OURS),
        *((kind, {"draft_vocab_size": VOCAB}) for kind in OURS),
        ("eagle3", {"norm_output": True, "save_lm_head": False}),
    ],
)
def test_speculators_drafts_with_our_heads(
    kind: str, options: dict[str, Any], make_job: Callable[..., Job], sequence: FeatureSequence,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = make_job(kind, total_steps=3, **OURS[kind], **options)
    job.train()
    assert recognise_head(job.head).name == METHODS[kind]
    model = loaded(job.head)
    assert model.config.speculators_model_type == kind
    assert model.config.speculators_config.verifier.architectures == ["LlamaForCausalLM"]
    theirs = their_logits(kind, model, sequence, monkeypatch)
    agree(our_logits(kind, job.head, job.run.target, sequence), theirs)


def new_head(kind: str, target: Path) -> Any:
    """A head of speculators' own trainer before its first step, with random weights."""
    from speculators import SpeculatorModel
    from transformers import Qwen3Config

    torch.manual_seed(1)
    ids = torch.arange(0, VOCAB, 2)
    chosen = torch.zeros(VOCAB, dtype=torch.bool)
    chosen[ids] = True
    layer = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_attention_heads=4,
        num_hidden_layers=1 if kind == "eagle3" else 2, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=256,
    )  # fmt: skip
    model = SpeculatorModel.registry[kind].from_training_args(
        layer, chosen, ids - torch.arange(len(ids)), verifier_name_or_path=str(target),
        target_layer_ids=[i + 1 for i in LAYERS], draft_vocab_size=len(ids), block_size=4,
        mask_token_id=MASK, markov_rank=6, ttt_steps=STEPS, norm_before_residual=True,
        fc_norm=True, draft_attn_impl="eager",
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith(("embed_tokens", "lm_head", "verifier_")):
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.3 * noise)
    return model.float()


@pytest.mark.parametrize("kind", OURS)
def test_heads_of_speculators_draft_and_train_here(
    kind: str, make_job: Callable[..., Job], target_folder: Path, sequence: FeatureSequence,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, folder = new_head(kind, target_folder), tmp_path / "theirs"
    model.save_pretrained(folder)
    assert recognise_head(folder).name == METHODS[kind]
    theirs = their_logits(kind, model, sequence, monkeypatch)
    agree(our_logits(kind, folder, target_folder, sequence), theirs)
    # There and back with one step of no length.
    still = {"learning_rate": 1e-30, "adam_learning_rate": 1e-30, "ema_decay": 0.0}
    job = make_job(kind, init_from=str(folder), total_steps=1, **OURS[kind], **still)
    job.train()
    again = their_logits(kind, loaded(job.head), sequence, monkeypatch)
    torch.testing.assert_close(again, theirs, rtol=0.1, atol=0.5)  # rounded to bfloat16
    agree(our_logits(kind, job.head, target_folder, sequence), again)
