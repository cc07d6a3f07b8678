# SPDX-License-Identifier: Apache-2.0
"""`SpeculativeConfig` with the methods of the registry and their typed options.

The module must stay importable before any plugin has run: the engine core and the workers may
unpickle instances of the class before they load plugins.

vLLM reads the annotations of config classes as types: no `from __future__ import annotations`.
"""

import difflib
import functools
import hashlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from pydantic import Field, ValidationError, model_validator
from pydantic_core import ArgsKwargs
from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod
from vllm.config.utils import config
from vllm.logger import init_logger
from vllm.utils.hashing import safe_hash

import vllm_specplug
from vllm_specplug.drafting.head_files import read_head_files
from vllm_specplug.drafting.head_path import resolve_head_path
from vllm_specplug.drafting.method import Capability, DraftPlan, Method, MethodOptions, TargetInfo
from vllm_specplug.kernels.packed_linear import (
    has_packed_int8_products,
    packed_isa,
    packs_target,
)
from vllm_specplug.options import (
    DEFAULT_CUDA_TREE_NODES,
    DEFAULT_TREE_NODES,
    TreeOptions,
    changed_tree_options,
    check_device_options,
    check_node_budgets,
    check_num_nodes,
    check_vllm_options,
    is_number,
    option_defaults,
    option_error,
    tree_option_names,
    value_error,
)
from vllm_specplug.registry import (
    find_method,
    get_method,
    legal_method_names,
    method_names,
    misfit,
    owners_of,
)
from vllm_specplug.seams.listing_runner import CPU_ADMISSION
from vllm_specplug.seams.seam import resolve

logger = init_logger("vllm.specplug.config")

# The class that `custom_class` names. In workers it holds the method's drafter.
PROPOSER_PATH = "vllm_specplug.vllm_worker.proposer.DrafterHost"

WORKERS = {
    "cpu": "vllm_specplug.vllm_v2.worker_cpu.TreeCPUWorker",
    "cuda": "vllm_specplug.vllm_v2.worker_gpu.TreeGPUWorker",
}


def current_device() -> str:
    """Returns the type of this machine's device, as in `WORKERS`."""
    from vllm.platforms import current_platform

    return "cuda" if current_platform.is_cuda() else current_platform.device_type


@functools.cache
def _code_and_cpu() -> str:
    """Returns a digest of this package and of the CPU's instruction sets: a graph that was compiled
    earlier may call operators that have changed, and hold instructions of another machine."""
    digest = hashlib.sha256()
    for folder in sorted({*vllm_specplug.__path__, *vllm_specplug.kernels.__path__}):
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in (".py", ".so"):
                digest.update(path.read_bytes())
    cpus = Path("/proc/cpuinfo")
    for line in cpus.read_text().splitlines() if cpus.exists() else ():
        # The second name is ARM's.
        if line.startswith(("flags", "Features")):
            digest.update(line.encode())
            break
    return digest.hexdigest()


