# SPDX-License-Identifier: Apache-2.0
"""Every branch of a tree is what the module drafts as a chain along it; what is served, and what is
refused by name."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e import mtp_modules
from tests.e2e.fp8_modules import BLOCKS, CHANNELS, in_fp8, split_experts, write_checkpoints
from tests.e2e.mimo import PREFIX, module_tensors
from tests.unit.dense_trees import DenseCache
from tests.unit.drafters import load_drafter, requests_of
from tests.unit.methods.eagle3_tree.reference import rms
from tests.unit.methods.eagle3_tree.world import (
    HIDDEN,
    LENGTHS,
    VOCAB,
    check_branches,
)
from tests.unit.methods.mtp_tree.published import (
    DEEPSEEK_V3,
    GLM_45_AIR_FP8,
    GLM_47_FLASH,
    QWEN36_35B_A3B_FP8,
    small,
)
from vllm_specplug.drafting.committed_tokens import CommittedTokens
from vllm_specplug.methods.mtp_tree.checkpoint import inspect_mtp_module, load_mtp_module
from vllm_specplug.methods.mtp_tree.config import FAMILIES
from vllm_specplug.methods.mtp_tree.drafter import MtpDrafter
from vllm_specplug.registry import recognise_head

# XiaomiMiMo/MiMo-7B's config in small.
CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "hidden_act": "silu",
    "hidden_size": HIDDEN, "intermediate_size": 24, "max_position_embeddings": 64,
    "max_window_layers": 36, "model_type": "mimo", "num_attention_heads": 4, "head_dim": 8,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 640000, "sliding_window": 32768,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_mrope": False,
    "use_sliding_window": False, "vocab_size": VOCAB,
}  # fmt: skip
# A dense text model of Qwen3.5 in small, as its config has the text's part.
QWEN: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
    "full_attention_interval": 4, "head_dim": 8, "hidden_act": "silu", "hidden_size": HIDDEN,
    "intermediate_size": 24, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 64, "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "output_gate_type": "swish", "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "vocab_size": VOCAB,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
           "shared_expert_intermediate_size": 20}  # fmt: skip
# zai-org/GLM-4.5-Air's config in small, with the norms of GLM-4.5.
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "head_dim": 8, "hidden_act": "silu", "hidden_size": HIDDEN, "partial_rotary_factor": 0.5,
    "intermediate_size": 24, "max_position_embeddings": 64, "model_type": "glm4_moe",
    "moe_intermediate_size": 12, "norm_topk_prob": True, "num_attention_heads": 4, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 6, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1000000, "use_qk_norm": True, "vocab_size": VOCAB,
}  # fmt: skip
# By model type: config, maker of the module's tensors, and their prefix.
PREFIXES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "mimo": (CONFIG, module_tensors, PREFIX),
    "glm4_moe": (GLM, mtp_modules.layer_tensors, "model.layers.4."),
    "glm4_moe_lite": (small(GLM_47_FLASH), mtp_modules.layer_tensors, "model.layers.4."),
    "deepseek_v3": (small(DEEPSEEK_V3), mtp_modules.layer_tensors, "model.layers.4."),
}
TARGET = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=4)


def qwen_config(layout: str, **changes: Any) -> dict[str, Any]:
    """The text part of a target's config; a layout may be the model type of one with experts."""
    text = {**QWEN, **changes}
    if layout in ("qwen3_5_moe_text", "qwen3_next"):
        text = {**text, **EXPERTS, "model_type": layout, **changes}
        del text["intermediate_size"]
    if layout == "qwen3_next":
        del text["mtp_num_hidden_layers"]
    return text


