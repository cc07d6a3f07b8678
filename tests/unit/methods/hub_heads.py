# SPDX-License-Identifier: Apache-2.0
"""Draft heads on model hubs by target family: ids, targets and configs, from public sources.

The pages in docs/recipes/ are made from this list (scripts/checkpoint_table.py). No head was
downloaded: an id is listed if a public page or public code names it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tests.unit.methods.assistant_tree import published as assistant
from tests.unit.methods.block import published as block
from tests.unit.methods.block.published import changed
from tests.unit.methods.block.published_heads import head_shapes, settings_of
from tests.unit.methods.eagle3_tree import published as eagle3

# Where a config is from: the head's own file, as public code or a public page repeats it, or what
# its trainer writes for that target.
HEAD, TRAINER = "the head's", "its trainer's"


@dataclass(frozen=True)
class HubHead:
    """A published head.

    Attributes:
        config: `config.json` with the head's real sizes; None if no public source shows it.
        source: `HEAD` or `TRAINER`.
        ships_embedding: whether the file has the target's embedding (a block head's: and LM head).
        latent_target: whether the target has multi-head latent attention.
        refused: why the head or its target is refused, where the config does not show it.
        remark: what a user must know.
    """

    hub_id: str
    target: str
    config: dict[str, Any] | None = None
    source: str = TRAINER
    ships_embedding: bool = False
    latent_target: bool = False
    refused: str = ""
    remark: str = ""

    @property
    def is_block_head(self) -> bool:
        """Whether the head drafts a block at once."""
        raw = self.config or {}
        return "block_size" in settings_of(raw)

    @property
    def is_assistant(self) -> bool:
        """Whether the head attends the target's own caches."""
        return "backbone_hidden_size" in (self.config or {})

    def parameters(self) -> int:
        """The number of floating-point values in the head's file."""
        assert self.config is not None
        raw = self.config
        if self.is_assistant:
            shapes = assistant.shapes_of(raw)
        elif self.is_block_head:
            shapes = head_shapes(raw, tables=self.ships_embedding)
        else:
            layer = raw.get("transformer_layer_config", raw)
            table = (layer["vocab_size"], layer["hidden_size"])
            shapes = eagle3.shapes_of(raw)
            shapes |= {"embed_tokens.weight": table} if self.ships_embedding else {}
        return sum(math.prod(shape) for shape in shapes.values())


_QWEN3_4B = {"hidden_size": 2560, "intermediate_size": 9728}
_QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288}
_LLAMA_8B = eagle3.EAGLE_LLAMA3_8B

QWEN3 = (
    HubHead(
        "z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B", changed(block.ZLAB_QWEN3_8B, **_QWEN3_4B),
        remark="trained without thinking",
    ),
    HubHead(
        "z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", block.ZLAB_QWEN3_8B,
        remark="trained without thinking",
    ),
    HubHead(
        "JetSpec/jetspec-qwen3-8b", "Qwen/Qwen3-8B",
        changed(block.ZLAB_QWEN3_8B, dflash_config={"causal_head": True}),
        remark="trained without thinking",
    ),
    HubHead(
        "deepseek-ai/dspark_qwen3_4b_block7", "Qwen/Qwen3-4B", block.DEEPSPEC_DSPARK_QWEN3_4B,
        ships_embedding=True,
    ),
    HubHead(
        "deepseek-ai/dspark_qwen3_8b_block7", "Qwen/Qwen3-8B",
        changed(block.DEEPSPEC_DSPARK_QWEN3_4B, **_QWEN3_8B), ships_embedding=True,
    ),
    HubHead("AngelSlim/Qwen3-8B_eagle3", "Qwen/Qwen3-8B", eagle3.ANGELSLIM_QWEN3_8B),
    # SpecForge d1be954 configs/qwen3-30B-eagle3.json
    HubHead(
        "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        eagle3.SPECFORGE_QWEN3_4B | {
            "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
            "num_key_value_heads": 4, "tie_word_embeddings": False,
        },
    ),
    # SpecForge 9511277 configs/qwen3-235B-A22B-eagle3.json
    HubHead(
        "lmsys/SGLang-EAGLE3-Qwen3-235B-A22B-Instruct-2507-SpecForge-Meituan",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        eagle3.SPECFORGE_QWEN3_4B | {
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 24576,
            "num_attention_heads": 64, "num_key_value_heads": 4, "tie_word_embeddings": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 46, 90], "use_aux_hidden_state": True,
            },
        },
    ),
)  # fmt: skip