@config
class SpecPlugSpeculativeConfig(TreeOptions, SpeculativeConfig):
    """vLLM's speculative options, `TreeOptions`, and the options of one of the plugin's methods."""

    # The names that the command line offers. `_take_method` decides which are legal.
    method: Literal[(SpeculativeMethod, *legal_method_names())] | None = None  # type: ignore[valid-type]
    """The name of the speculative method: one of vLLM's own, or one of vllm-specplug's."""
    method_options: Any = None
    """`MethodOptions` of the method, made from the method's own keys; users cannot set it."""
    plugin_method: str | None = None
    """Name of the plugin's method, for which `method` is "custom_class"; users cannot set it."""
    plan: DraftPlan | None = Field(default=None, init=False)
    """The method's resolved options and head."""

    @model_validator(mode="before")
    @classmethod
    def _take_method(cls, values: Any) -> Any:
        """Moves the method's own keys into `method_options`."""
        if not isinstance(values, ArgsKwargs) or not values.kwargs:
            return values
        given = dict(values.kwargs)
        for key in ("plugin_method", "method_options"):
            if given.get(key) is not None:
                raise option_error(key, given[key], "it is not an option", f"Leave {key} out")
        name = given.get("method")
        method = find_method(name, given.get("model"))
        if method is not None and method.name != name:
            logger.info(
                "Draft head %s is one of method %r: %s", given["model"], method.name, method.summary
            )
            name = method.name
        own = () if method is None else method.option_names()
        for key in given:
            owners = owners_of(key)
            # A third-party method must not hide an option of vLLM's own methods.
            if owners and key not in own and key not in option_defaults(SpeculativeConfig):
                raise option_error(
                    key,
                    given[key],
                    f"method {name!r} does not have it, only {', '.join(owners)}",
                    f"Leave {key} out",
                )
        if method is not None:
            _refuse_booleans(given)
            taken = {key: given.pop(key) for key in own if key in given}
            given["method_options"] = method.parse_options(taken)
            given["plugin_method"] = method.name
            given["method"] = "custom_class"
        return ArgsKwargs(values.args, given)

    def __post_init__(self) -> Any:
        if self.plugin_method is None:
            changed = changed_tree_options(self)
            if changed:
                raise option_error(
                    changed[0],
                    getattr(self, changed[0]),
                    f"only the methods {', '.join(method_names())} have it, not {self.method!r}",
                    f"Leave {changed[0]} out or choose one of those methods",
                )
            return super().__post_init__()

        method = get_method(self.plugin_method)
        if self.num_speculative_tokens is None:
            on_gpu = current_device() == "cuda"
            nodes = DEFAULT_CUDA_TREE_NODES if on_gpu else DEFAULT_TREE_NODES
            self.num_speculative_tokens = max(nodes, self.tree_depth or 0)
        check_node_budgets(self)
        check_vllm_options(self, option_defaults(SpeculativeConfig), method.name)
        options: MethodOptions = self.method_options
        target = self.target_model_config
        info = TargetInfo(target.hf_text_config, target.max_model_len, target)
        try:
            self.plan = options.resolve(method.name, self, info)
        except ValueError as error:
            raise _with_owner(error, method, self.model) from None
        self.model = PROPOSER_PATH
        super().__post_init__()
        self._claim_worker()
        logger.info("%r", self)
        return self

    @property
    def head_path(self) -> str | None:
        """Folder of the draft checkpoint."""
        return None if self.plan is None else self.plan.head_path

    @property
    def draft_depth(self) -> int | None:
        """Maximum depth that the method itself drafts, without lookups."""
        return None if self.plan is None else self.plan.depth

    @property
    def target_forward_option(self) -> str | None:
        """The option, with its value, that makes drafts run the target itself; None without one."""
        return None if self.plan is None else self.plan.target_forward_option

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Auxiliary hidden-state layers of the target in vLLM's numbering: the output of decoder
        layer i is i + 1."""
        return () if self.plan is None else tuple(i + 1 for i in self.plan.hidden_layers)

    @property
    def reads_next_tokens(self) -> bool:
        """Whether the draft's context for a token depends on the next token."""
        method = self.plugin_method
        return method is not None and Capability.NEXT_TOKENS in get_method(method).needs

    def use_eagle_block_drop(self) -> bool:
        """Whether the scheduler treats the last block of a prefix hit as not cached."""
        drops_block = self.reads_next_tokens and not self.disable_eagle_block_drop
        return drops_block or super().use_eagle_block_drop()

    def _claim_worker(self) -> None:
        """Sets the worker class of the device, and refuses what it does not support."""
        from vllm.platforms import current_platform

        device = current_device()
        method = get_method(str(self.plugin_method))
        if device not in WORKERS:
            raise ValueError(
                f"Speculative method {method.name!r} does not run on device "
                f"{current_platform.device_name!r} in this release. Use a CPU build of vLLM, or "
                "one of vLLM's own chain methods."
            )
        _check_model_runner(method.name, device)
        check_device_options(self, device)
        parallel = self.target_parallel_config
        if parallel.worker_cls != "auto":
            raise ValueError(
                f"worker_cls={parallel.worker_cls!r} cannot be combined with "
                f"speculative method {self.plugin_method!r}, which brings its own worker. "
                "Leave --worker-cls out."
            )
        parallel.worker_cls = WORKERS[device]

    def needs(self) -> frozenset[Capability]:
        """Returns the capabilities that the method and its head need."""
        method = get_method(str(self.plugin_method))
        return method.needs | (self.plan.needs if self.plan else frozenset())

    def compute_hash(self) -> str:
        """Extends vLLM's hash by what changes the compiled graph: auxiliary layers, and on a CPU
        `_code_and_cpu`, the threads of its loops, and who computes the products of which weights.
        """
        parent = super().compute_hash()
        if self.plugin_method is None:
            return parent
        is_cpu = current_device() == "cpu"
        is_packed = is_cpu and packs_target(self.target_products)
        products = (packed_isa(), has_packed_int8_products()) if is_packed else None
        made_for = (_code_and_cpu(), torch.get_num_threads()) if is_cpu else None
        factors = str((parent, self.plugin_method, self.aux_layers, products, made_for))
        return safe_hash(factors.encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        if self.plugin_method is None:
            return super().__repr__()
        head = Path(self.head_path).name if self.head_path else None
        return (
            f"SpeculativeConfig(method={self.plugin_method!r}, head={head!r}, "
            f"nodes={self.num_speculative_tokens}, budget={self.tree_budget!r}, "
            f"depth={self.draft_depth}, "
            f"width={self.tree_width})"
        )


def _check_model_runner(method: str, device: str) -> None:
    """Refuses an environment that selects the V1 runner, because trees run in the V2 runner.

    Raises:
        ValueError: naming the variable.
    """
    from vllm import envs

    use_v2 = envs.VLLM_USE_V2_MODEL_RUNNER
    if use_v2 is False:
        raise ValueError(
            f"VLLM_USE_V2_MODEL_RUNNER=0 cannot be combined with speculative method {method!r}, "
            "which runs in vLLM's V2 model runner only. Unset VLLM_USE_V2_MODEL_RUNNER."
        )
    if use_v2 is None and device == "cpu" and not resolve(CPU_ADMISSION.target):
        logger.info(
            "Speculative method %r uses vLLM's V2 model runner, with CPU kernels of this package "
            "instead of Triton's. Plain vLLM uses V1 on this machine: greedy answers are the "
            "same, seeded ones are not, because the two runners draw different random numbers.",
            method,
        )


def option_names(method: str) -> tuple[str, ...]:
    """Returns all keys that `--speculative-config` may have for one of our methods."""
    internal = {"method_options", "plugin_method"}
    shared = [
        f.name for f in fields(SpecPlugSpeculativeConfig) if f.init and f.name not in internal
    ]
    return (*shared, *get_method(method).option_names())


def _declared(name: str) -> Any:
    """Returns the pydantic field of an option."""
    return vars(SpecPlugSpeculativeConfig)["__pydantic_fields__"][name]


def _refuse_booleans(given: dict[str, Any]) -> None:
    """Refuses true and false as numbers, which pydantic would read as 1 and 0."""
    for name in ("num_speculative_tokens", *tree_option_names()):
        hint = _declared(name).annotation
        if isinstance(given.get(name), bool) and is_number(hint):
            raise _wrong_value(name, given[name], "")


def _wrong_value(name: str, value: object, reason: str) -> ValueError:
    """Returns the error for an option's value; `reason` is pydantic's message."""
    if name == "method":
        return _unknown_method(value)
    if name == "num_speculative_tokens":
        try:
            check_num_nodes(value)
        except ValueError as error:
            return error
    if name in tree_option_names():
        field = _declared(name)
        return value_error(name, value, field.annotation, field.metadata, field.default)
    return option_error(name, value, reason[:1].lower() + reason[1:], f"Correct {name}")


def _unknown_method(name: object) -> ValueError:
    ours = legal_method_names()
    near = difflib.get_close_matches(str(name), [*ours, *get_args(SpeculativeMethod)], n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return option_error(
        "method",
        name,
        f"legal: {', '.join(ours)}, and vLLM's own methods, which its documentation lists",
        f"{meant}`specplug options` describes the methods of vllm-specplug",
    )


def _with_owner(error: ValueError, method: Method, model: str | None) -> ValueError:
    """Returns the error for a head that `method` refused, naming another method that owns it."""
    try:
        head = read_head_files(resolve_head_path(model, method.name))
    except ValueError:
        return error
    owner = misfit(method, head)
    # Not any mention of the name: paths may hold it, too.
    if owner is None or re.search(rf"\bmethod '?{re.escape(owner.name)}\b", str(error)):
        return error
    return option_error(
        "method",
        method.name,
        f"this head is one of method {owner.name!r}, {owner.summary}",
        f'Use "method": "{owner.name}", or a head of method {method.name!r}',
    )


def refusal_message(error: ValueError) -> str | None:
    """Returns the package's message for a refused config, without pydantic's frame.

    Returns None if vLLM refused the config.
    """
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        if error.title != SpecPlugSpeculativeConfig.__name__:
            return refusal_message(cause) if isinstance(cause, ValueError) else None
        if cause is not None:
            return str(cause)
        name = str(first["loc"][0]) if first["loc"] else "method"
        return str(_wrong_value(name, first["input"], first["msg"]))
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    origin = "" if frame is None else str(frame.tb_frame.f_globals.get("__name__"))
    return str(error) if origin.startswith("vllm_specplug.") else None


def speculative_config_class(stock: type) -> type:
    """Returns the class that `EngineArgs` builds speculative configs from. Seam: spec_config."""
    return SpecPlugSpeculativeConfig


def tree_config(vllm_config: Any) -> SpecPlugSpeculativeConfig | None:
    """Returns the speculative config of one of our methods; None if another method or none runs."""
    spec = vllm_config.speculative_config
    if isinstance(spec, SpecPlugSpeculativeConfig) and spec.plugin_method is not None:
        return spec
    return None
