# SPDX-License-Identifier: Apache-2.0
"""The kernels for CPUs against vLLM's own, run by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreted_vllm import check, run_both, same
from vllm_specplug.seams.listing_runner import CPU_KERNELS
from vllm_specplug.vllm_v2.cpu_kernels.inputs import zero_kv_blocks
from vllm_specplug.vllm_v2.cpu_kernels.sampling import num_nans

pytestmark = pytest.mark.usefixtures("unchecked_interpreter")

SLOTS, MAX_LEN, VOCAB, DRAFTS = 6, 40, 1100, 5
"""Two blocks of the sampling kernel."""

seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=12)


class Batch:
    """A random batch: prompts in pieces, plain decodes and drafts of several lengths."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.num_reqs = int(rng.integers(1, SLOTS))
        self.idx_mapping = self.ints(rng.permutation(SLOTS)[: self.num_reqs])
        slots = self.idx_mapping.numpy()
        self.prompt_len = self.ints(rng.integers(1, 12, SLOTS))
        self.prefill_len = self.prompt_len + self.ints(rng.integers(0, 6, SLOTS))
        self.computed = self.ints(rng.integers(0, 20, SLOTS))
        self.total_len = torch.maximum(self.prefill_len, self.computed + 1)
        generating = (self.computed >= self.prefill_len).numpy()[slots]
        drafts = np.where(generating, rng.integers(0, DRAFTS + 1, self.num_reqs), 0)
        lens = np.where(generating, drafts + 1, rng.integers(1, 9, self.num_reqs))
        self.query_start_loc = self.ints(np.concatenate([[0], np.cumsum(lens)]))
        self.cu_num_logits = self.ints(np.concatenate([[0], np.cumsum(drafts + 1)]))
        self.seq_lens = self.ints(self.computed.numpy()[slots] + lens)
        self.num_tokens, self.num_logits = int(lens.sum()), int((drafts + 1).sum())
        self.tokens = self.ints(rng.integers(0, VOCAB, (SLOTS, MAX_LEN)))
        self.input_ids = self.ints(rng.integers(0, VOCAB, self.num_tokens + 3))
        self.expanded = self.ints(np.repeat(slots, drafts + 1))
        self.local_pos = self.ints(np.concatenate([np.arange(n + 1) for n in drafts]))
        # Few different tokens, so that rows have tokens in common with what precedes them.
        self.row_tokens = self.ints(rng.integers(0, 6, self.num_logits))

    @staticmethod
    def ints(values: object) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32)

    def logits(self, rows: int | None = None) -> torch.Tensor:
        shape = (self.num_logits if rows is None else rows, VOCAB)
        values = torch.from_numpy(self.rng.normal(0, 3, shape)).float()
        values[torch.from_numpy(self.rng.random(shape)) < 0.05] = float("-inf")
        return values

    def choice(self, *values: float) -> torch.Tensor:
        """[SLOTS] of the given values."""
        return torch.from_numpy(self.rng.choice(np.array(values, dtype=np.float32), SLOTS))


def test_every_kernel_has_the_parameters_of_vllms() -> None:
    assert CPU_KERNELS.verify() == []

    def grown(logits_ptr: Any, logits_stride: int, num_nans_ptr: Any, SEED: int) -> None:
        pass

    assert num_nans.misfit(grown) == "its parameters differ: unknown SEED; no vocab_size"

    def renamed(
        seg_addrs_ptr: Any, strides_ptr: Any, seg_page_sizes_ptr: Any, block_ids_ptr: Any
    ) -> None:
        pass

    missing = "its parameters differ: no seg_block_strides_ptr"
    assert zero_kv_blocks.misfit(renamed) == missing


def _bad_words(b: Batch) -> tuple[Any, ...]:
    """Across committed and draft tokens."""
    lens = b.rng.integers(1, 4, (SLOTS, 9))
    offsets = np.concatenate([np.zeros((SLOTS, 1)), np.cumsum(lens, axis=1)], axis=1)
    return (
        b.logits(), b.expanded, b.ints(b.rng.integers(0, 3, (SLOTS, 40))), b.ints(offsets),
        b.ints(b.rng.integers(0, 10, SLOTS)), b.tokens % 3, b.prompt_len, b.total_len,
        b.row_tokens % 3, b.local_pos, 9,
    )  # fmt: skip