_QWEN35_27B = changed(
    block.ZLAB_QWEN3_8B,
    dflash_config={"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    hidden_size=5120, intermediate_size=17408, max_position_embeddings=262144,
    num_target_layers=64, rope_theta=10000000, vocab_size=248320,
)  # fmt: skip
QWEN35 = (
    HubHead("z-lab/Qwen3.5-27B-DFlash", "Qwen/Qwen3.5-27B", _QWEN35_27B, HEAD),
    HubHead(
        "z-lab/Qwen3.6-27B-DFlash", "Qwen/Qwen3.6-27B",
        changed(
            _QWEN35_27B, layer_types=["sliding_attention"] * 4 + ["full_attention"],
            sliding_window=2048, use_sliding_window=True,
        ),
        HEAD,
    ),
    HubHead(
        "JetSpec/jetspec-Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B",
        changed(
            _QWEN35_27B,
            dflash_config={"causal_head": True, "target_layer_ids": [1, 10, 19, 28, 37]},
            hidden_size=2048, intermediate_size=6144, num_hidden_layers=8, num_key_value_heads=4,
            num_target_layers=40, layer_types=["full_attention"] * 8,
        ),
        HEAD,
    ),
    HubHead(
        "z-lab/Qwen3.8-27B-DFlash2", "Qwen/Qwen3.8-27B", block.ZLAB_DFLASH2_QWEN38_27B, HEAD
    ),
)  # fmt: skip

LLAMA3 = (
    HubHead(
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "meta-llama/Llama-3.1-8B-Instruct", _LLAMA_8B,
        remark="a `pytorch_model.bin`, read without running code",
    ),
    HubHead(
        "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge", "meta-llama/Llama-3.1-8B-Instruct",
        _LLAMA_8B | {"architectures": ["LlamaForCausalLMEagle3"]},
    ),
    # The layer and the flags are those of nm-testing/EAGLE3-LLaMA3.1-Instruct-8B-converted.
    HubHead(
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", "meta-llama/Llama-3.1-8B-Instruct",
        eagle3.SPECULATORS_GEMMA4_31B | {
            "eagle_aux_hidden_state_layer_ids": None,
            "transformer_layer_config": {
                "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
                "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 2048,
                "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 1,
                "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None,
                "rope_theta": 10000.0, "vocab_size": 128256,
            },
        },
        ships_embedding=True,
    ),
    # SpecForge 82b62f6 configs/llama3-70B-ealge3.json
    HubHead(
        "lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge", "meta-llama/Llama-3.3-70B-Instruct",
        _LLAMA_8B | {
            "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 128, "hidden_size": 8192,
            "intermediate_size": 28672, "max_position_embeddings": 4096, "num_attention_heads": 64,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 4096, "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
        },
    ),
)  # fmt: skip

GPT_OSS = (
    # The layer is that of nm-testing/for_testing_gptoss20b_spec_eagle3.
    HubHead(
        "RedHatAI/gpt-oss-20b-speculator.eagle3", "openai/gpt-oss-20b",
        eagle3.SPECULATORS_GEMMA4_31B | {
            "eagle_aux_hidden_state_layer_ids": None,
            "transformer_layer_config": {
                "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
                "intermediate_size": 2880, "max_position_embeddings": 131072, "model_type": "llama",
                "num_attention_heads": 64, "num_hidden_layers": 1, "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
                "vocab_size": 201088,
            },
        },
        ships_embedding=True,
    ),
    # A port's notes list these fields but not the heads, which are the target's, and which give the
    # published size of the file, 1.46 GiB. The head has YaRN; its factor is the target's.
    HubHead(
        "z-lab/gpt-oss-20b-DFlash", "openai/gpt-oss-20b",
        changed(
            block.ZLAB_QWEN3_8B, block_size=8,
            dflash_config={"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
            head_dim=64, hidden_size=2880, intermediate_size=7680,
            layer_types=["full_attention"] * 8, max_position_embeddings=131072,
            num_attention_heads=64, num_hidden_layers=8, num_target_layers=24, rms_norm_eps=1e-05,
            rope_scaling={
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
            },
            rope_theta=150000, vocab_size=201088,
        ),
        HEAD,
    ),
    HubHead(
        "amazon/gpt-oss-120b-p-eagle", "openai/gpt-oss-120b",
        remark="P-EAGLE of 4 layers; not tested; `specplug inspect` tells whether it loads",
    ),
    # SpecForge configs/gpt-oss-120B-eagle3.json
    HubHead(
        "lmsys/EAGLE3-gpt-oss-120b-bf16", "openai/gpt-oss-120b",
        _LLAMA_8B | {
            "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 64, "hidden_size": 2880,
            "intermediate_size": 17280, "max_position_embeddings": 4096, "num_attention_heads": 64,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 33]},
            "torch_dtype": "bfloat16", "vocab_size": 201088,
        },
    ),
)  # fmt: skip

