"""Read a folder as peft writes it: LoRA products, biases, whole modules and prefix tuning, each checked
against the base.

What is not known to be computed exactly is refused: every setting of adapter_config.json is either understood
here or at its neutral value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from pathlib import Path
from typing import Any

import torch

from site_engine.core.loader_turns import pause
from site_engine.errors import VariantRefused
from site_engine.model.kv_cache import LayerShape
from site_engine.variants import prefix_tuning
from site_engine.variants.changes import LowRank
from site_engine.variants.prefix_tuning import virtual_keys_values
from site_engine.variants.tensor_files import TensorFile, read_json

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_RANK = 64
TENSORS_OF_A_MODULE = 4  # two of a product, a weight and a bias
PREFIX = "base_model.model."
UNDERSTOOD = frozenset(
    (
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    )
)
"""Settings that are followed, or change nothing of what an adapter computes."""
KINDS = {"LORA": UNDERSTOOD, "PREFIX_TUNING": prefix_tuning.UNDERSTOOD}
KEEPS_BASE = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights with which training started from the base's own weights."""
NAME_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.){1,200}\$?")
"""Other expressions can take hours to compare with a name, and the engine would wait for them."""
LOW_RANK = re.compile(r"(?P<module>.+)\.lora_(?:embedding_)?(?P<part>[AB])(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class Adapter:
    """`low_rank` by module; `own` by module and parameter: tensors in the place of the base's.

    `virtual`: keys, then values, of virtual tokens in each layer.
    """

    low_rank: dict[str, LowRank] = field(default_factory=dict)
    own: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    virtual: tuple[torch.Tensor, ...] = ()


def read_adapter(folder: Path, model: Any, layers: Sequence[LayerShape], *, room_bytes: int) -> Adapter:
    """Read and check an adapter of `model`, of these layers: tensors in host memory, with its data type.

    Raises VariantRefused with the reason.
    """
    settings = read_settings(folder)
    if not (folder / WEIGHTS).is_file():
        pickled = f"{PICKLE} is a pickle, which can run code" if (folder / PICKLE).exists() else "is missing"
        raise VariantRefused(f"{folder}: {WEIGHTS} is needed: {pickled}")
    like = torch.empty(0, dtype=next(model.parameters()).dtype)
    modules = modules_of(model)
    most = TENSORS_OF_A_MODULE * len(modules)
    with TensorFile(folder / WEIGHTS, room_bytes=room_bytes) as file:
        if len(file.names) > most:
            count = f"{len(file.names):,} tensors, and an adapter of this base at most {most}"
            raise VariantRefused(f"{folder}: {WEIGHTS} has {count}")
        tensors = file.read_all(like)
    if settings["peft_type"] == "PREFIX_TUNING":
        return Adapter(virtual=virtual_keys_values(folder, tensors, settings, layers))
    adapter, halves = Adapter(), dict[str, dict[str, torch.Tensor]]()
    for name, tensor in tensors.items():
        pause()
        path = name.removeprefix(PREFIX)
        if found := LOW_RANK.fullmatch(path):
            halves.setdefault(found["module"], {})[found["part"]] = tensor
        elif "lora" in path:
            kind = "DoRA is not served" if "magnitude" in path else "it is of an unknown kind"
            raise VariantRefused(f"{folder}: {name}: {kind}")
        else:
            module, _, parameter_name = path.rpartition(".")
            module = module.removesuffix(".base_layer").removesuffix(".modules_to_save")
            adapter.own.setdefault(module, {})[parameter_name] = tensor
    for module, parts in halves.items():
        adapter.low_rank[module] = checked_product(module, parts, modules, settings)
    check_complete(folder, settings, adapter, modules)
    return adapter


def modules_of(model: Any) -> dict[str, Any]:
    """Return the modules of a model by name."""
    modules = {}
    for name, module in model.named_modules():
        modules[name] = module
        pause()
    return modules


def read_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / CONFIG)
    if not isinstance(settings, dict):
        raise VariantRefused(f"{folder}: {CONFIG} holds no settings")
    kind = settings.get("peft_type")
    if not isinstance(kind, str) or kind not in KINDS:
        served = " and ".join(KINDS)
        raise VariantRefused(f"{folder}: adapters of kind {kind or 'unknown'} are not served, {served} are")
    if settings.get("use_dora"):
        raise VariantRefused(f"{folder}: DoRA is not served: its norms depend on the merged weight")
    odd = sorted(name for name, value in settings.items() if value and name not in KINDS[kind])
    if odd:
        raise VariantRefused(f"{folder}: {CONFIG} sets {', '.join(odd)}, which is not served")
    if kind == "LORA" and settings.get("init_lora_weights") not in KEEPS_BASE:
        start = settings["init_lora_weights"]
        raise VariantRefused(f"{folder}: init_lora_weights {start!r} trains beside a changed base")
    for name, form in (("modules_to_save", list), ("alpha_pattern", dict)):
        if settings.get(name) and not isinstance(settings[name], form):
            raise VariantRefused(
                f"{folder}: {name} is a {type(settings[name]).__name__}, not a {form.__name__}"
            )
    for pattern in settings.get("alpha_pattern") or ():
        if not NAME_PATTERN.fullmatch(pattern):
            raise VariantRefused(
                f"{folder}: alpha_pattern has {pattern[:200]!r}, and only names of modules are served"
            )
    return settings


