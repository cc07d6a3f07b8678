# SPDX-License-Identifier: Apache-2.0
"""Assistants over the target's pages, as on CUDA. Transformers' module, which reads the
same pages, must build the same trees."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.assistants import make_followed_target, module_tree
from tests.e2e.cuda.cuda_drafts import knowing
from tests.e2e.cuda.cuda_pairs import INTERPRETED, compare_windows, engines
from tests.e2e.families import VOCAB
from vllm_specplug.drafting.device_requests import DeviceRequests
from vllm_specplug.methods.assistant_tree.drafter import AssistantDrafter
from vllm_specplug.tree import DraftTree

pytestmark = [*INTERPRETED, pytest.mark.full]


@cache
def module_in(folder: str) -> Any:
    from transformers import Gemma4AssistantForCausalLM

    return Gemma4AssistantForCausalLM.from_pretrained(folder).float().eval()


def _trees_of_the_module(
    self: Any, requests: DeviceRequests, drafted: list[int]
) -> list[DraftTree]:
    kinds = {"sliding_attention": self.target_caches[0], "full_attention": self.target_caches[-1]}
    states, embed = self.root_states(requests).cpu(), self.embed_tokens.cpu()
    trees = []
    for r in drafted:
        at = torch.arange(int(requests.context_lens[r]))
        row = r if requests.rows is None else int(requests.rows[r])
        caches = {}
        for kind, pages in kinds.items():
            table, size = pages.block_table()[row].cpu(), pages.views[0][0].shape[1]
            caches[kind] = tuple(
                v[table[at // size].long(), at % size].cpu() for v in pages.views[0]
            )
        trees.append(
            module_tree(
                module_in(self.options.head_path), embed, states[r], caches,
                int(requests.anchors[r]), budget=int(requests.budgets[r]),
                depth=min(int(requests.depths[r]), self.options.tree_depth), width=requests.width,
            )
        )  # fmt: skip
    return trees


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_followed_target(tmp_path_factory.mktemp("followed"), VOCAB)


def test_assistants_on_the_device(followed: tuple[Path, Path]) -> None:
    """Contexts shorter and longer than the window of 16; the control is another window."""
    target, assistant = (str(folder) for folder in followed)
    # The target's scores, and so the assistant's, are far apart.
    with knowing(AssistantDrafter, _trees_of_the_module, within=1e-4) as drafts:
        made = engines(
            "assistant_tree", ahead=True, ngram_topk=0, nodes=10, head={"model": assistant},
            target={"model": target, "skip_tokenizer_init": True},
        )  # fmt: skip
        drafts.nodes = 0
        assert compare_windows(made).skipping > 1
        assert drafts.nodes > 50 and not drafts.differing, drafts
        for pages in made.runner.drafter.drafter.target_caches:
            pages.features = [replace(f, window=f.window and 5) for f in pages.features]
        compare_windows(made)
        assert drafts.differing