def write(
    folder: Path, layout: str, **changes: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A target with its module, or Qwen's module alone in speculators' format; the text's config
    and the module's tensors by their own names."""
    # Quantised tensors of the target itself are none of the reader's business.
    other = {"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2, dtype=torch.int8)}
    if layout in PREFIXES:
        usual, make, prefix = PREFIXES[layout]
        config = text = {**usual, **changes}
        stored = tensors = make(usual)
    else:
        prefix, text = "mtp.", qwen_config(layout, **changes)
        config = {"architectures": ["Qwen3_5ForCausalLM"], **text}
        stored = tensors = mtp_modules.module_tensors(qwen_config(layout))
    if layout == "multimodal":
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
                  "text_config": text, "vision_config": {"depth": 2}}  # fmt: skip
    elif layout == "speculators":
        config = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp",
                  "num_nextn_predict_layers": 1, "transformer_layer_config": text}  # fmt: skip
        stored, other = {}, {}
        for name, tensor in tensors.items():
            old = max((n for n in mtp_modules.NAMES if name.startswith(n)), key=len)
            stored[mtp_modules.NAMES[old] + name.removeprefix(old)] = tensor
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({**stored, **other}, folder / "model.safetensors")
    return text, {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


# By family: names of the norms of the embedding and of the state, of the projection and of the last
# norm, and of the layer.
PARTS = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    "glm": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
}


