# SPDX-License-Identifier: Apache-2.0
"""Outputs of decoder layers, of models that do not return them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_specplug.vllm_worker.target.layer_states import collect_layer_states

HIDDEN, ROWS = 4, 6


class Attention(nn.Module, AttentionLayerBase):
    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


class Layer(nn.Module):
    """Adds its number to what it is given; `split`, it leaves adding to the next one."""

    def __init__(self, number: int, *, split: bool):
        super().__init__()
        self.attention, self.number, self.split = Attention(), number, split
        # What it returns in place of a residual that the next one adds.
        self.instead: Any = ()

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
        if self.instead != ():
            added = hidden + self.number
            stale = torch.arange(HIDDEN).expand_as(hidden).to(hidden.dtype)
            return added, stale if self.instead == "stale" else self.instead
        hidden = hidden if residual is None else hidden + residual
        added = torch.full_like(hidden, self.number)
        return (added, hidden) if self.split else added + hidden


class Body(nn.Module):
    def __init__(self, layers: int, *, split: bool):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i + 1, split=split) for i in range(layers))
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            output = layer(hidden, residual)
            hidden, residual = output if isinstance(output, tuple) else (output, None)
        return hidden if residual is None else hidden + residual


class Model(nn.Module):
    def __init__(self, *bodies: nn.Module):
        super().__init__()
        self.bodies = nn.ModuleList(bodies)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.bodies[0](hidden)


def config(layers: int) -> Any:
    text = SimpleNamespace(num_hidden_layers=layers, hidden_size=HIDDEN)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text, dtype=torch.float32),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=ROWS),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_returns_the_layers_that_were_asked_for(split: bool, compiled: bool) -> None:
    body = Body(4, split=split)
    model = Model(body)
    assert collect_layer_states(model, (3, 1), config(4), "jetspec")
    if compiled:
        body.compile(backend="aot_eager", fullgraph=True)
    kept = []
    for rows in (2, 5, 3):
        start = torch.randn(rows, HIDDEN)
        hidden, (first, third) = model(start)
        torch.testing.assert_close(hidden, start + 10)
        kept.append((start, first, third))
    # Later forwards write over none of them.
    for start, first, third in kept:
        torch.testing.assert_close(first, start + 1)
        torch.testing.assert_close(third, start + 6)
    assert not model.state_dict().keys() - {"bodies.0.weight"}


class Whole(Body):
    """Layers return their whole output, which the body takes."""

    def __init__(self, layers: int, instead: Any):
        super().__init__(layers, split=True)
        self.norm = nn.LayerNorm(HIDDEN)
        for layer in self.layers:
            layer.instead = instead

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden, None)
        return self.norm(hidden)


def test_no_residual_beside_an_output() -> None:
    model = Model(Whole(3, None))
    assert collect_layer_states(model, (2,), config(3), "jetspec")
    start = torch.randn(3, HIDDEN)
    _, (second,) = model(start)
    torch.testing.assert_close(second, start + 3)


@pytest.mark.parametrize("change", ["a residual that nobody adds", "another shape"])
def test_outputs_that_would_be_misread_are_refused(change: str) -> None:
    model = Model(Whole(3, "stale"))
    if change == "another shape":
        model = Model(Whole(3, None))
        for layer in model.bodies[0].layers:
            layer.forward = lambda hidden, _: (hidden[None] + torch.ones(2, 1, 1), None)
        model.bodies[0].forward = lambda hidden: model.bodies[0].layers[2](hidden, None)[0][0]
    collect_layer_states(model, (1,), config(3), "jetspec")
    with pytest.raises(ValueError, match="'jetspec'.*Model could not be found.*ngram_tree"):
        model(torch.randn(3, HIDDEN))


def test_layers_that_cannot_be_told_are_refused() -> None:
    two = Model(Body(3, split=True), Body(3, split=True))
    with pytest.raises(ValueError, match=r"'jetspec'.*has 2 lists of 3 layers.*bodies\.1\.layers"):
        collect_layer_states(two, (1,), config(3), "jetspec")
    with pytest.raises(ValueError, match=r"0 lists of 5 layers with attention \(none\)"):
        collect_layer_states(two, (1,), config(5), "jetspec")
    whole = Model(Body(3, split=True))
    whole.do_not_compile = True
    with pytest.raises(ValueError, match="a class that vLLM does not compile"):
        collect_layer_states(whole, (1,), config(3), "jetspec")
