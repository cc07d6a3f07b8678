# SPDX-License-Identifier: Apache-2.0
"""Published DSpark and Domino formats mean what their trainers meant: every branch is the head as a
chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.unit.methods.absurd import refused
from tests.unit.methods.block import published
from tests.unit.methods.block.published import changed, tiny
from tests.unit.methods.block.published_heads import ANCHOR, PublishedHead
from tests.unit.methods.block.reference import (
    domino_log_probs,
    log_confidence,
    markov_log_probs,
)
from tests.unit.tree.candidates import paths_of
from vllm_specplug.methods.dspark_tree.config import DSparkConfig
from vllm_specplug.registry import get_method, recognise_head

FORMATS = {name: tiny(raw) for name, raw in vars(published).items() if "_DSPARK" in name}
# Not published, but possible.
FORMATS["gated, draft vocabulary"] = changed(
    FORMATS["SPECFORGE_DSPARK_DRAFT_VOCAB"], dflash_config={"markov_head_type": "gated"}
)
DOMINO = {name: tiny(raw) for name, raw in vars(published).items() if "_DOMINO" in name}
DOMINO["draft vocabulary"] = changed(DOMINO["SPECFORGE_DOMINO_QWEN3_8B"], draft_vocab_size=20)


@pytest.mark.parametrize("name", FORMATS)
def test_each_branch_is_the_head_run_as_a_chain_along_it(name: str, tmp_path: Path) -> None:
    causal = name == "SPECFORGE_DSPARK_CAUSAL"
    head = PublishedHead(tmp_path / "head", FORMATS[name], tables=name.startswith("DEEPSPEC"))
    assert recognise_head(head.folder).name == "dspark_tree"
    drafter, requests = head.drafter(get_method("dspark_tree"))
    (tree,) = drafter.propose(requests)
    tree.validate()
    assert tree.num_nodes == 24 and tree.max_depth > 1
    hidden = head.hidden(first=0, causal=causal)
    logits = head.logits(first=0, causal=causal)
    assert len(logits) == requests.depths[0] == 5
    draft_of = {int(token): i for i, token in enumerate(head.target_ids)}
    paths = [[ANCHOR, *branch] for branch in paths_of(tree)]

    def scores(
        tensors: Any = head.tensors, states: torch.Tensor = hidden, last_only: bool = False
    ) -> list[float]:
        """By the equations; with `last_only` the head reads no token but the last."""
        found = []
        for path in paths:
            found.append(0.0)
            for i in range(1, len(path)):
                first = i - 1 if last_only else 0
                log_probs = markov_log_probs(logits[first:], tensors, path[first:i], states[first:])
                trust = 0.5 * log_confidence(hidden, head.tensors, path[:i])
                found[-1] += float(log_probs[draft_of[path[i]]] + trust)
        return found

    np.testing.assert_allclose(tree.scores, scores(), atol=1e-4)
    # The likeliest child of the root comes first.
    best = head.target_ids[markov_log_probs(logits, head.tensors, [ANCHOR], hidden).argmax()]
    assert next(token for token, *below in paths_of(tree) if not below) == int(best)
    # Controls: states of other slots, the plain form of the head, and a state of one token.
    controls = []
    if drafter.config.markov_head_type != "vanilla":
        plain = {k: v for k, v in head.tensors.items() if "gate_proj" not in k and "joint" not in k}
        controls = [scores(states=hidden.roll(1, 0)), scores(plain)]
    if drafter.config.markov_head_type == "rnn":
        controls.append(scores(last_only=True))
    for other in controls:
        assert not np.allclose(tree.scores, other, atol=1e-2)


@pytest.mark.parametrize("name", DOMINO)
def test_each_branch_is_dominos_head_run_along_it(name: str, tmp_path: Path) -> None:
    head = PublishedHead(tmp_path / "head", DOMINO[name])
    assert recognise_head(head.folder).name == "dspark_tree"
    drafter, requests = head.drafter(get_method("dspark_tree"))
    first = 1 if name == "SPECFORGE_DOMINO_QWEN36_27B" else 0
    assert requests.depths == [5 - first]
    (tree,) = drafter.propose(requests)
    tree.validate()
    assert tree.num_nodes == 24 and tree.max_depth > 2
    hidden, logits = (f(first=first, causal=False) for f in (head.hidden, head.logits))
    draft_of = {int(token): i for i, token in enumerate(head.target_ids)}

    def score(path: list[int], **changes: Any) -> float:
        usual = {"hidden": hidden, "tensors": head.tensors, "embed": head.embed, "prefix": 1}
        log_probs = (
            domino_log_probs(logits, branch=path[:i], **{**usual, **changes})
            for i in range(1, len(path))
        )
        return sum(float(p[draft_of[t]]) for p, t in zip(log_probs, path[1:], strict=True))

    paths = [[ANCHOR, *branch] for branch in paths_of(tree)]
    np.testing.assert_allclose(tree.scores, [score(path) for path in paths], atol=1e-4)
    # Controls: states of other slots, a first depth that is corrected, other embeddings.
    for changes in ({"hidden": hidden.roll(1, 0)}, {"prefix": 0}, {"embed": -head.embed}):
        others = [score(path, **changes) for path in paths]
        assert not np.allclose(tree.scores, others, atol=1e-2), changes


def test_model_optimizers_names_are_those_of_its_module(tmp_path: Path) -> None:
    """Fixtures of that layout would prove nothing under the names of the others."""
    head = PublishedHead(tmp_path / "head", tiny(published.MODELOPT_DSPARK_QWEN3_8B))
    block = {name for name in head.written if name.startswith("layers.")}
    own = {"fc.weight", "hidden_norm.weight", "norm.weight", "markov_w1.weight"}
    own |= {"markov_w2.weight", "confidence_proj.weight", "confidence_proj.bias"}
    assert set(head.written) == block | own and len(block) == 2 * 11
    # The confidence head reads the Markov row, though the config does not say so.
    assert head.written["confidence_proj.weight"].shape == (1, 16 + 6)
    # Without a word in the config these tensors tell the kind.
    raw = changed(head.raw, dflash_config=None, architectures=None)
    (head.folder / "config.json").write_text(json.dumps(raw))
    assert recognise_head(head.folder).name == "dspark_tree"


def test_a_tensor_under_both_names_is_refused(tmp_path: Path) -> None:
    head = PublishedHead(tmp_path / "head", tiny(published.MODELOPT_DSPARK_QWEN3_8B))
    twice = {**head.written, "markov_head.markov_w1.weight": torch.zeros(30, 6)}
    save_file(twice, head.folder / "model.safetensors")
    with pytest.raises(ValueError, match="'markov_w1.weight' is given twice"):
        head.drafter(get_method("dspark_tree"))


@pytest.mark.parametrize(("alpha", "size"), [(1.0, 16), (0.0, 0), (None, 0)])
def test_the_weight_of_its_loss_tells_of_a_confidence_head(
    alpha: float | None, size: int, tmp_path: Path
) -> None:
    """SpecForge's heads need not say that they have one."""
    own = {"enable_confidence_head": None, "confidence_head_with_markov": None}
    raw = tiny(
        published.SPECFORGE_DSPARK_QWEN3_8B,
        dflash_config={**own, "confidence_head_alpha": alpha},
    )
    assert DSparkConfig.from_dict(raw, num_target_layers=4).confidence_size == size