class Reference:
    """A module for whole sequences, without a cache. Its layer is that of transformers."""

    def __init__(self, kind: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        self.family = FAMILIES.get(kind, "qwen")
        self.eps, self.w = config["rms_norm_eps"], tensors
        *self.names, prefix = PARTS[self.family]
        # Folder of transformers, and its classes of the layer's config and of the others.
        folder, text, name = {
            "mimo": ("qwen2", "Qwen2", "Qwen2"),
            "glm4_moe": ("glm4_moe", "Glm4Moe", "Glm4Moe"),
            "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLite", "Glm4MoeLite"),
            "deepseek_v3": ("deepseek_v3", "DeepseekV3", "DeepseekV3"),
            "qwen3_next": ("qwen3_next", "Qwen3Next", "Qwen3Next"),
            "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeText", "Qwen3_5Moe"),
        }.get(kind, ("qwen3_5", "Qwen3_5Text", "Qwen3_5"))
        public = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        stated = {n: value for n, value in config.items() if n not in ("auto_map", "model_type")}
        made = getattr(public, f"{text}Config")(**stated)
        made._attn_implementation = made._experts_implementation = "eager"
        self.layer = getattr(public, f"{name}DecoderLayer")(made, 3).float().eval()
        for part in self.layer.modules():
            # As vLLM, and unlike transformers in norms of latent rows.
            if hasattr(part, "variance_epsilon"):
                part.variance_epsilon = self.eps
        rotary = text if text.endswith("Text") else name
        self.rotary = getattr(public, f"{rotary}RotaryEmbedding")(made)
        own = {n.removeprefix(prefix): tensor for n, tensor in tensors.items()}
        if "mlp.experts.0.up_proj.weight" in own:
            gate, up, down = (
                torch.stack([own[f"mlp.experts.{e}.{part}_proj.weight"] for e in range(6)])
                for part in ("gate", "up", "down")
            )
            own |= {"mlp.experts.gate_up_proj": torch.cat((gate, up), 1)}
            own |= {"mlp.experts.down_proj": down}
        self.layer.load_state_dict({name: own[name] for name in self.layer.state_dict()})

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        # Qwen stores norm weights minus one.
        return rms(x, self.w[f"{name}.weight"] + (self.family == "qwen"), self.eps)

    def run(self, embeds: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """All rows [T, H] of one sequence -> states [T, H]."""
        count, (of_token, of_state, projection, last) = len(embeds), self.names
        if self.family != "qwen":
            embeds = embeds.clone()
            embeds[0] = 0.0
        parts = [self.norm(embeds, of_token), self.norm(states, of_state)]
        if self.family == "mimo":
            parts.reverse()
        x = (torch.cat(parts, -1) @ self.w[f"{projection}.weight"].T)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        turned = self.rotary(x, torch.arange(count)[None])
        with torch.no_grad():
            out = self.layer(x, position_embeddings=turned, attention_mask=mask)[0]
        return out if self.family == "glm" else self.norm(out, last)

    def along(
        self, tokens: torch.Tensor, branch: list[int], states: torch.Tensor, embed: torch.Tensor
    ) -> torch.Tensor:
        """[H] for the LM head after the tokens of a branch, drafted one by one as a chain."""
        inputs, out = tokens[1:].tolist(), torch.empty(0)
        for token in [None, *branch]:
            if token is not None:
                inputs.append(token)
                states = torch.cat((states, out[-1:]))
            out = self.run(embed[torch.tensor(inputs)], states)
        return self.norm(out[-1], self.names[-1]) if self.family == "glm" else out[-1]


@pytest.mark.parametrize(
    "kind",
    [*PREFIXES, "text", "multimodal", "speculators", "qwen3_5_moe_text", "qwen3_next"],
)
def test_each_branch_equals_the_chain_along_it(kind: str, tmp_path: Path) -> None:
    reference = Reference(kind, *write(tmp_path, kind))
    assert recognise_head(tmp_path).name == "mtp_tree"
    torch.manual_seed(4)
    embed, lm_head = torch.randn(VOCAB, HIDDEN), 1.5 * torch.randn(VOCAB, HIDDEN)
    drafter = load_drafter(
        MtpDrafter, tmp_path, None, lm_head, embed, TARGET, num_nodes=16, max_depth=16,
        tree_width=8,
    )  # fmt: skip
    (spec,) = drafter.cache_specs()
    shapes = {"glm4_moe_lite": (4, 16), "deepseek_v3": (4, 12)}
    assert (spec.num_kv_heads, spec.head_dim) == shapes.get(kind, (2, 8))
    drafter.bind_cache(DenseCache([spec]))
    tokens = [torch.randint(0, VOCAB, (n,)) for n in LENGTHS]
    states = [torch.randn(n, HIDDEN) for n in LENGTHS]
    counts = np.cumsum([n - 1 for n in LENGTHS])
    drafter.observe(
        CommittedTokens(
            [],
            rows=torch.arange(int(counts[-1])),
            positions=torch.cat([torch.arange(n - 1) for n in LENGTHS]),
            slots=torch.cat([100 * r + torch.arange(n - 1) for r, n in enumerate(LENGTHS)]),
            last_rows=torch.from_numpy(counts - 1),
            next_token_ids=torch.cat([t[1:] for t in tokens]),
            output_states=torch.cat([s[:-1] for s in states]),
        )
    )
    trees = drafter.propose(requests_of(tokens, [16, 9, 16, 12], 8))
    assert [tree.num_nodes for tree in trees] == [16, 9, 16, 12]
    assert max(tree.max_depth for tree in trees) > 2

    def scores_along(r: int, branch: list[int]) -> torch.Tensor:
        out = reference.along(tokens[r], branch, states[r][:-1], embed)
        return (out @ lm_head.T).log_softmax(-1)

    check_branches(trees, scores_along, list(range(VOCAB)))


def test_a_target_is_found_by_its_module(tmp_path: Path) -> None:
    write(tmp_path / "a", "mimo")
    assert recognise_head(tmp_path / "a").name == "mtp_tree"
    assert inspect_mtp_module(tmp_path / "a", TARGET).rotary.theta == 640000
    write(tmp_path / "b", "mimo", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="no method knows this kind of head"):
        recognise_head(tmp_path / "b")


# Changes of a config, and the refusal.
MIMO_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v32"}, "model_type = 'deepseek_v32', legal: mimo, .*method mtp"),
    ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0, legal: 1 or more"),
    ({"use_sliding_window": True}, "use_sliding_window = True"),
    ({"hidden_size": 2 * HIDDEN}, "hidden_size = 32, legal: 16 .*leave model out"),
    ({"intermediate_size": 25}, r"misshapen mlp.down_proj.weight"),
    ({"num_key_value_heads": 3}, "num_key_value_heads = 3, legal: a divisor"),
    ({"head_dim": "8"}, "head_dim = '8'"),
]
QWEN_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True"),
    ({"layer_scale": True}, "layer_scale = True"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"partial_rotary_factor": 3, "rope_parameters": None}, "partial_rotary_factor = 3"),
    # Queries without gates have half as many rows.
    ({"attn_output_gate": False}, r"misshapen self_attn.q_proj.weight: config says \[32, 16\]"),
    ({"mtp_num_hidden_layers": 0}, "legal: 1 or more"),
]
EXPERTS_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": None}, "num_experts = None, legal: an integer from 1"),
    ({"num_experts_per_tok": 7}, r"num_experts_per_tok = 7, legal: 1..6 \(num_experts\)"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size = 0"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes', legal: true or false"),
    ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\], legal: absent or \[\]"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2, legal: absent or 1"),
    ({"moe_intermediate_size": 13}, "(misshapen mlp.experts.*){2}"),
    ({"num_experts": 8}, "(misshapen mlp.experts.gate_up_proj|missing mlp.experts.7.up_proj)"),
]
GLM_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n_group": 4}, r"n_group = 4, legal: 1, or a divisor of 6 \(the experts\)"),
    ({"n_group": 6}, "n_group = 6, legal: 1, .* leaves each group two or more"),
    ({"topk_group": 2}, r"topk_group = 2, legal: 1..1 \(groups that hold 2 experts\)"),
    ({"n_group": 3, "num_experts_per_tok": 3}, r"topk_group = 1, legal: 2..3"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax', legal: absent or 'sigmoid'"),
    ({"routed_scaling_factor": 0}, "routed_scaling_factor = 0, legal: a positive number"),
    ({"n_routed_experts": None}, "n_routed_experts = None, legal: an integer from 1"),
    ({"n_shared_experts": 2}, r"misshapen mlp.shared_expert.down_proj.weight"),
    ({"use_qk_norm": False}, "unexpected self_attn.k_norm.weight"),
    ({"attention_bias": False}, "unexpected self_attn.k_proj.bias"),
    ({"num_hidden_layers": 5}, r"ships no .* layers.5.\*"),
    ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0, legal: 1 or more"),
]
LATENT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"q_lora_rank": None}, "q_lora_rank = None, legal: an integer from 1"),
    ({"v_head_dim": 17}, r"v_head_dim = 17, legal: 1..16 \(qk_nope_head_dim \+ qk_rope_head_dim"),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim = 3, legal: an even number"),
    ({"attention_bias": True}, "attention_bias = True, legal: absent or False"),
    ({"rope_interleave": False}, "rope_interleave = False, legal: absent or True"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5, legal: absent or 1 with MLA"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling.rope_type = 'linear', legal: default or yarn",
    ),
    ({"rope_scaling": {"type": "yarn", "factor": "2"}}, "rope_scaling = .*complete settings"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": "1"}},
        "rope_scaling.mscale_all_dim = '1', legal: absent, 0 or a positive number",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.2}},
        "rope_scaling.attention_factor = 1.2, legal: absent with MLA",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}},
        "rope_scaling.mscale = 0.7, legal: set if mscale_all_dim is set",
    ),
    (
        {"v_head_dim": 8},
        r"misshapen self_attn.kv_b_proj.*misshapen self_attn.o_proj.weight: config says "
        r"\[16, 32\], checkpoint has \[16, 64\]",
    ),
    ({"kv_lora_rank": 8}, r"misshapen self_attn.kv_a_layernorm.weight: config says \[8\]"),
    ({"kv_lora_rank": None}, r"missing self_attn.k_proj.weight .*unexpected self_attn.kv_a_"),
]


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        *(("mimo", *case) for case in MIMO_REFUSED),
        *(("text", *case) for case in QWEN_REFUSED),
        *(("qwen3_5_moe_text", *case) for case in EXPERTS_REFUSED),
        ("qwen3_next", {"num_nextn_predict_layers": 0}, "num_nextn_predict_layers = 0, legal: 1"),
        *(("glm4_moe", *case) for case in GLM_REFUSED),
        *(("glm4_moe_lite", *case) for case in LATENT_REFUSED),
    ],
)
def test_modules_that_do_not_fit_are_refused_by_name(
    layout: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, layout, **changes)
    with pytest.raises(ValueError, match=message):
        inspect_mtp_module(tmp_path, TARGET)


