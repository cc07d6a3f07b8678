# SPDX-License-Identifier: Apache-2.0
"""Local heads: small heads that score the next token of a branch from its drafted tokens.

Shapes: B sequences, L tokens, F nodes of a frontier, V target vocabulary, V' rows of the output
table (the draft vocabulary where it is reduced), H target hidden size, I input width, S state size,
r rank of the output, Q terms of a slot, U size of the block's states.

A block head scores all depths of a block at once and cannot know which tokens its earlier slots
became. This head reads those tokens, is small enough to run once per depth, and is fused with the
block head's scores by a product of experts (`local.tree`). After reading the tokens up to depth
i - 1, the last of which is y, it scores the token of depth i with s = W_short rank:

    gru       h <- GRU(x(y), h);  rank = act(W_rank h [+ q])
    markov    rank = x(y) [* q], so that only the last token counts
    gated     rank = x(y) * sigmoid(W_token x(y) + q)
    rnn       (g, c, o) = W_state h + W_token x(y) + q
              h <- sigmoid(g) * h + (1 - sigmoid(g)) * tanh(c);  rank = tanh(o)

q = W_slot u + b are the terms of the slot that drafts depth i; u is that slot's final state in the
block. Terms in brackets are those of heads that read slots. DeLS-Spec trains heads of the kinds gru
and markov that read none; the other forms are those of DSpark, DFlash2 and Domino.

x(y) is the target's embedding of y, that embedding times a matrix, or a row of the head's own table
("direct_vocab"). W_short is the head's own table [V', r] ("low_rank"), or the target's LM head
times a matrix [H, r] ("target_lm_head"). The GRU is the usual three-gate cell without biases (Cho
et al., with the reset gate after the recurrent product). Scores are raw logits up to a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from vllm_specplug.drafting.checkpoint_files import MAX_SIZE, is_size

_SIZES = f"an integer from 1 to {MAX_SIZE}"
MAX_WEIGHT = 100.0
_WEIGHTS = f"numbers from 0 to {MAX_WEIGHT:.0f}"

LocalHeadKind = Literal["gru", "markov", "gated", "rnn"]
Parameterization = Literal["target_factorized", "direct_vocab"]
LmHeadMode = Literal["low_rank", "target_lm_head"]
RankActivation = Literal["identity", "silu"]


@dataclass(frozen=True)
class LocalHeadConfig:
    """Shape of a local head.

    `vocab_size` and `target_hidden_size` are the target's. `draft_vocab_size` is the number of
    tokens that the head scores; if that is not the whole vocabulary, a checkpoint names them in
    `d2t`. `input_size` is I; it must equal `rank` except for a GRU. `hidden_size` is S: `rank` for
    an RNN, 0 for heads without a state.
    `slot_size` is the size of the block's states that the head reads, 0 if it reads none.
    `anchor_input` says that the head reads the anchor (the newest committed token) before the first
    drafted token, and so scores depth 1 too; the paper's decoder does not.
    `alpha` and `beta` are the weights of the head's score and of the unigram prior in the fusion
    with a block head: one number, or one for each scored depth. The paper uses 0.3.
    """

    kind: LocalHeadKind
    vocab_size: int
    target_hidden_size: int
    rank: int
    hidden_size: int = 0
    input_size: int = 0
    draft_vocab_size: int = 0
    parameterization: Parameterization = "target_factorized"
    lm_head_mode: LmHeadMode = "low_rank"
    rank_activation: RankActivation = "silu"
    anchor_input: bool = False
    slot_size: int = 0
    alpha: float | list[float] = 0.3
    beta: float | list[float] = 0.3

    def __post_init__(self) -> None:
        for name, choices in (
            ("kind", get_args(LocalHeadKind)),
            ("parameterization", get_args(Parameterization)),
            ("lm_head_mode", get_args(LmHeadMode)),
            ("rank_activation", get_args(RankActivation)),
        ):
            _require(getattr(self, name) in choices, name, getattr(self, name), f"one of {choices}")
        for name in ("vocab_size", "target_hidden_size", "rank"):
            _require(is_size(getattr(self, name)), name, getattr(self, name), _SIZES)
        # Frozen: derived defaults are filled in once, here.
        if self.kind != "gru":
            state_size = self.rank if self.kind == "rnn" else 0
            _default(self, "input_size", self.rank)
            _default(self, "hidden_size", state_size)
            object.__setattr__(self, "rank_activation", "identity")
            _require(
                self.input_size == self.rank and self.hidden_size == state_size,
                "input_size",
                self.input_size,
                f"rank = {self.rank} for kind {self.kind!r}, and hidden_size {state_size}",
            )
        else:
            _require(is_size(self.hidden_size), "hidden_size", self.hidden_size, _SIZES)
            _default(self, "input_size", self.target_hidden_size)
        optional = self.slot_size == 0 and self.kind in ("gru", "markov")
        sizes = f"{_SIZES}, or 0 for kinds 'gru' and 'markov'"
        _require(optional or is_size(self.slot_size), "slot_size", self.slot_size, sizes)
        _default(self, "draft_vocab_size", self.vocab_size)
        _require(is_size(self.input_size), "input_size", self.input_size, _SIZES)
        _require(
            isinstance(self.anchor_input, bool), "anchor_input", self.anchor_input, "true or false"
        )
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            weights = value if isinstance(value, list) else [value]
            _require(all(map(_is_weight, weights)), name, value, _WEIGHTS)
        _require(
            is_size(self.draft_vocab_size) and self.draft_vocab_size <= self.vocab_size,
            "draft_vocab_size",
            self.draft_vocab_size,
            f"1..{self.vocab_size} (vocab_size)",
        )

    @property
    def projects_input(self) -> bool:
        """Whether a matrix [I, H] projects the target's embedding."""
        return self.parameterization == "target_factorized" and (
            self.kind != "gru" or self.input_size != self.target_hidden_size
        )

    @property
    def num_slot_terms(self) -> int:
        """Q, the terms that the head reads of a slot."""
        if not self.slot_size:
            return 0
        return 3 * self.rank if self.kind == "rnn" else self.rank


