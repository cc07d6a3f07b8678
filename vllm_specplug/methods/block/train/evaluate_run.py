# SPDX-License-Identifier: Apache-2.0
"""Estimates the acceptance of a head, and of a local head on it, from folders."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vllm_specplug.drafting.checkpoint_files import target_ids_or_all
from vllm_specplug.methods.block.checkpoint import load_block_head
from vllm_specplug.methods.block.train.evaluate import (
    add_policies,
    count_slots,
    draft_sequences,
)
from vllm_specplug.methods.block.train.start import check_trainable
from vllm_specplug.methods.dels.checkpoint import load_local_head
from vllm_specplug.methods.dels.train.evaluate import (
    Fusion,
    LocalTables,
    evaluate_local_chains,
    local_tree_policy,
)
from vllm_specplug.methods.dels.unigram import load_unigram
from vllm_specplug.train.features import FeatureStore
from vllm_specplug.train.order import EvenlySpread
from vllm_specplug.train.target import TargetWeights
from vllm_specplug.train.vocabulary import DraftTables
from vllm_specplug.train.walk import AcceptanceReport, walk

DEFAULT_CANDIDATES = 128


class Evaluation:
    """A backbone with its drafts at every anchor of a feature folder, computed once. Policies are
    added one by one and counted in `report`.

    Args:
        sequences: number of sequences, spread over the folder; 0 for all.
        candidates: tokens kept per slot, which a local head scores; 0 for all.

    Raises:
        ValueError: for features of other layers than the head reads.
    """

    def __init__(
        self,
        target: str | Path,
        head: str | Path,
        features: str | Path,
        sequences: int = 0,
        candidates: int = DEFAULT_CANDIDATES,
    ):
        weights = TargetWeights(target)
        self.target_config = weights.config
        tables = weights.tables()
        module, extras = load_block_head(head, weights.config, dtype=torch.bfloat16)
        check_trainable("--head", head, module)
        store = FeatureStore(features)
        if store.target_layer_ids != module.config.target_layer_ids:
            raise ValueError(
                f"--features hold target layers {list(store.target_layer_ids)}, legal: those of "
                f"the head, {list(module.config.target_layer_ids)}; make them with --layers"
            )
        if extras.mask_from_embedding:
            module.mask_embedding.copy_(tables.embed_tokens[module.config.mask_token_id])
        ids = target_ids_or_all(extras.target_ids, module.config.vocab_size)
        rows = tables.lm_head[ids] if extras.lm_head is None else extras.lm_head
        embed = tables.embed_tokens if extras.embed_tokens is None else extras.embed_tokens
        self.draft = DraftTables(tables.embed_tokens, rows, ids).to(torch.bfloat16)
        self.config, self.depth = module.config, module.config.num_draft_tokens
        chosen = EvenlySpread(store, sequences or len(store))
        # The head reads its own embeddings if it has any; the local head reads the target's.
        own = replace(self.draft, embed_tokens=embed.to(torch.bfloat16))
        self.drafted = list(draft_sequences(module, chosen, own, candidates))
        self.report = AcceptanceReport()
        count_slots(self.drafted, self.draft, self.report)

    @torch.no_grad()
    def add_backbone(self, budgets: Sequence[int], width: int) -> None:
        """Adds the backbone's chain ('chain') and trees ('best_first/budget')."""
        add_policies(self.drafted, self.draft, budgets, width, self.report)

    def local_tables(
        self, local_head: str | Path, unigram: str | Path, anchor_input: bool | None = None
    ) -> LocalTables:
        """Returns a local head and a unigram prior on this backbone's draft vocabulary. The default
        prior is uniform, so that beta has no effect.
        """
        head, ids = load_local_head(local_head, self.target_config, dtype=torch.float32)
        vocab_size = int(self.target_config["vocab_size"])
        prior = torch.full((vocab_size,), -math.log(vocab_size))
        if str(unigram):
            prior = load_unigram(unigram).log_probs(vocab_size)
        return LocalTables.build(head, self.draft, prior, ids, anchor_input, torch.bfloat16)

    def add_local(
        self,
        tables: LocalTables,
        alpha: Sequence[float],
        beta: Sequence[float],
        budgets: Sequence[int],
        width: int,
        name: str = "dels",
    ) -> None:
        """Adds the fused chain ('dels chain') and trees ('dels tree/budget')."""
        fusion = Fusion.of(
            tables,
            self.depth,
            alpha[0] if len(alpha) == 1 else alpha,
            beta[0] if len(beta) == 1 else beta,
        )
        fusions = {f"{name} chain": fusion}
        evaluate_local_chains(tables, self.drafted, fusions, self.report)
        for budget in budgets:
            policy = local_tree_policy(tables, fusion, budget, width)
            walk(self.drafted, f"{name} tree/{budget}", policy, self.report)