@pytest.mark.parametrize("config", [{**GLM, "num_hidden_layers": 3}, qwen_config("qwen3_next")])
def test_a_release_that_dropped_its_module_is_refused(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="ships no multi-token-prediction module.*Set model to"):
        inspect_mtp_module(tmp_path, TARGET)


def test_a_message_lists_the_first_problems_only(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_next", num_experts=200)
    with pytest.raises(ValueError, match="missing .*; and 572 more; misshapen") as error:
        inspect_mtp_module(tmp_path, TARGET)
    assert len(str(error.value)) < 2000


def test_a_choice_of_experts_is_not_rounded(tmp_path: Path) -> None:
    """In bfloat16 the biases of two experts would be equal."""
    write(tmp_path, "glm4_moe")
    table = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16)
    drafter = load_drafter(MtpDrafter, tmp_path, None, table, table, TARGET)
    stored = load_mtp_module(tmp_path, TARGET).state_dict()["mlp.choice_bias"]
    assert torch.equal(drafter.head.layers[0].mlp.choice_bias, stored)
    assert not torch.equal(stored, stored.bfloat16().float())


def test_experts_of_several_dtypes_keep_their_range(tmp_path: Path) -> None:
    write(tmp_path, "glm4_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            # Only the first fits float16.
            is_first = ".experts.0." in name
            tensors[name] = tensor.half() if is_first else (tensor.float() * 1e6).bfloat16()
    save_file(tensors, file)
    module = load_mtp_module(tmp_path, TARGET)
    assert all(weight.isfinite().all() for weight in module.mlp.experts.parameters())
    last = next(t for n, t in tensors.items() if n.endswith(".experts.5.down_proj.weight"))
    assert torch.equal(module.mlp.experts.down_proj[5].float(), last.float())


@pytest.mark.parametrize(
    "kind", ["mimo", "glm4_moe", "deepseek_v3", "text", "qwen3_5_moe_text", "qwen3_next"]
)
def test_a_module_in_fp8_is_read_as_its_numbers(kind: str, tmp_path: Path) -> None:
    """With scales of blocks that end within parts of matrices, or of channels."""
    write(tmp_path / "made", kind)
    quantization = CHANNELS if kind == "glm4_moe" else {**BLOCKS, "weight_block_size": [5, 7]}
    prefix = PREFIXES[kind][2] if kind in PREFIXES else "mtp."
    folders = write_checkpoints(tmp_path / "made", prefix, quantization)
    assert inspect_mtp_module(folders[0], TARGET) == inspect_mtp_module(folders[1], TARGET)
    expected = load_mtp_module(folders[1], TARGET).state_dict()
    original = load_mtp_module(tmp_path / "made", TARGET).state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        found = load_mtp_module(folders[0], TARGET, dtype).state_dict()
        changed = [n for n in found if not torch.equal(found[n], original[n])]
        assert {"self_attn.o_proj.weight"} < set(changed)
        assert all(found[name].dtype == dtype for name in changed)
        assert all(torch.equal(found[n].float(), expected[n].float()) for n in expected)


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GLM_45_AIR_FP8, QWEN36_35B_A3B_FP8])
def test_published_modules_in_fp8(config: dict[str, Any], tmp_path: Path) -> None:
    raw = small(config)
    sizes = raw.get("text_config", raw)
    make = mtp_modules.module_tensors if "num_experts" in sizes else mtp_modules.layer_tensors
    tensors, _ = in_fp8(split_experts(make(sizes)), raw["quantization_config"])
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors")
    assert recognise_head(tmp_path).name == "mtp_tree"
    module = load_mtp_module(tmp_path, SimpleNamespace(**sizes), torch.bfloat16)
    assert module.mlp.experts.down_proj.shape == (6, 16, 12)
    assert module.mlp.experts.down_proj.dtype == torch.bfloat16
    scale = next(name for name in tensors if "experts.5.down_proj.weight_scale" in name)
    save_file({n: t for n, t in tensors.items() if n != scale}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"fp8 tensor '.*experts.5.down_proj.weight' .* are none"):
        inspect_mtp_module(tmp_path, SimpleNamespace(**sizes))
