# SPDX-License-Identifier: Apache-2.0
"""The parts of a target that training needs: config, embedding, LM head, decoder layers and norms.

They are found by structure, not by name, in any model that transformers loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vllm_specplug.provenance import hardware

# Fields of a config that give a head its shape, by transformers' common names.
_COMMON = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
           "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps")  # fmt: skip
# Other names of `intermediate_size`.
_MLP_WIDTHS = ("ffn_dim", "n_inner", "ffn_hidden_size")


@dataclass(frozen=True)
class TargetTables:
    """embed_tokens [V, H], lm_head [V, H] and the gains of the final norm [H], frozen, with the
    `target_crc`."""

    embed_tokens: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    crc: str


@dataclass(frozen=True)
class Decoder:
    """The part of a target from token ids to final hidden states."""

    body: nn.Module
    layers: nn.ModuleList
    final_norm: nn.Module


class TargetWeights:
    """A target's folder.

    Raises:
        ValueError: if it has no config or no weights in safetensors, or transformers does not
            know the model.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise ValueError(
                f"target {str(folder)!r} has no config.json; give the folder of a "
                "Hugging Face model"
            )
        if not any(self.folder.glob("*.safetensors")):
            raise ValueError(
                f"target {str(folder)!r} has no *.safetensors; training reads weights "
                "from safetensors only"
            )
        self.config = _text_config(self.folder)

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end a turn, from the config."""
        ids = self.config.get("eos_token_id")
        return ids if isinstance(ids, list) else [] if ids is None else [ids]

    def load(self) -> nn.Module:
        """Loads the target in its own dtype on the CPU. The result is not cached."""
        return load_target(self.folder)

    def load_frozen(self, device: torch.device, processes: int = 1) -> nn.Module:
        """Loads the target on a device, to read its states; several `processes` share its layers.

        It runs in `forward_dtype`.
        """
        model = load_target(self.folder, forward_dtype(device)).requires_grad_(False)
        if processes > 1:
            shard_layers(model, device, processes)
        return model.to(device)

    def tables(self) -> TargetTables:
        """Returns the frozen tables of the draft head.

        Raises:
            ValueError: for a target without an embedding, an LM head or a list of layers.
        """
        model: Any = self.load()
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
        hidden = self.config["hidden_size"]
        for name, part in (("an embedding", embed), ("an LM head", head)):
            shape = tuple(getattr(getattr(part, "weight", None), "shape", ()))
            if len(shape) != 2 or shape[1] != hidden:
                raise ValueError(
                    f"target {str(self.folder)!r} ({type(model).__name__}) has {name} of shape "
                    f"{shape}, legal: [vocab_size, {hidden}], read from and written to by the "
                    "decoder layers themselves; heads cannot be trained for this target"
                )
        norm = norm_gains(decoder_of(model).final_norm)
        rows, scores = embed.weight.detach().clone(), head.weight.detach().clone()
        return TargetTables(rows, scores, norm, target_crc(model))


def forward_dtype(device: torch.device) -> torch.dtype:
    """Returns the dtype of forwards: bfloat16, or float32 on a CPU without bfloat16 instructions,
    where products in bfloat16 take several times as long."""
    known = set(hardware()["extensions"] if device.type == "cpu" else ())
    is_slow = "avx2" in known and known.isdisjoint(("avx512_bf16", "amx_bf16"))
    return torch.float32 if is_slow else torch.bfloat16


def target_crc(model: Any) -> str:
    """Returns a checksum that distinguishes targets of one shape. It covers the final norm's weight
    and the first rows of the embedding, in bfloat16 as for features."""
    norm: Any = decoder_of(model).final_norm
    crc, parts = 0, (norm.weight, model.get_input_embeddings().weight[:16])
    for part in parts:
        values = part.detach().to("cpu", torch.bfloat16).contiguous()
        crc = crc32(values.view(torch.uint16).numpy().tobytes(), crc)
    return f"{crc:08x}"


def shard_layers(model: nn.Module, device: torch.device, processes: int) -> None:
    """Divides the weights of a frozen target's decoder layers among all processes (FSDP2), which
    gather one layer at a time in each forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes,))
    for layer in decoder_of(model).layers:
        # Each layer is an FSDP root, which by default keeps its weights after a forward.
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)


