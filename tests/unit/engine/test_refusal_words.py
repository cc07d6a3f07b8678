# SPDX-License-Identifier: Apache-2.0
"""How a refused start reads: field, value, legal values and remedy."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.tiny import make_head
from tests.unit.engine_config import engine_config
from tests.unit.methods.eagle3_tree.heads import write_head
from vllm_specplug import registry
from vllm_specplug.methods.ngram_tree.options import NgramTreeOptions
from vllm_specplug.options import REMOVED_OPTIONS

pytestmark = pytest.mark.usefixtures("installed")

VOCAB = 12


def _refusal(target: Path, spec: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        engine_config(target, spec)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    return str(caught.value)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
OF_ITS_HEAD = {"method": "tree", "model": "HEAD"}
JETSPEC = {"method": "jetspec", "model": "HEAD"}
NGRAM_TREE = {"method": "ngram_tree"}
NODES = "speculative_config.num_speculative_tokens"

# Options and how the message begins; "..." stands for any words.
REFUSED: list[tuple[dict[str, Any], str]] = [
    # The head and its method.
    ({"method": "jetspec"}, "speculative_config.model=None ... needs a draft head"),
    ({"method": "jetspec", "model": "/nowhere/head"}, "speculative_config.model='/nowhere/head'"
     " ... no such folder"),
    ({"method": "jetspec", "model": "some/head"}, "... hf download some/head"),
    ({"method": "tree"}, "speculative_config.model=None ... 'tree' needs a draft head"),
    ({"method": "tree", "model": "/nowhere"}, "speculative_config.model='/nowhere' ... no such"),
    ({"method": "tree", "model": "TARGET"}, "... no method knows this kind of head ... Llama"),
    ({**OF_ITS_HEAD, "kv_budget": 3}, "... kv_budget=3 ... 'jetspec' does not have it"),
    ({"method": "dels", "local_head": 3}, "speculative_config.local_head=3 is not usable: legal: a "
     "string. Correct it, or leave"),
    # Options that there are not.
    ({**OF_ITS_HEAD, "tree_widht": 3}, "... no option 'tree_widht' ... 'jetspec'"),
    ({**OF_ITS_HEAD, "async": True}, "... no option 'async'"),
    ({**JETSPEC, "tree_widht": 3}, "... no option 'tree_widht' (given 3) ... Did you mean 'tree"),
    ({**NGRAM, "tree_width": 3}, "... tree_width=3 ... only the methods ... jetspec"),
    ({**NGRAM_TREE, "ngram-size": 3}, "speculative_config.ngram_size (given 3) is no longer an"),
    # Options of vLLM's own methods.
    *(
        ({**JETSPEC, name: value}, f"... {name}={value!r}")
        for name, value in {
            "rejection_sample_method": "block", "draft_sample_method": "probabilistic",
            "prompt_lookup_max": 4, "draft_tensor_parallel_size": 1, "revision": "v2",
            "max_model_len": 64, "enforce_eager": True, "suffix_decoding_max_tree_depth": 8,
        }.items()
    ),
    ({**NGRAM_TREE, "rejection_sample_method": "best"}, "speculative_config.rejection_sample_method"
     "='best' is not usable: input should be"),
    # Values.
    ({**NGRAM_TREE, "num_speculative_tokens": "many"}, f"{NODES}='many' is not usable: the node "
     "budget of a tree (root excluded) must be within 1..256. Choose a value from 1 to 256; 8 to "
     "64 is usual."),
    ({**NGRAM_TREE, "num_speculative_tokens": 0}, f"{NODES}=0 is not usable"),
    ({**NGRAM_TREE, "num_speculative_tokens": True}, f"{NODES}=True is not usable: the node"),
    ({**JETSPEC, "num_speculative_tokens": 300}, f"{NODES}=300 ... 1..256"),
    ({**JETSPEC, "num_speculative_tokens": 2, "tree_depth": 3}, "... at least tree_depth=3"),
    ({**JETSPEC, "num_speculative_tokens": 16, "tree_depth": 9}, "... tree_depth=9 ... 1..4"),
    ({**NGRAM_TREE, "tree_depth": "deep"}, "speculative_config.tree_depth='deep' is not usable"),
    ({**NGRAM_TREE, "tree_budget": "lots"}, "speculative_config.tree_budget='lots' is not usable: "
     'legal: int 0 or more, or "auto". Correct it, or leave it out for its default, "auto".'),
    ({**NGRAM_TREE, "tree_budget": True}, "speculative_config.tree_budget=True is not usable: "
     "legal: int"),
    ({**JETSPEC, "tree_kernel": "cute"}, "speculative_config.tree_kernel='cute'"),
    ({**NGRAM_TREE, "tree_kernel": "refrence"}, "speculative_config.tree_kernel='refrence' is not "
     'usable: legal: one of "auto", "cpp", "reference", "triton", "flash", "cute". Did you mean '
     '"reference"? Correct it, or leave it out for its default, "auto".'),
    ({**NGRAM_TREE, "tree_width": 0}, "speculative_config.tree_width=0 is not usable: legal: int "
     "1..64. Correct it, or leave it out for its default, 8."),
    ({**NGRAM_TREE, "tree_width": 65}, "speculative_config.tree_width=65 is not usable"),
    ({**NGRAM_TREE, "max_step_rows": 0}, "speculative_config.max_step_rows=0 is not usable: legal"),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_an_option_is_refused_by_name_and_value(
    target: Path, tmp_path: Path, spec: dict[str, Any], message: str
) -> None:
    paths = {"TARGET": str(target), "HEAD": str(tmp_path / "head")}
    make_head(tmp_path / "head", VOCAB)
    spec = {name: paths.get(value, value) for name, value in spec.items()}
    pattern = ".*".join(re.escape(words.strip()) for words in message.split("..."))
    assert re.match(pattern, _refusal(target, spec))


@pytest.mark.parametrize("spec", ["jetspec", ["jetspec"], 5])
def test_a_config_that_is_no_object_is_refused(target: Path, spec: Any) -> None:
    message = _refusal(target, spec)
    assert message.startswith(f"speculative_config={spec!r} is not usable, legal: an object")


@pytest.mark.parametrize("name", REMOVED_OPTIONS)
def test_removed_options_are_refused_with_what_to_do(target: Path, name: str) -> None:
    message = _refusal(target, {"method": "ngram_tree", name: 1})
    assert message.startswith(f"speculative_config.{name} (given 1) is no longer an option: ")
    assert message.endswith(f"{REMOVED_OPTIONS[name]}. Leave it out.")


class StrangersOptions(NgramTreeOptions):
    alpha: float = 0.5


def test_methods_of_others_may_have_options_of_these_names(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    ngrams = registry.get_method("ngram_tree")
    registry.register(replace(ngrams, name="other", options=f"{__name__}:StrangersOptions"))
    spec = engine_config(target, {"method": "other", "alpha": 0.25}).speculative_config
    assert spec.method_options.alpha == 0.25


@pytest.mark.parametrize(
    ("name", "meant"),
    [("jetspek", "'jetspec'"), ("eagle-3", "'eagle3'"), ("ngramtree", "'ngram_tree'"), (7, None)],
)
def test_an_unknown_method(target: Path, name: object, meant: str | None) -> None:
    message = _refusal(target, {"method": name, "num_speculative_tokens": 4})
    start = f"speculative_config.method={name!r} is not usable: legal: tree, assistant_tree, ddtree"
    assert message.startswith(start) and "vLLM's own methods" in message
    assert (f"Did you mean {meant}?" in message) == (meant is not None)
    assert len(message) < 500, "vLLM's dozens of names are not listed"


def test_a_head_of_another_kind_names_its_method(target: Path, tmp_path: Path) -> None:
    write_head(tmp_path / "eagle", "specforge")
    every = ("jetspec", "ddtree", "dels", "dspark_tree", "longspec", "dflash2_tree", "mtp_tree")
    for method in every:
        message = _refusal(target, {"method": method, "model": str(tmp_path / "eagle")})
        start = f"speculative_config.method='{method}' is not usable: this head is one of method 'e"
        assert message.startswith(start) and 'Use "method": "eagle3_tree"' in message
    # The folder's name does not name the method.
    make_head(tmp_path / "jetspec", VOCAB)
    for method in ("dflash2_tree", "mtp_tree"):
        message = _refusal(target, {"method": method, "model": str(tmp_path / "jetspec")})
        start = f"speculative_config.method='{method}' is not usable: this head is one of method 'j"
        assert message.startswith(start) and 'Use "method": "jetspec"' in message
    # A refusal for another reason stays as it is, also of a method that drafts with such heads.
    for method in ("jetspec", "ddtree"):
        spec = {"method": method, "model": str(tmp_path / "jetspec"), "tree_depth": 60}
        message = _refusal(target, {**spec, "num_speculative_tokens": 64})
        assert message.startswith("speculative_config.tree_depth=60 is not usable")
    message = _refusal(target, {"method": "dels", "model": str(tmp_path / "jetspec")})
    assert message.startswith("speculative_config.local_head=None is not usable")


def test_vllms_own_refusals_are_left_to_it(target: Path, tmp_path: Path) -> None:
    from pydantic import ValidationError
    from vllm.engine.arg_utils import EngineArgs

    args = EngineArgs(model=str(tmp_path), speculative_config={"method": "ngram_tree"})
    with pytest.raises(ValidationError, match="ModelConfig"):
        args.create_engine_config()
