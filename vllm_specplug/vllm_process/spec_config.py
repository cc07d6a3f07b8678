# SPDX-License-Identifier: Apache-2.0
"""`SpeculativeConfig` with our methods and their typed options.

Must stay importable by dotted path before any plugin has run: the engine core and the
workers unpickle instances of this class, possibly before they load plugins.

vLLM reads the annotations of config classes as types: no `from __future__ import annotations`.
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.utils.hashing import safe_hash

from vllm_specplug.methods.tokenswift.options import check_self_draft_options
from vllm_specplug.options import (
    DEFAULT_LEVELS,
    DEFAULT_TREE_NODES,
    TreeOptions,
    changed_tree_options,
    check_kernel,
    check_level_options,
    check_local_options,
    check_request_limit,
    check_tree_budget,
    check_tree_depth,
    check_tree_shape,
    check_vllm_options,
    option_error,
)
from vllm_specplug.registry import METHOD_NAMES, get_method

logger = init_logger("vllm.specplug.config")

# What `custom_class` is told to instantiate; the worker replaces it by the method's drafter.
PROPOSER_PATH = "vllm_specplug.vllm_v1.proposer.TreeProposer"

_PLUGIN_METHODS = Literal["jetspec", "ddtree", "dels", "longspec", "tokenswift", "ngram_tree"]
assert set(_PLUGIN_METHODS.__args__) == set(METHOD_NAMES)  # type: ignore[attr-defined]


@config
class SpecPlugSpeculativeConfig(TreeOptions, SpeculativeConfig):
    """vLLM's speculative options, our methods, and the options of `TreeOptions`."""

    method: Literal[SpeculativeMethod, _PLUGIN_METHODS] | None = None  # type: ignore[valid-type]
    """The name of the speculative method to use; vLLM's own, or one of vllm-specplug's."""
    plugin_method: str | None = Field(default=None, init=False)
    """Set when the method is one of ours; `method` then reads "custom_class"."""
    head_path: str | None = Field(default=None, init=False)
    """Directory of the draft checkpoint, resolved."""
    draft_depth: int | None = Field(default=None, init=False)
    """Depth trees are drafted to."""
    aux_layers: tuple[int, ...] = Field(default=(), init=False)
    """Auxiliary hidden-state layers of the target, in vLLM's numbering (output of decoder
    layer i is i + 1)."""
    local_options: Any = Field(default=None, init=False)
    """`config.LocalHeadOptions` of a method that fuses a local head."""
    self_draft: Any = Field(default=None, init=False)
    """`tokenswift_options.SelfDraftOptions` of a method that drafts with the target itself."""

    def __post_init__(self) -> Any:
        if self.method not in METHOD_NAMES:
            changed = changed_tree_options(self)
            if changed:
                raise option_error(
                    changed[0],
                    getattr(self, changed[0]),
                    f"only the methods {', '.join(METHOD_NAMES)} have it, not {self.method!r}",
                    f"Leave {changed[0]} out or choose one of those methods",
                )
            return super().__post_init__()

        method = get_method(str(self.method))
        if self.num_speculative_tokens is None:
            self.num_speculative_tokens = max(DEFAULT_TREE_NODES, self.tree_depth or 0)
        check_tree_shape(self.num_speculative_tokens, self.tree_depth, self.tree_width)
        check_tree_budget(self.tree_budget, self.num_speculative_tokens)
        check_request_limit(self.max_request_budget, self.num_speculative_tokens)
        check_vllm_options(self, _vllm_defaults(), method.name)
        if self.ngram_topk is None:
            self.ngram_topk = method.default_ngram_topk
        check_local_options(self, method.name, uses_local_head=method.uses_local_head)
        check_level_options(self, method.name, drafts_by_level=method.drafts_by_level)
        if not method.self_drafts:
            check_self_draft_options(self, method.name, self_drafts=False)
        if method.self_drafts:
            self._resolve_self_draft(method.name)
        elif method.drafts_by_level:
            self._resolve_level_head(method.name)
        elif method.needs_head:
            self._resolve_head(method.name)
        else:
            self._check_headless(method.name)
        self.plugin_method = method.name
        self.method = "custom_class"
        self.model = PROPOSER_PATH
        super().__post_init__()
        self._claim_worker()
        logger.info("%r", self)
        return self

    def _resolve_head(self, method: str) -> None:
        # Imported here: reading a head needs torch modules that plain vLLM never loads.
        from vllm_specplug.methods.block.checkpoint import inspect_block_head

        path = resolve_head_path(self.model, method)
        head = inspect_block_head(path, self.target_model_config.hf_text_config, causal=self.causal)
        self.head_path = str(path)
        self.draft_depth = check_tree_depth(self.tree_depth, head.block_size)
        if self.num_speculative_tokens < self.draft_depth:
            self.draft_depth = self.num_speculative_tokens
        self.aux_layers = tuple(i + 1 for i in head.target_layer_ids)
        if get_method(method).uses_local_head:
            from vllm_specplug.methods.dels.resolve import resolve_local_options

            self.local_options = resolve_local_options(
                self, head.num_draft_tokens, self.target_model_config
            )

    def _resolve_level_head(self, method: str) -> None:
        from vllm_specplug.methods.longspec.checkpoint import inspect_longspec_head
        from vllm_specplug.methods.longspec.config import check_window

        path = resolve_head_path(self.model, method)
        head = inspect_longspec_head(path, self.target_model_config.hf_text_config)
        window = head.window_size if self.window_size is None else self.window_size
        max_model_len = self.target_model_config.max_model_len
        if self.window_size is not None:
            check_window("speculative_config.window_size", window, max_model_len)
        ranks = self.target_parallel_config.tensor_parallel_size
        if ranks > 1:
            raise ValueError(
                f"tensor_parallel_size={ranks} cannot be combined with speculative method "
                f"{method!r}, which reads all KV heads of the target's last layer on one rank. "
                "Use --tensor-parallel-size 1, or method jetspec."
            )
        self.head_path = str(path)
        self.window_size = min(window, max_model_len)
        depth = self.tree_depth or (len(self.beam_widths) if self.beam_widths else DEFAULT_LEVELS)
        self.draft_depth = min(depth, self.num_speculative_tokens)

    def _resolve_self_draft(self, method: str) -> None:
        from vllm_specplug.methods.tokenswift.head import inspect_heads

        if self.causal is not None:
            raise option_error(
                "causal", self.causal, f"method {method!r} has no draft block", "Leave causal out"
            )
        path = resolve_head_path(self.model, method)
        text_config = self.target_model_config.hf_text_config
        heads = inspect_heads(path, text_config)
        self.self_draft = check_self_draft_options(
            self, method, self_drafts=True, num_heads=heads.medusa_heads
        )
        self.head_path = str(path)
        gamma = self.self_draft.gamma
        self.draft_depth = min(self.tree_depth or gamma, gamma, self.num_speculative_tokens)
        self.aux_layers = (text_config.num_hidden_layers,)

    def _check_headless(self, method: str) -> None:
        for name, legal in (("model", None), ("causal", None), ("tree_builder", "best_first")):
            if getattr(self, name) != legal:
                raise option_error(
                    name,
                    getattr(self, name),
                    f"method {method!r} has no draft head",
                    f"Leave {name} out, or choose a method with a head",
                )
        if not self.ngram_topk:
            raise option_error(
                "ngram_topk",
                self.ngram_topk,
                f"method {method!r} drafts by n-grams only, so 1..16",
                "Leave ngram_topk out or give at least 1",
            )
        self.draft_depth = self.tree_depth or self.num_speculative_tokens

    def _claim_worker(self) -> None:
        """Our worker builds the model runner with the tree mixin."""
        from vllm.platforms import current_platform

        workers = {
            "cpu": "vllm_specplug.vllm_v1.worker_cpu.TreeCPUWorker",
            "cuda": "vllm_specplug.vllm_v1.worker_gpu.TreeGPUWorker",
        }
        device = "cuda" if current_platform.is_cuda() else current_platform.device_type
        method = get_method(str(self.plugin_method))
        if device not in workers or (device == "cuda" and not method.runs_on_cuda):
            raise ValueError(
                f"Speculative method {self.plugin_method!r} does not run on device "
                f"{current_platform.device_name!r} in this release. Use a CPU build of vLLM, "
                "or a chain method of vLLM's own."
            )
        check_kernel(self.tree_kernel, device, os.environ.get("TRITON_INTERPRET") == "1")
        parallel = self.target_parallel_config
        if parallel.worker_cls != "auto":
            raise ValueError(
                f"worker_cls={parallel.worker_cls!r} cannot be combined with "
                f"speculative method {self.plugin_method!r}, which brings its own worker. "
                "Leave --worker-cls out."
            )
        parallel.worker_cls = workers[device]

    def compute_hash(self) -> str:
        """The parent's hash, plus the auxiliary layers: they change the compiled graph."""
        parent = super().compute_hash()
        if self.plugin_method is None:
            return parent
        factors = str((parent, self.plugin_method, self.aux_layers))
        return safe_hash(factors.encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        if self.plugin_method is None:
            return super().__repr__()
        head = Path(self.head_path).name if self.head_path else None
        return (
            f"SpeculativeConfig(method={self.plugin_method!r}, head={head!r}, "
            f"nodes={self.num_speculative_tokens}, budget={self.tree_budget!r}, "
            f"depth={self.draft_depth}, "
            f"width={self.tree_width}, builder={self.tree_builder!r})"
        )


def _vllm_defaults() -> dict[str, Any]:
    """Defaults of vLLM's own speculative options by name."""
    defaults = {}
    for field in fields(SpeculativeConfig):
        default: Any = field.default
        defaults[field.name] = default.default if hasattr(default, "default") else default
    return defaults


def resolve_head_path(model: str | None, method: str) -> Path:
    """Folder of the draft head: a local path, or a hub id that is in the local cache.

    Nothing is downloaded while serving.

    Raises:
        ValueError: when there is no such folder and no cached copy.
    """
    if not model:
        raise option_error(
            "model",
            model,
            f"method {method!r} needs a draft head",
            'Give its folder, e.g. "model": "/path/to/head"',
        )
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    remedy = "Give the folder that holds config.json and model.safetensors"
    if model.count("/") == 1 and not path.is_absolute():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return Path(snapshot_download(model, local_files_only=True))
        except (LocalEntryNotFoundError, ValueError, OSError):
            remedy = f"Download it first: hf download {model}"
    raise option_error("model", model, "there is no such folder", remedy)


def speculative_config_class(stock: type) -> type:
    """The class `EngineArgs` builds speculative configs from. Seam: spec_config."""
    return SpecPlugSpeculativeConfig


def tree_config(vllm_config: Any) -> SpecPlugSpeculativeConfig | None:
    """Our speculative config of `vllm_config`, or None when another method (or none) runs."""
    spec = vllm_config.speculative_config
    if isinstance(spec, SpecPlugSpeculativeConfig) and spec.plugin_method is not None:
        return spec
    return None
