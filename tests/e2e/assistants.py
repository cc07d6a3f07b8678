# SPDX-License-Identifier: Apache-2.0
"""Random assistants, written by transformers as the published ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.families import SIZES
from tests.e2e.longspec_module import tree_of_branches
from tests.e2e.tiny import make_other_target
from vllm_specplug.tree import DraftTree

HIDDEN, WINDOW = (SIZES["Gemma4Text"][name] for name in ("hidden_size", "sliding_window"))
# For the target `SIZES["Gemma4Text"]`.
TEXT: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "attention_k_eq_v": True,
    "num_global_key_value_heads": 1, "sliding_window": WINDOW, "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
}  # fmt: skip


def make_assistant(
    folder: Path, vocab: int, grouped: bool, seed: int = 7, chosen: int = 3, **changes: Any
) -> Any:
    """Writes an assistant and returns transformers' module.

    Args:
        grouped: whether it scores the tokens of `chosen` groups only.
        changes: fields of `TEXT`.
    """
    import transformers

    torch.manual_seed(seed)
    tokens_of_a_group = 4 if vocab % 5 else 5
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(vocab_size=vocab, **{**TEXT, **changes}),
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=grouped, num_centroids=vocab // tokens_of_a_group,
        centroid_intermediate_top_k=chosen,
    )  # fmt: skip
    module = transformers.Gemma4AssistantForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
        for layer in module.model.layers:
            layer.layer_scalar.uniform_(0.3, 0.9)
        if grouped:
            module.masked_embedding.token_ordering.copy_(torch.randperm(vocab))
    module.save_pretrained(folder)
    return module


@torch.no_grad()
def make_followed_target(folder: Path, vocab: int, grouped: bool = False) -> tuple[Path, Path]:
    """Writes a target and an assistant whose deep drafts the target accepts; returns the folders of
    both.

    Both add little to a token's embedding before the LM head, so that the next token depends mostly
    on the last one, in the same way. Groups (`grouped`) are found by the sum of their tokens'
    embeddings.
    """
    sizes = SIZES["Gemma4Text"] | {"vocab_size_per_layer_input": vocab}
    made = make_other_target(folder / "target", "Gemma4Text", vocab, **sizes)
    make_assistant(folder / "assistant", vocab, grouped, chosen=30, hidden_size=HIDDEN)
    files = [folder / name / "model.safetensors" for name in ("target", "assistant")]
    target, own = map(load_file, files)
    embed = target["model.embed_tokens.weight"] = torch.randn(vocab, HIDDEN)
    last = target["model.norm.weight"] = torch.randn(HIDDEN)
    for tensors in (target, own):
        for name, tensor in tensors.items():
            if ".post_" in name and name.endswith("norm.weight"):
                tensors[name] = 0.4 * tensor
    own |= {"model.embed_tokens.weight": embed.clone(), "model.norm.weight": last.clone()}
    if grouped:
        centroids = own["masked_embedding.centroids.weight"]
        tokens = own["masked_embedding.token_ordering"].view(len(centroids), -1)
        centroids.copy_(embed[tokens].sum(1))
    own["pre_projection.weight"][:, :HIDDEN] = torch.eye(HIDDEN)
    own["pre_projection.weight"][:, HIDDEN:] *= 0.2
    for file, tensors in zip(files, (target, own), strict=True):
        save_file(tensors, file, metadata={"format": "pt"})
    return made, files[1].parent


@torch.no_grad()
def logits_along(
    module: Any,
    embed: torch.Tensor,
    state: torch.Tensor,
    caches: dict[str, tuple[torch.Tensor, torch.Tensor]],
    branch: list[int],
    window: int = WINDOW,
) -> torch.Tensor:
    """Scores [V] after the tokens of a branch, drafted one by one by transformers' module; -inf for
    tokens that are not scored.

    Args:
        embed: [V, Ht] of the target.
        state: [Ht] of the last committed position.
        caches: keys and values [L, Hkv, Dh] of the target by kind of layer.
        branch: the anchor first.
    """
    length = len(caches["full_attention"][0])
    kept = {"full_attention": 0, "sliding_attention": max(0, length - window)}
    shared = {
        kind: tuple(x[kept[kind] :].transpose(0, 1)[None] for x in cache)
        for kind, cache in caches.items()
    }
    for token in branch:
        inputs = torch.cat((embed[token] * embed.shape[1] ** 0.5, state))
        out = module(
            inputs_embeds=inputs[None, None], position_ids=torch.tensor([[length - 1]]),
            attention_mask=None, shared_kv_states=shared,
        )  # fmt: skip
        state, logits = out.last_hidden_state[0, 0], out.logits[0, 0]
    if module.masked_embedding is not None:
        # transformers gives all other tokens one score below these.
        logits[logits == logits.min()] = -torch.inf
    return logits


def module_tree(
    module: Any,
    embed: torch.Tensor,
    state: torch.Tensor,
    caches: dict[str, tuple[torch.Tensor, torch.Tensor]],
    anchor: int,
    *,
    budget: int,
    depth: int,
    width: int,
) -> DraftTree:
    """The tree after an anchor, branch by branch; see `logits_along`."""

    def logits(branch: list[int]) -> torch.Tensor:
        return logits_along(module, embed, state, caches, branch)

    return tree_of_branches(logits, anchor, budget=budget, depth=depth, width=width)
