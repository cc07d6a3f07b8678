# SPDX-License-Identifier: Apache-2.0
"""The device's kernel for top candidates in Triton's interpreter, against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from vllm_specplug.kernels import local_tree
from vllm_specplug.kernels import top_candidates_triton as kernels

pytestmark = pytest.mark.usefixtures("interpreter")

NAN, INF = float("nan"), float("inf")


def readable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = logits.float().masked_fill(logits.isnan(), -INF)
    order = numbers.sort(dim=-1, descending=True, stable=True)
    ids, values = order.indices[..., :count], order.values[..., :count]
    total = numbers.logsumexp(-1, keepdim=True)
    log_probs = values - total.masked_fill(total == INF, NAN)
    none = values == -INF
    return ids.masked_fill(none, 0), log_probs.masked_fill(none, -INF)


def check(logits: torch.Tensor, count: int) -> None:
    ids, log_probs = kernels.top_candidates_triton(logits, count)
    wanted_ids, wanted = readable(logits, count)
    assert torch.equal(ids, wanted_ids)
    assert torch.allclose(log_probs, wanted, atol=1e-5, rtol=1e-6, equal_nan=True)


@pytest.fixture(params=[(64, 32, 1), (64, 32, 6), (4096, 1024, 2048)])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One part a row, some; and those of a launch."""
    for name, value in zip(("_CHUNK", "_SLOTS", "_PROGRAMS"), request.param, strict=True):
        monkeypatch.setattr(kernels, name, value)


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.bfloat16, 12), (torch.float16, 1), (torch.float32, 32)]
)
def test_candidates_are_torchs(sizes: None, dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    check((4 * torch.randn(2, 501)).to(dtype), count)
    check(torch.randint(0, 4, (2, 320)).to(dtype), count)  # ties
    # The merge takes the last part's list in two pieces, and only some of its equal entries.
    steps = torch.full((2, 320), -1.0)
    steps[:, :6], steps[:, 256:] = 1.0, 0.0
    check(steps.to(dtype), count)
    check(torch.arange(2.0 * 33).to(dtype).view(33, 2).T, count)  # ascending, of strided entries
    check((4 * torch.randn(2, 400)).to(dtype)[:, 7:233], count)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_is_no_number_or_saturated(sizes: None) -> None:
    logits = torch.full((8, 300), -INF)
    logits[:, 130:134] = torch.tensor(
        [[1, NAN, 2, -INF], [INF, 1, INF, NAN], [-INF] * 4, [NAN] * 4, [0, -0.0, 0, -0.0],
         [3e38, -3e38, 1, 1], [-200, -100, -100, -3e38], [-1, INF, NAN, 0]]
    )  # fmt: skip
    logits[0, 299] = logits[3, 0] = NAN
    check(logits, 4)
    check(torch.full((2, 300), INF), 5)
    check(torch.zeros(1, 300), 5)


def test_rows_of_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    check(torch.randn(17, 40).bfloat16(), 4)
    check(torch.empty(0, 40), 4)
    # As on a device.
    monkeypatch.setattr(local_tree, "can_build_local_trees", lambda dtype: False)
    monkeypatch.setattr(local_tree, "copies_no_logits", lambda device, count: True)
    logits = torch.randn(2, 3, 40)
    found = local_tree.top_candidates(logits.transpose(0, 1), 30)
    for value, wanted in zip(found, readable(logits.transpose(0, 1), 30), strict=True):
        torch.testing.assert_close(value, wanted)