class LocalHead(nn.Module):
    """A local head of any kind. Its output is initialised to zero, so a new head scores nothing.

    The target's embedding and LM head are arguments, not parameters. Only "target_factorized" heads
    read `embed_tokens` [V, H], and only "target_lm_head" ones read `lm_head` [V', H] (the rows of
    the draft vocabulary); they may be None for others.
    """

    def __init__(self, config: LocalHeadConfig) -> None:
        super().__init__()
        self.config = config
        if config.parameterization == "direct_vocab":
            self.embed_tokens = nn.Embedding(config.vocab_size, config.input_size)
            nn.init.uniform_(
                self.embed_tokens.weight, -(config.input_size**-0.5), config.input_size**-0.5
            )
        if config.projects_input:
            # uniform within H^-1/2, torch's default
            self.input_proj = nn.Linear(config.target_hidden_size, config.input_size, bias=False)
        if config.kind == "gru":
            self.prefix_gru: Any = nn.GRU(
                config.input_size, config.hidden_size, bias=False, batch_first=True
            )
            self.rank_proj = nn.Linear(config.hidden_size, config.rank, bias=False)
        if config.kind in ("gated", "rnn"):
            self.token_proj = nn.Linear(config.rank, config.num_slot_terms, bias=False)
        if config.kind == "rnn":
            self.state_proj = nn.Linear(config.rank, config.num_slot_terms, bias=False)
        if config.slot_size:
            has_bias = config.kind in ("gated", "rnn")
            self.slot_proj = nn.Linear(config.slot_size, config.num_slot_terms, bias=has_bias)
        if config.lm_head_mode == "low_rank":
            self.low_rank_lm_head = nn.Linear(config.rank, config.draft_vocab_size, bias=False)
            nn.init.zeros_(self.low_rank_lm_head.weight)
        else:
            self.rank_to_hidden = nn.Linear(config.rank, config.target_hidden_size, bias=False)
            nn.init.zeros_(self.rank_to_hidden.weight)

    def input_features(
        self, token_ids: torch.Tensor, embed_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the head's inputs [..., I] for target token ids [...]."""
        if self.config.parameterization == "direct_vocab":
            return self.embed_tokens(token_ids)
        assert embed_tokens is not None
        x = F.embedding(token_ids, embed_tokens)
        return (
            self.input_proj(x.to(self.input_proj.weight.dtype))
            if hasattr(self, "input_proj")
            else x
        )

    def slot_terms(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Returns the terms [..., Q] of slots with final states [..., U]; None if the head reads no
        slots."""
        if not self.config.slot_size:
            return None
        return self.slot_proj(hidden.to(self.slot_proj.weight.dtype))

    def initial_state(self, count: int) -> torch.Tensor:
        """Returns the state [count, S] before the first token: zeros."""
        weight = next(self.parameters())
        return torch.zeros(count, self.config.hidden_size, dtype=weight.dtype, device=weight.device)

    def ranks(
        self,
        # [B, L] target token ids, the first one read first
        token_ids: torch.Tensor,
        # [V, H]
        embed_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns rank vectors [B, L, r] of sequences, for training.

        Row t of a sequence has read tokens 0..t, so it scores token t + 1. The head reads no slots.
        """
        assert not self.config.slot_size
        x = self.input_features(token_ids, embed_tokens)
        if self.config.kind == "markov":
            return x
        hidden, _ = self.prefix_gru(x.to(self.rank_proj.weight.dtype))
        return self.rank_of(hidden)

    def step(
        self,
        # [F]
        token_ids: torch.Tensor,
        # [F, S] state of each node's parent
        state: torch.Tensor,
        # [V, H]
        embed_tokens: torch.Tensor | None = None,
        # [R, Q] terms; row i belongs to nodes i*F/R to (i+1)*F/R - 1
        slots: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads one token for each node of a frontier and returns rank vectors [F, r] and new
        states [F, S].

        It is the readable form of the fused kernel and equals `ranks` token by token.
        """
        x = self.input_features(token_ids, embed_tokens)
        if self.config.kind == "markov":
            return _with_slots(torch.mul, x, slots), state
        if self.config.kind == "gated":
            return x * torch.sigmoid(_with_slots(torch.add, self.token_proj(x), slots)), state
        if self.config.kind == "rnn":
            terms = _with_slots(torch.add, self.token_proj(x) + self.state_proj(state), slots)
            gate, new, output = terms.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(new)
        x = x.to(self.rank_proj.weight.dtype)
        from_input = F.linear(x, self.prefix_gru.weight_ih_l0)
        from_state = F.linear(state, self.prefix_gru.weight_hh_l0)
        reset_x, update_x, new_x = from_input.chunk(3, dim=-1)
        reset_h, update_h, new_h = from_state.chunk(3, dim=-1)
        reset = torch.sigmoid(reset_x + reset_h)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(new_x + reset * new_h)
        state = (1 - update) * new + update * state
        return self.rank_of(state, slots), state

    def rank_of(self, state: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the rank vectors [..., r] of GRU states [..., S]; `slots` as in `step`."""
        ranks = _with_slots(torch.add, self.rank_proj(state), slots)
        return F.silu(ranks) if self.config.rank_activation == "silu" else ranks

    def output_table(self, lm_head: torch.Tensor | None = None) -> torch.Tensor:
        """Returns W_short [V', r]; for "target_lm_head" the product of both factors, computed in
        float32."""
        if self.config.lm_head_mode == "low_rank":
            return self.low_rank_lm_head.weight
        assert lm_head is not None
        weight = self.rank_to_hidden.weight
        return (lm_head.float() @ weight.float()).to(weight.dtype)

    def output_rows(self, draft_ids: torch.Tensor, scored_ids: torch.Tensor | None) -> torch.Tensor:
        """Returns the row of `output_table` for each target id in `draft_ids` [n].

        Args:
            scored_ids: target id of each row; None for the whole vocabulary.

        Raises:
            ValueError: if the head does not score one of the tokens.
        """
        if scored_ids is None:
            return draft_ids
        row_of = torch.full((self.config.vocab_size,), -1, dtype=torch.int64)
        row_of[scored_ids] = torch.arange(len(scored_ids))
        rows = row_of[draft_ids]
        missing = int((rows < 0).sum())
        if missing:
            raise ValueError(
                f"local head: it scores {len(scored_ids)} tokens, and {missing} of the "
                f"{len(draft_ids)} that the block head drafts are not among them; use a local head "
                "trained for this draft vocabulary or for the whole one"
            )
        return rows


@dataclass(frozen=True)
class ConfidenceHead:
    """Estimates c, how likely a slot's draft is accepted, given that the previous token was:
    c = sigmoid(of_slots(state) + of_token[previous token]).

    It multiplies the probabilities of a node's children by c to the power `power`.
    """

    # [U] and [] float32
    weight: torch.Tensor
    bias: torch.Tensor
    # [V] float32 logits by target token; zeros for a head that only reads states
    of_token: torch.Tensor
    power: float

    def to(self, device: torch.device) -> ConfidenceHead:
        """Returns the head on another device."""
        weight, bias, of_token = (x.to(device) for x in (self.weight, self.bias, self.of_token))
        return ConfidenceHead(weight, bias, of_token, self.power)

    def of_slots(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits float32 [...] of final normed states [..., U]."""
        return hidden.float() @ self.weight + self.bias

    def log_factors(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns what the log-probabilities of children are increased by, from logits of c."""
        return self.power * F.logsigmoid(logits)


def _with_slots(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    # [F, Q]
    values: torch.Tensor,
    # [R, Q], or None to return the values
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """Returns `function` of the values and the terms of each value's slot."""
    if slots is None:
        return values
    # Terms repeated for every node would be a copy.
    by_slot = values.unflatten(0, (len(slots), len(values) // max(1, len(slots))))
    return function(by_slot, slots[:, None]).flatten(0, 1)


def _default(config: LocalHeadConfig, name: str, value: int) -> None:
    if not getattr(config, name):
        object.__setattr__(config, name, value)


def _is_weight(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0.0 <= value <= MAX_WEIGHT


def _require(condition: bool, name: str, value: object, legal: str) -> None:
    if not condition:
        raise ValueError(
            f"local head config: {name} = {repr(value)[:200]}, legal: {legal}; correct the head's "
            "configuration or use another head"
        )