def checked_product(
    name: str, parts: Mapping[str, torch.Tensor], modules: Mapping[str, Any], settings: Mapping[str, Any]
) -> LowRank:
    """Check the two halves of a LoRA product against the module that it adapts."""
    pause()
    module = modules.get(name)
    if module is None:
        raise VariantRefused(f"the base has no module {name}")
    if len(parts) < 2:
        raise VariantRefused(f"{name} has only half of its product: lora_{next(iter(parts))}")
    weight = getattr(module, "weight", None)
    kind = type(module).__name__
    if weight is None or weight.dim() != 2 or kind not in {"Linear", "Embedding", "Conv1D"}:
        raise VariantRefused(f"{name} is a {kind}, which takes no product of low rank")
    down, up = parts["A"], parts["B"]
    size = weight.shape if kind == "Linear" else weight.shape[::-1]
    if down.dim() != 2 or up.dim() != 2 or (up.shape[0], down.shape[1]) != tuple(size):
        given = f"{tuple(up.shape)} x {tuple(down.shape)}"
        raise VariantRefused(f"wrong base: {name} is {tuple(size)} here, its adapter {given}")
    rank = down.shape[0]
    if up.shape[1] != rank or not 0 < rank <= MAX_RANK:
        raise VariantRefused(f"{name} has rank {rank} and {up.shape[1]}; both must agree, at most {MAX_RANK}")
    alpha = by_pattern(settings.get("alpha_pattern"), name, settings.get("lora_alpha", 8))
    if not isinstance(alpha, int | float) or not isfinite(alpha):
        raise VariantRefused(f"lora_alpha of {name} is {alpha!r}, not a number")
    return LowRank(down, up, alpha / (sqrt(rank) if settings.get("use_rslora") else rank))


def by_pattern(patterns: Any, name: str, default: Any) -> Any:
    """Return the number of the first pattern that matches the end of a module's name, as peft does."""
    for pattern, number in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return number
    return default


def check_complete(
    folder: Path, settings: Mapping[str, Any], adapter: Adapter, modules: Mapping[str, Any]
) -> None:
    """Refuse an adapter whose file lacks what its settings promise: peft would serve the base there."""
    missing = sorted(name for name in targets(settings, modules) if name not in adapter.low_rank)
    if missing:
        several = f"{len(missing)} modules that it targets, {missing[0]} the first"
        raise VariantRefused(f"{folder}: {WEIGHTS} has nothing for {several}")
    for saved in settings.get("modules_to_save") or ():
        if not any(name == saved or name.endswith(f".{saved}") for name in adapter.own):
            raise VariantRefused(f"{folder}: {WEIGHTS} lacks {saved} of modules_to_save")
    if not adapter.low_rank and not adapter.own:
        raise VariantRefused(f"{folder}: {WEIGHTS} holds nothing")


def targets(settings: Mapping[str, Any], modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules that target_modules names outright; other ways of naming are taken as they come."""
    named, layers = settings.get("target_modules"), settings.get("layers_to_transform")
    if not isinstance(named, list) or settings.get("exclude_modules"):
        return
    if layers is not None:
        wanted = {str(each) for each in (layers if isinstance(layers, list) else [layers])}
    for name in modules:
        pause()
        if not any(name == each or name.endswith(f".{each}") for each in named):
            continue
        if layers is None or not wanted.isdisjoint(name.split(".")):
            yield name