# By module and function of vLLM's: its arguments.
CALLS: dict[str, Callable[[Batch], tuple[Any, ...]]] = {
    "input_batch prepare_prefill_inputs": lambda b: (
        b.input_ids, b.ints(b.rng.integers(0, VOCAB, (b.rng.integers(1, 4), SLOTS))), b.idx_mapping,
        b.query_start_loc, b.tokens, b.prefill_len, b.computed,
    ),
    "input_batch prepare_pos_seq_lens": lambda b: (
        b.idx_mapping, b.query_start_loc, b.computed, torch.full((b.num_tokens + 3,), -7),
        b.ints(np.full(SLOTS + 2, -7)),
    ),
    "input_batch combine_sampled_and_draft_tokens": lambda b: (
        b.input_ids, b.idx_mapping, torch.from_numpy(b.rng.integers(0, VOCAB, (SLOTS, 1))),
        b.query_start_loc, b.seq_lens, b.prefill_len,
        torch.from_numpy(b.rng.integers(0, VOCAB, (SLOTS, DRAFTS))), b.cu_num_logits, b.num_logits,
    ),
    "input_batch get_num_sampled_and_rejected": lambda b: (
        b.ints(b.rng.integers(1, DRAFTS + 2, b.num_reqs)), b.seq_lens, b.cu_num_logits,
        b.idx_mapping, b.prefill_len,
    ),
    "input_batch post_update_num_computed_tokens": lambda b: (
        b.idx_mapping, b.computed, b.query_start_loc,
    ),
    "input_batch expand_idx_mapping": lambda b: (
        b.idx_mapping, b.num_logits, b.cu_num_logits, DRAFTS + 1,
    ),
    "sample.gumbel apply_temperature": lambda b: (
        b.logits(), b.expanded, b.choice(0.0, 0.6, 1.0, 1.7),
    ),
    "sample.min_p apply_min_p": lambda b: (b.logits(), b.expanded, b.choice(0.0, 0.05, 0.3, 1.0)),
    "sample.bad_words apply_bad_words": _bad_words,
    "sample.prompt_logprob get_prompt_logprobs_token_ids": lambda b: (
        b.num_tokens, b.query_start_loc, b.idx_mapping, b.computed, b.tokens,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@few
@given(seeds)
def test_functions_of_one_call(name: str, seed: int) -> None:
    check(*name.split(), *CALLS[name](Batch(seed)))


@few
@given(seeds)
def test_positions_on_several_axes(seed: int) -> None:
    b, axes, longest = Batch(seed), 3, 64
    prompts = b.ints(b.rng.integers(0, 90, (SLOTS * axes, longest)))
    deltas = b.ints(b.rng.integers(-9, 9, SLOTS))

    def positions(module: Any) -> torch.Tensor:
        state = SimpleNamespace(
            positions=torch.full((axes, b.num_tokens + 1), -7),
            num_dims=axes, max_model_len=longest,
            prefill_positions=SimpleNamespace(gpu=prompts),
            prefill_delta=SimpleNamespace(gpu=deltas),
        )  # fmt: skip
        module.RopeState.prepare_positions(
            state, b.idx_mapping, b.query_start_loc, b.prefill_len, b.computed
        )
        return state.positions

    stock, ours = run_both("mm.rope", positions)
    same(stock, ours)


@few
@given(seeds, st.booleans(), st.booleans())
def test_requests_after_a_step(seed: int, counts: bool, queries: bool) -> None:
    b = Batch(seed)
    b.idx_mapping[b.rng.integers(b.num_reqs)] = -1
    check(
        "input_batch", "post_update", b.idx_mapping, b.computed, torch.zeros(SLOTS, 1).long(),
        b.ints(b.rng.integers(0, 3, (SLOTS, VOCAB))) if counts else None,
        torch.from_numpy(b.rng.integers(0, 9, (b.num_reqs, DRAFTS + 1))),
        b.ints(b.rng.integers(0, DRAFTS + 2, b.num_reqs)), b.ints(b.rng.integers(0, 3, b.num_reqs)),
        b.query_start_loc if queries else None, b.tokens, b.total_len,
    )  # fmt: skip


@few
@given(seeds, st.integers(1, 3))
def test_block_tables_and_slots(seed: int, num_groups: int) -> None:
    """Staged writes of one or several groups, gathered rows, slots; with a request of no blocks."""

    def call(module):
        b = Batch(seed)
        sizes = [4, 8, 16][:num_groups]
        tables = module.BlockTables(
            sizes, SLOTS, 64, [12] * num_groups, torch.device("cpu"),
            slot_mapping_enabled=[True, True, False][:num_groups],
        )  # fmt: skip
        for slot in range(SLOTS):
            for overwrite in (True, False):
                tables.append_block_ids(
                    slot,
                    tuple(b.rng.integers(1, 90, b.rng.integers(0, 6)).tolist() for _ in sizes),
                    overwrite,
                )
        tables.apply_staged_writes()
        gathered = tables.gather_block_tables(b.idx_mapping, b.num_reqs + 1)
        positions = torch.from_numpy(b.rng.integers(0, 40, b.num_tokens + 2))
        if seed % 3 == 0:
            b.idx_mapping[0] = -1
        slots = tables.compute_slot_mappings(
            b.idx_mapping, b.query_start_loc, positions, b.num_tokens + 4
        )
        return list(gathered), slots, tables.slot_mappings

    same(*run_both("block_table", call))


@few
@given(seeds, st.sampled_from([torch.int32, torch.int64, torch.float32]), st.booleans())
def test_staged_writes(seed: int, dtype: torch.dtype, rows: bool) -> None:
    def call(module):
        rng = np.random.default_rng(seed)
        size = (SLOTS, 12) if rows else SLOTS
        tensor = module.StagedWriteTensor(size, dtype, torch.device("cpu"))
        for slot in rng.permutation(SLOTS)[:4]:
            if rows:
                tensor.stage_write(slot, rng.integers(0, 4), rng.integers(0, 99, 5).tolist())
            else:
                tensor.stage_write_elem(slot, int(rng.integers(0, 99)))
        tensor.apply_write()
        return tensor.gpu

    same(*run_both("buffer_utils", call))


@few
@given(seeds, st.booleans(), st.booleans())
def test_sampling_draws_the_same_tokens(seed: int, apply_temperature: bool, fp64: bool) -> None:
    b = Batch(seed)
    b.expanded[0] = -1
    rows = len(b.expanded)
    (sampled, _, _) = check(
        "sample.gumbel", "gumbel_sample", b.logits(rows), b.expanded,
        b.choice(0.0, 0.7, 1.0, 1.3), torch.from_numpy(b.rng.integers(-(2**63), 2**63, SLOTS)),
        torch.from_numpy(b.rng.integers(0, 5000, rows)), apply_temperature, False, use_fp64=fp64,
    )  # fmt: skip
    assert sampled.dtype == torch.int64


def test_noise_is_the_kernels_bit_for_bit() -> None:
    """Tokens that differ by noise alone are ranked as the kernel ranks them: over equal logits the
    winner is the token of the largest noise, whatever was masked before it."""
    b = Batch(1)
    logits, slots = torch.zeros(1, 300), b.ints([0])
    for _ in range(40):
        sampled, _, _ = check(
            "sample.gumbel", "gumbel_sample", logits, slots, torch.ones(1), torch.tensor([99]),
            torch.tensor([7]), False, False,
        )  # fmt: skip
        logits[0, sampled] = float("-inf")
    assert logits.isinf().sum() == 40


def test_ties_go_to_the_first_token() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [1050, 9, 40]] = 3.0
    check(
        "sample.gumbel", "gumbel_sample", logits, Batch.ints([0, 1]), torch.zeros(2),
        torch.zeros(2).long(), torch.zeros(2).long(), False, False,
    )  # fmt: skip


@few
@given(seeds)
def test_penalties_count_the_drafts_above(seed: int) -> None:
    b = Batch(seed)
    masks, counts = b.ints(np.zeros((SLOTS, 35))), b.ints(np.zeros((SLOTS, VOCAB)))
    _, state, _ = check(
        "sample.penalties", "bincount", b.idx_mapping, b.tokens % 6 + 30 * (b.tokens % 9),
        b.prompt_len, b.prefill_len, masks, counts, int(b.prefill_len.max()),
    )  # fmt: skip
    check(
        "sample.penalties", "apply_penalties", b.logits(), b.expanded, b.row_tokens, b.local_pos,
        b.choice(1.0, 1.4, 0.8), b.choice(0.0, 0.5), b.choice(0.0, -0.3, 0.9), state[4], state[5],
    )  # fmt: skip


@few
@given(seeds, st.booleans())
def test_allowed_tokens_biases_and_least_lengths(seed: int, restore: bool) -> None:
    b = Batch(seed)
    pick = [b.ints([b.rng.permutation(VOCAB)[:8] for _ in range(SLOTS)]) for _ in range(3)]
    # Sometimes only stop tokens are allowed: then nothing else is left.
    pick[2][:3] = pick[0][:3]
    check(
        "sample.logit_bias", "apply_logit_bias", b.logits(), b.expanded,
        torch.from_numpy(b.rng.integers(0, 20, b.num_logits)), b.ints(b.choice(0, 3, 8)), pick[0],
        b.ints(b.choice(0, 5)), pick[1], torch.from_numpy(b.rng.normal(0, 2, (SLOTS, 8))).float(),
        b.ints(b.rng.integers(0, 30, SLOTS)), b.ints(b.choice(0, 2, 8)), b.ints(b.choice(0, 1)),
        pick[2], restore,
    )  # fmt: skip


MARKERS = [((1,), (2,), (2,)), ((1, 2), (0, 1, 1), (0, 1, 1)), ((1,), (2, 0), (0, 2, 1))]


@few
@given(seeds, st.sampled_from(MARKERS))
def test_thinking_budgets(seed: int, markers: tuple[tuple[int, ...], ...]) -> None:
    """Two steps: the second goes on from what the first remembers."""
    b = Batch(seed)
    caches = [b.ints(np.full(SLOTS, value)) for value in (-1, -1, 0)]
    budget = b.ints(b.choice(-1, 0, 2, 5))
    total = b.total_len
    for _ in range(2):
        _, state, _ = check(
            "sample.thinking_budget", "apply_thinking_budget", b.logits(), b.idx_mapping,
            b.expanded, budget, b.tokens % 3, total, b.row_tokens % 3, b.local_pos, *caches,
            *map(b.ints, markers),
        )  # fmt: skip
        caches, total = list(state[8:11]), total + 3


@few
@given(seeds)
def test_grammar_masks(seed: int) -> None:
    b = Batch(seed)
    bits = b.rng.integers(-(2**31), 2**31, (b.num_logits, 35))
    slots = b.idx_mapping.numpy()
    stride = DRAFTS + 1
    rows = [
        request * stride + position
        for request in range(len(slots))
        for position in range(int(b.cu_num_logits[request + 1] - b.cu_num_logits[request]))
    ]
    # One position that the request does not have.
    rows[-1] = (len(slots) - 1) * stride + DRAFTS
    logits = b.logits()

    def call(module):
        copy = logits.clone()
        module._apply_grammar_bitmask_kernel[(len(rows), 1)](
            copy, copy.stride(0), b.ints(rows), b.cu_num_logits, b.ints(bits), 35, VOCAB,
            MASK_STRIDE=stride, BLOCK_SIZE=2048,
        )  # fmt: skip
        return copy

    same(*run_both("structured_outputs", call))


@few
@given(seeds)
def test_scores_and_ranks(seed: int) -> None:
    b = Batch(seed)
    logits = b.logits()
    tokens = torch.from_numpy(b.rng.integers(0, VOCAB, (b.num_logits, 4)))
    logits.scatter_(1, tokens, logits.gather(1, tokens).clamp_min(-5))
    check("sample.logprob", "compute_token_logprobs", logits, tokens, tolerance=1e-5)
    stock, ours = run_both(
        "sample.logprob", lambda module: module.compute_topk_scores(logits, 3, tokens[:, 0].clone())
    )
    assert torch.equal(stock.selected_token_ranks, ours.selected_token_ranks)
    assert torch.equal(stock.logprob_token_ids, ours.logprob_token_ids)


@few
@given(seeds, st.integers(0, 3))
def test_scores_of_chosen_tokens(seed: int, num_logprobs: int) -> None:
    b = Batch(seed)
    logits, sampled = b.logits().clamp_min(-9), torch.arange(b.num_logits)

    def call(module):
        state = module.LogprobTokenIdsState(SLOTS, torch.device("cpu"))
        state.num_token_ids.gpu.copy_(b.ints(np.arange(SLOTS) % 3))
        state.token_ids.gpu.copy_(torch.arange(state.token_ids.gpu.numel()).view(SLOTS, -1) % VOCAB)
        return module.compute_topk_scores(
            logits, num_logprobs, sampled, None, state, b.expanded, max_per_req_token_ids=2
        )

    stock, ours = run_both("sample.logprob", call)
    assert torch.equal(stock.logprob_token_ids, ours.logprob_token_ids)
    same(stock.logprobs, ours.logprobs, tolerance=1e-5)


@few
@given(seeds, st.integers(1, 3), st.booleans())
def test_sampling_masks(seed: int, rows_per_request: int, wide: bool) -> None:
    b = Batch(seed)
    starts = torch.arange(b.num_reqs + 1, dtype=torch.int32) * rows_per_request
    logits = b.logits(b.num_reqs * rows_per_request)
    logits[:, 3:700] = float("-inf")
    num_sampled = b.ints(b.rng.integers(0, rows_per_request + 1, b.num_reqs))
    most = 500 if wide else 7
    stock, ours = run_both(
        "sample.output",
        lambda module: module.SamplingMaskTensors.from_logits(
            logits, starts, num_sampled, most, rows_per_request
        ),
    )
    assert torch.equal(stock.counts, ours.counts)
    for row, count in enumerate(stock.counts.tolist()):
        assert torch.equal(stock.token_ids[row, : min(count, most)],
                           ours.token_ids[row, : min(count, most)])  # fmt: skip
        assert not count or torch.equal(stock.packed_mask[row], ours.packed_mask[row])


@few
@given(seeds)
def test_prompts_of_embeddings(seed: int) -> None:
    b = Batch(seed)
    hidden = 24
    embeds = [torch.randn(int(n), hidden) for n in b.rng.integers(1, 20, SLOTS)]
    masks = [torch.from_numpy(b.rng.integers(0, 2, len(e))).to(torch.int8) for e in embeds]
    lens = b.ints([len(e) if b.rng.random() < 0.7 else 0 for e in embeds])
    addresses = torch.tensor([e.data_ptr() for e in embeds], dtype=torch.uint64)
    mask_addresses = torch.tensor(
        [m.data_ptr() if b.rng.random() < 0.5 else 0 for m in masks], dtype=torch.uint64
    )

    def call(module):
        inputs = torch.zeros(b.num_tokens, hidden)
        module._apply_prompt_embeds_kernel[(b.num_reqs, 5)](
            inputs, inputs.stride(0), addresses, mask_addresses, lens, b.idx_mapping,
            b.query_start_loc, b.computed, hidden, TOKEN_BLOCK=4, BLOCK_SIZE=1024,
        )  # fmt: skip
        return inputs

    same(*run_both("model_states.prompt_embeds", call))


def test_numbers_that_are_none() -> None:
    """Counted by torch: the interpreter has no libdevice."""
    logits = torch.zeros(3, VOCAB)
    logits[0, :7], logits[2, -1] = float("nan"), float("nan")
    counts = torch.full((3,), 9, dtype=torch.int32)
    num_nans.function(logits, counts, VOCAB)
    assert counts.tolist() == [7, 0, 1]


@few
@given(seeds, st.booleans())
def test_counts_that_layers_with_a_state_keep(seed: int, each: bool) -> None:
    b = Batch(seed)
    b.idx_mapping[b.rng.integers(b.num_reqs)] = -1
    num_sampled = b.ints(b.rng.integers(0, DRAFTS + 2, b.num_reqs)) if each else 3

    def call(module):
        kept = SimpleNamespace(
            num_accepted_tokens_gpu=torch.full((SLOTS,), 77, dtype=torch.int32),
            recoverssm=None,
            _align_mode=False,
        )
        module.MambaHybridModelState.postprocess_state(kept, b.idx_mapping, num_sampled)
        return kept.num_accepted_tokens_gpu

    same(*run_both("model_states.mamba_hybrid", call))


def test_new_blocks_are_zeroed() -> None:
    """Two segments of pages, the second within pages that others share; blocks 1 and 4."""
    caches = torch.full((2, 6, 10), 7, dtype=torch.int32)
    expected = caches.clone()
    expected[0, [1, 4]] = 0
    expected[1, [1, 4], 2:9] = 0
    zero_kv_blocks.function(
        torch.tensor([caches[0].data_ptr(), caches[1, 0, 2:].data_ptr()], dtype=torch.uint64),
        torch.tensor([10, 10]),
        torch.tensor([10, 7]),
        torch.tensor([1, 4]),
    )
    assert torch.equal(caches, expected)