def test_a_confidence_head_without_a_markov_head_lowers_whole_depths(tmp_path: Path) -> None:
    raw = tiny(
        published.DEEPSPEC_DFLASH_QWEN3_4B,
        enable_confidence_head=True,
        confidence_head_with_markov=False,
    )
    head = PublishedHead(tmp_path / "head", raw, tables=True)
    assert recognise_head(head.folder).name == "dspark_tree"
    drafter, requests = head.drafter(get_method("dspark_tree"))
    _, scores = drafter.candidates(requests, 5, 3)
    hidden = head.hidden(first=0, causal=False)
    expected = head.logits(first=0, causal=False).log_softmax(-1).topk(3).values
    for depth in range(5):
        expected[depth] += 0.5 * log_confidence(hidden, head.tensors, [ANCHOR] * (depth + 1))
    torch.testing.assert_close(scores[0].double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("flag", ["sample_from_anchor", "shift_label", None])
def test_a_stated_layout_wins(flag: str | None, tmp_path: Path) -> None:
    raw = tiny(published.SPECFORGE_DSPARK_QWEN3_8B, dflash_config={flag: False})
    if flag is None:
        # Older versions of speculators have no such field, and fill their slots in.
        raw = tiny(published.SPECULATORS_DSPARK, sample_from_anchor=None)
    head = PublishedHead(tmp_path / "head", raw)
    drafter, requests = head.drafter(get_method("dspark_tree"))
    assert requests.depths == [4] and drafter.config.first_slot == 1
    (tree,) = drafter.propose(requests)
    scores = markov_log_probs(head.logits(first=1, causal=False), head.tensors, [ANCHOR])
    trust = log_confidence(head.hidden(first=1, causal=False), head.tensors, [ANCHOR])
    assert tree.scores[0] == pytest.approx(float(scores.max()) + 0.5 * trust, abs=1e-4)


def test_few_candidates_keep_the_likeliest_of_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = PublishedHead(tmp_path / "head", tiny(published.DEEPSPEC_DSPARK_QWEN3_4B))
    monkeypatch.setattr("vllm_specplug.methods.dspark_tree.options.LOCAL_CANDIDATES", 1)
    drafter, requests = head.drafter(get_method("dspark_tree"))
    assert drafter.options.settings.num_candidates == 4  # never fewer than tree_width
    (tree,) = drafter.propose(requests)
    likeliest = head.logits(first=0, causal=False).topk(4).indices
    for token, depth in zip(tree.token_ids.tolist(), tree.depths.tolist(), strict=True):
        assert token in likeliest[depth - 1].tolist()


def test_heads_without_a_markov_head_draft_by_the_block_alone(tmp_path: Path) -> None:
    """deepseek-ai's dflash_*_block7: the architecture is DSpark's, the kind is DFlash's."""
    head = PublishedHead(tmp_path / "head", tiny(published.DEEPSPEC_DFLASH_QWEN3_4B), tables=True)
    assert recognise_head(head.folder).name == "ddtree"
    log_probs = head.logits(first=0, causal=False).log_softmax(-1)
    for method in ("ddtree", "dspark_tree"):
        drafter, requests = head.drafter(get_method(method))
        assert requests.depths == [5]
        ids, scores = drafter.candidates(requests, 5, 3)
        assert torch.equal(ids[0], log_probs.topk(3).indices)
        torch.testing.assert_close(scores[0].double(), log_probs.topk(3).values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("raw", "changes", "words"),
    [
        ("DEEPSPEC_DSPARK_QWEN3_4B", {"markov_head_type": "fir"},
         ["markov_head_type = 'fir'", "'vanilla', 'gated', 'rnn'"]),
        ("DEEPSPEC_DSPARK_QWEN3_4B", {"markov_rank": -1}, ["markov_rank", "-1"]),
        ("DEEPSPEC_DSPARK_QWEN3_4B", {"markov_rank": "6"}, ["markov_rank", "'6'"]),
        ("DEEPSPEC_DSPARK_QWEN3_4B", {"architectures": ["Gemma4DSparkModel"]}, ["Gemma4"]),
        ("SPECULATORS_DSPARK", {"architectures": ["Other"]}, ["architectures", "Other"]),
        ("SPECULATORS_DSPARK", {"sample_from_anchor": "yes"}, ["sample_from_anchor", "'yes'"]),
        ("MODELOPT_DSPARK_QWEN3_8B", {"dflash_config": {"markov_head_type": "fir"}},
         ["markov_head_type", "'fir'"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"dflash_config": {"emb_dim": None}, "emb_dim": None},
         ["emb_dim = None", "an integer from 1"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"dflash_config": {"gru_hidden_dim": "10"}},
         ["gru_hidden_dim = '10'"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"dflash_config": {"pure_draft_prefix_len": 5}},
         ["pure_draft_prefix_len = 5", "0 to 4"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"markov_rank": 6}, ["markov_rank = 6", "Domino"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"architectures": ["Qwen3DominoModel"]},
         ["architectures", "Qwen3DominoModel"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"architectures": ["DominoDraftModel", "Other"]},
         ["architectures", "Other"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"architectures": ["LiLiCorrDraftModel"]}, ["LiLiCorr:"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"architectures": [3]}, ["architectures = [3]"]),
        ("SPECFORGE_DOMINO_QWEN3_8B", {"architectures": "DominoDraftModel"},
         ["architectures = 'DominoDraftModel'", "a list of names"]),
        ("SPECFORGE_DOMINO_QWEN35_4B", {"dflash_config": {"projector_type": "dspark"}},
         ["projector_type = 'dspark'", "absent or 'domino' in a DominoDraftModel"]),
        ("SPECULATORS_DSPARK", {"speculators_model_type": "domino"},
         ["speculators_model_type = 'domino'", "logits_correction.*"]),
        ("SPECULATORS_DSPARK_RNN", {"sample_from_anchor": False},
         ["sample_from_anchor = False", "trained from the anchor's slot"]),
        ("SPECULATORS_DSPARK_RNN", {"sample_from_anchor": None},
         ["sample_from_anchor = False", "trained from the anchor's slot"]),
    ],
)  # fmt: skip
def test_other_heads_are_refused_by_name(
    raw: str, changes: dict[str, object], words: list[str], tmp_path: Path
) -> None:
    head = PublishedHead(tmp_path / "head", tiny(getattr(published, raw)))
    (head.folder / "config.json").write_text(json.dumps(changed(head.raw, **changes)))
    refused(lambda: head.drafter(get_method("dspark_tree")), "draft head config", *words)


@pytest.mark.parametrize("name", ["DEEPSPEC_DSPARK_RNN", "SPECFORGE_DOMINO_QWEN3_8B"])
def test_names_of_early_specforge_heads(name: str, tmp_path: Path) -> None:
    head = PublishedHead(tmp_path / "head", tiny(getattr(published, name)))
    drafter, requests = head.drafter(get_method("dspark_tree"))
    (tree,) = drafter.propose(requests)
    own = ("markov_head.", "confidence_head.", "prefix_gru.", "embed_proj.")
    early = {f"logit_head.{k}" if k.startswith(own) else k: v for k, v in head.written.items()}
    assert sum(k.startswith("logit_head.") for k in early) >= 4
    save_file(early, head.folder / "model.safetensors")
    (same,) = head.drafter(get_method("dspark_tree"))[0].propose(requests)
    assert same.token_ids.tolist() == tree.token_ids.tolist()