def local_bytes(model: nn.Module) -> int:
    """Returns the bytes of a model's weights on this process."""
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(part.numel() * part.element_size() for part in parts)


def load_target(folder: str | Path, dtype: torch.dtype | str = "auto") -> nn.Module:
    """Loads a target with its LM head by transformers, for inference, on the CPU.

    Raises:
        ValueError: if transformers has no such model.
    """
    config = _config_of(Path(folder))
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") in ("fp8", "compressed-tensors"):
        # New heads copy weights, which would be read without their scales.
        quantization["dequantize"] = True
    model = _model_class(config, folder).from_pretrained(
        folder, config=config, dtype=dtype, local_files_only=True
    )
    return model.eval()


def _model_class(config: Any, folder: str | Path) -> Any:
    """Returns the class that loads a target.

    Raises:
        ValueError: if transformers has no such model.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    # A model with images is not among the models of text.
    classes = (
        (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
        (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, transformers.AutoModelForImageTextToText),
    )
    known = [made for names, made in classes if config.model_type in names]
    if not known:
        raise ValueError(
            f"target {str(folder)!r} is a {type(config).__name__.removesuffix('Config')} model, "
            f"legal: one that transformers {transformers.__version__} loads with "
            "AutoModelForCausalLM or AutoModelForImageTextToText; heads cannot be trained for it"
        )
    return known[0]


def decoder_of(model: nn.Module) -> Decoder:
    """Returns the text decoder of a model: the module that has the embedding, exactly one list of
    `num_hidden_layers` layers, and norms, the last of which is the final norm.

    Raises:
        ValueError: if there is none.
    """
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    count, hidden = int(text.num_hidden_layers), int(text.hidden_size)
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    for body in model.modules():
        lists = [m for m in body.children() if isinstance(m, nn.ModuleList) and len(m) == count]
        if len(lists) != 1 or not any(m is embedding for m in body.modules()):
            continue
        norms = _norms(body, hidden)
        if norms:
            return Decoder(body, lists[0], norms[-1])
    raise ValueError(
        f"{type(model).__name__} has no one list of {count} decoder layers with a norm behind it, "
        "legal: a decoder of layers that are run one after the other; heads cannot be trained for "
        "this target"
    )


def layer_norms(layer: nn.Module, hidden_size: int) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns the norms before a decoder layer's attention and before its MLP; None without one."""
    norms = _norms(layer, hidden_size)
    # A layer may also have a norm after its attention, in between.
    before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
    if before_mlp is None and len(norms) > 1:
        before_mlp = norms[1]
    return (norms[0] if norms else None), before_mlp


def norm_gains(norm: nn.Module) -> torch.Tensor:
    """Returns the factors of a norm, float32 [H]. They are not its weight if the norm adds 1 to it
    or has a bias."""
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    size = weight.shape[0]
    # The mean is 0 and the root mean square 1, so that normalisation changes nothing.
    signs = torch.ones(size).index_fill_(0, torch.arange(1, size, 2), -1.0)
    x = signs.to(weight)[None]
    with torch.no_grad():
        return (0.5 * signs * (norm(x) - norm(-x))[0].float()).detach()


def _norms(module: nn.Module, hidden_size: int) -> list[nn.Module]:
    """Returns the children of a module that are norms of hidden states, in order."""
    return [
        part
        for part in module.children()
        if isinstance(getattr(part, "weight", None), torch.Tensor)
        and part.weight.shape == (hidden_size,)
    ]


def _config_of(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"target {str(folder)!r} has a config.json that transformers does not read ({error}); "
            "training needs a model that transformers loads, without code of its own"
        ) from error


def _text_config(folder: Path) -> dict[str, Any]:
    """Returns the config of the text decoder, with the common names of fields added."""
    config = _config_of(folder).get_text_config()
    fields = config.to_dict()
    for name in _COMMON:
        if getattr(config, name, None) is not None:
            fields.setdefault(name, getattr(config, name))
    if not fields.get("intermediate_size"):
        widths = [fields[name] for name in _MLP_WIDTHS if fields.get(name)]
        fields["intermediate_size"] = widths[0] if widths else 4 * fields["hidden_size"]
    return dict(fields)
