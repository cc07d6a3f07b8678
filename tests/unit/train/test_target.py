# SPDX-License-Identifier: Apache-2.0
"""What trainers read of a target is there whatever its family calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.fp8_modules import BLOCKS, CHANNELS, in_fp8
from vllm_specplug.methods.block.head import BlockHead
from vllm_specplug.methods.block.train.start import head_config_for, init_from_target
from vllm_specplug.train import target
from vllm_specplug.train.features import forward_features
from vllm_specplug.train.target import TargetWeights, decoder_of, load_target

VOCAB, HIDDEN, LAYERS = 40, 32, 3
_COMMON = {
    "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {**_COMMON, "tie_word_embeddings": False},
    "Gemma2": _COMMON,
    "Gemma3Text": {**_COMMON, "layer_types": ["full_attention"] * LAYERS},
    "Mixtral": {**_COMMON, "num_local_experts": 2, "num_experts_per_tok": 1},
    "GPT2": {"n_embd": HIDDEN, "n_head": 2, "n_layer": LAYERS, "n_positions": 64},
    "OPT": {"hidden_size": HIDDEN, "ffn_dim": 48, "num_attention_heads": 2,
            "num_hidden_layers": LAYERS, "max_position_embeddings": 64,
            "word_embed_proj_dim": HIDDEN},
    "GPTNeoX": {"hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 2,
                "num_hidden_layers": LAYERS, "tie_word_embeddings": False},
    "Bloom": {"hidden_size": HIDDEN, "n_head": 2, "n_layer": LAYERS},
}  # fmt: skip


def make_model(family: str, folder: Path, **fields: Any) -> Any:
    """Saved, and with norms that are no ones."""
    import transformers

    torch.manual_seed(0)
    tokens = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = getattr(transformers, f"{family}Config")(**{**tokens, **FAMILIES[family], **fields})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_and_features_are_the_targets(tmp_path: Path, family: str) -> None:
    model = make_model(family, tmp_path)
    weights = TargetWeights(tmp_path)
    tables = weights.tables()
    assert weights.config["hidden_size"] == HIDDEN
    assert weights.config["num_hidden_layers"] == LAYERS
    assert weights.config["intermediate_size"] in (48, 4 * HIDDEN)
    assert torch.equal(tables.embed_tokens, model.get_input_embeddings().weight)
    tokens = torch.arange(3, 20)
    aux, final = forward_features(model, [tokens], (0, LAYERS - 1))
    with torch.no_grad():
        out = model(tokens[None], output_hidden_states=True)
    hidden = out.hidden_states[1][0]
    torch.testing.assert_close(aux[0][:, :HIDDEN].float(), hidden, rtol=0.02, atol=0.02)
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = out.logits[0] if cap is None else cap * torch.atanh(out.logits[0] / cap)
    taught = final[0].float() @ tables.lm_head.float().t()
    torch.testing.assert_close(taught, logits, rtol=0.05, atol=0.05)
    # The last layer's output, by the final norm's gains alone.
    last = aux[0][:, HIDDEN:].float()
    if family in ("GPT2", "OPT", "GPTNeoX", "Bloom"):
        last = last - last.mean(-1, keepdim=True)
    normed = last / last.square().mean(-1, keepdim=True).sqrt() * tables.final_norm
    bias = getattr(decoder_of(model).final_norm, "bias", None)
    normed = normed if bias is None else normed + bias
    torch.testing.assert_close(final[0].float(), normed, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_starts_from_what_the_targets_layers_do(tmp_path: Path, family: str) -> None:
    model = make_model(family, tmp_path)
    weights = TargetWeights(tmp_path)
    config = head_config_for(
        weights.config, (0, 2), num_layers=2, block_size=4, draft_vocab_size=VOCAB
    )
    head = BlockHead(config)
    init_from_target(head, weights, weights.tables(), [1.0, 1.0])
    layers = decoder_of(model).layers
    names = {
        "GPT2": ("ln_1", "ln_2"), "OPT": ("self_attn_layer_norm", "final_layer_norm"),
        "Gemma2": ("input_layernorm", "pre_feedforward_layernorm"),
        "Gemma3Text": ("input_layernorm", "pre_feedforward_layernorm"),
    }.get(family, ("input_layernorm", "post_attention_layernorm"))  # fmt: skip
    # Gemma's norms multiply by one more than their weight.
    more = float(family.startswith("Gemma"))
    for ours, theirs in zip(head.layers, (layers[0], layers[LAYERS - 1]), strict=True):
        for norm, name in zip((ours.input_layernorm, ours.post_attention_layernorm), names,
                              strict=True):  # fmt: skip
            wanted = getattr(theirs, name).weight + more
            torch.testing.assert_close(norm.weight, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.norm.weight, decoder_of(model).final_norm.weight + more,
                               rtol=1e-4, atol=1e-4)  # fmt: skip
    has_projections = family in ("Llama", "Gemma2", "Gemma3Text", "Mixtral", "OPT")
    own = head.layers[1].self_attn.q_proj.weight
    if has_projections:
        assert torch.equal(own, layers[LAYERS - 1].self_attn.q_proj.weight)
    if family == "Gemma3Text":
        q_norm = layers[LAYERS - 1].self_attn.q_norm.weight + 1
        torch.testing.assert_close(head.layers[1].self_attn.q_norm.weight, q_norm)


def test_what_cannot_be_trained_for_is_named(tmp_path: Path) -> None:
    import transformers

    make_model("OPT", tmp_path / "opt", word_embed_proj_dim=16)
    with pytest.raises(ValueError, match=r"an embedding of shape \(40, 16\).*legal"):
        TargetWeights(tmp_path / "opt").tables()
    t5 = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1,
                               num_heads=2)  # fmt: skip
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="is a T5 model, legal: .*AutoModelForCausalLM"):
        TargetWeights(tmp_path / "t5").tables()
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(ValueError, match="transformers does not read"):
        TargetWeights(tmp_path / "t5")


@pytest.mark.parametrize("quantization", [BLOCKS, CHANNELS])
def test_weights_of_a_target_in_fp8_are_read_with_their_scales(
    quantization: dict[str, Any], tmp_path: Path
) -> None:
    make_model("Llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    stored, meant = in_fp8(tensors, quantization)
    save_file({**stored, **head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    ignored = "modules_to_not_convert" if quantization is BLOCKS else "ignore"
    config["quantization_config"] = {**quantization, ignored: ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = decoder_of(load_target(tmp_path)).layers[0]
    name = "model.layers.0.mlp.up_proj.weight"
    found = layer.mlp.up_proj.weight  # type: ignore[union-attr]
    assert stored[name].dtype == torch.float8_e4m3fn
    torch.testing.assert_close(found.float(), meant[name], rtol=0.01, atol=0.0)


@pytest.mark.parametrize(
    ("extensions", "dtype"),
    [
        (["avx2", "avx512f"], torch.float32),
        (["avx2", "avx512f", "avx512_bf16"], torch.bfloat16),
        (["avx2", "avx512f", "amx_bf16"], torch.bfloat16),
        ([], torch.bfloat16),
    ],
)
def test_states_are_computed_in_bfloat16_where_the_cpu_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, extensions: list[str], dtype: torch.dtype
) -> None:
    make_model("Llama", tmp_path)
    monkeypatch.setattr(target, "hardware", lambda: {"extensions": extensions})
    model = TargetWeights(tmp_path).load_frozen(torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