GEMMA = (
    HubHead(
        "RedHatAI/gemma-4-31B-it-speculator.eagle3", "google/gemma-4-31B-it",
        eagle3.SPECULATORS_GEMMA4_31B, HEAD, ships_embedding=True,
    ),
    *(
        HubHead(
            f"google/gemma-4-{size}-it-assistant", f"google/gemma-4-{size}-it", config, HEAD,
        )
        for size, config in (
            ("31B", assistant.GEMMA4_31B), ("26B-A4B", assistant.GEMMA4_26B_A4B),
            ("12B", assistant.GEMMA4_12B), ("E4B", assistant.GEMMA4_E4B),
            ("E2B", assistant.GEMMA4_E2B),
        )
    ),
    HubHead(
        "deepseek-ai/dspark_gemma4_12b_block7", "google/gemma-4-12B-it",
        refused="its layers are Gemma 4's, not Qwen3's; vLLM's own `dspark` drafts chains with it",
    ),
)  # fmt: skip

MISTRAL = (
    HubHead(
        "mistralai/Mistral-Medium-3.5-128B-EAGLE", "mistralai/Mistral-Medium-3.5-128B",
        refused="EAGLE, not EAGLE-3; vLLM's own `eagle` drafts chains with it",
    ),
    HubHead(
        "mistralai/Mistral-Large-3-675B-Instruct-2512-Eagle",
        "mistralai/Mistral-Large-3-675B-Instruct-2512", latent_target=True,
        refused="EAGLE, not EAGLE-3; vLLM's own `eagle` drafts chains with it",
    ),
)  # fmt: skip

_KIMI_K2_EAGLE3 = eagle3.SPECFORGE_QWEN3_4B | {
    "bos_token_id": 163584, "eos_token_id": 163585, "head_dim": 128, "hidden_size": 7168,
    "intermediate_size": 18432, "max_position_embeddings": 131072, "max_window_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 64, "tie_word_embeddings": False,
    "vocab_size": 163840,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True,
    },
}  # fmt: skip
LATENT = (
    HubHead(
        "AQ-MedAI/Kimi-K2-Instruct-eagle3", "moonshotai/Kimi-K2-Instruct", _KIMI_K2_EAGLE3, HEAD,
        latent_target=True,
    ),
    HubHead(
        "AQ-MedAI/Kimi-K25-eagle3", "moonshotai/Kimi-K2.5",
        _KIMI_K2_EAGLE3 | {"max_position_embeddings": 262144}, HEAD, latent_target=True,
        remark="not compared: the target's vision wrapper",
    ),
    HubHead(
        "lightseekorg/kimi-k2.5-eagle3-mla", "moonshotai/Kimi-K2.5", latent_target=True,
        refused="its layer has MLA; vLLM's own `eagle3` drafts chains with it",
    ),
    HubHead(
        "lightseekorg/kimi-k3-dflash2", "moonshotai/Kimi-K3", block.LIGHTSEEK_DFLASH2_KIMI_K3, HEAD,
        latent_target=True,
    ),
    HubHead(
        "thoughtworks/GLM-4.7-Flash-Eagle3", "zai-org/GLM-4.7-Flash", latent_target=True,
        remark="its config was not seen: ask `specplug inspect`",
    ),
    HubHead(
        "incoai/GLM-5.3-Flash-DFlash2", "zai-org/GLM-5.3-Flash", block.INCO_DFLASH2_GLM53_FLASH,
        HEAD, refused="the target has Kimi Delta Attention and sparse attention by an index",
    ),
)  # fmt: skip

# By the name of the page in docs/recipes/.
RECIPES = {
    "qwen3": QWEN3,
    "qwen3_5": QWEN35,
    "llama3": LLAMA3,
    "gpt_oss": GPT_OSS,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "latent_attention": LATENT,
}
