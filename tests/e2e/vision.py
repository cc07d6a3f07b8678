# SPDX-License-Identifier: Apache-2.0
"""Multimodal targets, prompts with images, and pairs for them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.e2e.oracle import OracleDrafter
from tests.e2e.pair import Counts, Pair, assert_same_output, pair
from tests.e2e.requests import greedy, seeded
from tests.e2e.tiny import make_tokenizer

VOCAB, START, END, IMAGE, VIDEO = 360, 6, 7, 8, 9
PATCH, MERGE = 14, 2
TEXTS = [[20, 30, 40, 50], [300, 21, 22], [100, 101, 102, 103, 104], [77, 78]]


_EMPTY = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__getattr__": lambda self, attribute: attribute})()
"""


@cache
def have_torchvision() -> None:
    """Here and in the processes in which vLLM looks at a model's class."""
    if find_spec("torchvision"):
        return
    folder = Path(tempfile.mkdtemp(prefix="specplug-torchvision-"))
    package = folder / "torchvision"
    for name in ("io", "ops", "transforms/__init__", "transforms/functional",
                 "transforms/v2/__init__", "transforms/v2/functional"):  # fmt: skip
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_EMPTY)
    (package / "__init__.py").write_text('__version__ = "0.28.0"')
    sys.path.append(str(folder))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(folder))))


def vision_config(family: str, **fields: Any) -> Any:
    """Of transformers' class of that name, small; `fields` are of its text model."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 512, "rope_parameters": rope, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2, **fields,
    }  # fmt: skip
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
             "out_hidden_size": 64, "patch_size": PATCH}  # fmt: skip
    if family == "Qwen2_5_VL":
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
    else:
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=VIDEO,
        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=False,
    )  # fmt: skip


@cache
def vision_target(family: str) -> str:
    """A random target of transformers' class of that name, with a vision tower."""
    import transformers

    torch.manual_seed(0)
    make_model = getattr(transformers, f"{family}ForConditionalGeneration")
    model = make_model(vision_config(family)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(2.5)
            # Scores far apart: positions show in the output.
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(3.0)
    folder = tempfile.mkdtemp(prefix="specplug-vision-")
    model.save_pretrained(Path(folder))
    assert make_tokenizer(Path(folder)) <= VOCAB
    return folder


def without_processors() -> Any:
    """Engines that start inside ask no image processor how large an image can be."""
    have_torchvision()
    from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo

    most = {"image": 64, "video": 64}
    return patch.object(Qwen2VLProcessingInfo, "get_mm_max_tokens_per_item", lambda *_, **__: most)


def vision_engines(family: str = "Qwen2_5_VL", method: str = "oracle", **engine: Any) -> Pair:
    """On a random target, unless the arguments name another `model`."""
    engine = {"model": engine.pop("model", None) or vision_target(family), **engine}
    with without_processors():
        return pair(method, limit_mm_per_prompt={"image": 2, "video": 0}, **engine)


def with_image(before: list[int], after: list[int], seed: int, rows: int, columns: int) -> Any:
    """A prompt with an image of `rows` by `columns` merged patches, as processors give it."""
    return with_images([before, after], [(seed, rows, columns)])


def with_images(texts: list[list[int]], images: list[tuple[int, int, int]]) -> Any:
    """A prompt of texts with images between them; of each image its seed, rows and columns."""
    from vllm.inputs.engine import mm_input
    from vllm.model_executor.models.qwen2_vl import _create_qwen2vl_field_factory
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    tokens, pixels, grids, places = [*texts[0]], [], [], []
    for after, (seed, rows, columns) in zip(texts[1:], images, strict=True):
        generator, size = torch.Generator().manual_seed(seed), rows * columns
        pixels.append(torch.randn(size * MERGE**2, 3 * 2 * PATCH**2, generator=generator))
        grids.append([1, rows * MERGE, columns * MERGE])
        places.append(PlaceholderRange(offset=len(tokens) + 1, length=size))
        tokens += [START, *[IMAGE] * size, END, *after]
    inputs = {"pixel_values": 3 * torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    return mm_input(
        tokens,
        MultiModalKwargsItems.from_hf_inputs(inputs, _create_qwen2vl_field_factory(MERGE)(inputs)),
        {"image": [f"{seed}-{rows}-{columns}" for seed, rows, columns in images]},
        {"image": places},
    )


def prompts(with_image: Callable[..., Any] = with_image) -> list[Any]:
    """Only text, and images of several shapes before, between and behind text; one twice."""
    from vllm.inputs import tokens_input

    return [
        *(tokens_input(text) for text in TEXTS),
        with_image(TEXTS[0], TEXTS[1], 1, 4, 6),
        with_image([], TEXTS[2], 2, 7, 3),
        with_image(list(range(30, 60)), TEXTS[3], 3, 5, 5),
        with_image(TEXTS[0], TEXTS[1], 4, 4, 6),
    ]


def two_images() -> Any:
    """A prompt with two images, the second of which is the first one of `prompts`."""
    return with_images([TEXTS[3], TEXTS[1], TEXTS[2]], [(5, 3, 4), (1, 4, 6)])


def answers(llm: Any, inputs: list[Any], params: list[Any]) -> list[Any]:
    """Request outputs in the order of the prompts."""
    engine, finished = llm.llm_engine, {}
    for i, (prompt, param) in enumerate(zip(inputs, params, strict=True)):
        engine.add_request(str(i), prompt, param)
    while engine.has_unfinished_requests():
        finished.update({o.request_id: o for o in engine.step() if o.finished})
    return [finished[str(i)] for i in range(len(inputs))]


def compare(made: Pair, inputs: list[Any]) -> tuple[list[Any], Counts]:
    """`compare_answers` with drafts that were taken."""
    expected, counts = compare_answers(made, inputs, max_tokens=40, detokenize=False)
    assert counts.accepted > 60 and counts.branching > 20, counts
    return expected, counts


def compare_answers(made: Pair, inputs: list[Any], **options: Any) -> tuple[list[Any], Counts]:
    """`Pair.compare` for such prompts, greedy and seeded, whatever is accepted."""
    params = [seeded(i, **options) if i % 3 == 2 else greedy(**options)
              for i in range(len(inputs))]  # fmt: skip
    expected = answers(made.plain, inputs, params)
    OracleDrafter.sequences = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in expected]
    made.take_counts()
    actual = answers(made.tree, inputs, params)
    counts = made.take_counts()
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert_same_output(a, b, f"request {i}")
    return expected, counts
