"""Plan the memory of a site's device from the headers of its files alone: no weight is read.

Does not tell which layers of a fine-tuned model equal the base's, which takes their contents: what it owns is
the most that it can be. Nor whether an engine computes a variant exactly: that is certified when it loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from site_engine.config import HUB, SiteConfig, VariantConfig
from site_engine.core.adapter_slots import RANK_CLASSES
from site_engine.core.step_memory import kv_room, step_bytes
from site_engine.core.tensor_split import FAMILIES, part_of, part_shape, sizes_of
from site_engine.engine.loading import slots_on
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ConfigError, ModelNotSupported, VariantRefused
from site_engine.variants.projections import (
    ADAPTER_SLOTS,
    EMBEDDINGS,
    MAX_VIRTUAL_TOKENS,
    MODULES,
    SERVED_ON_GPU,
    Size,
    largest_rank,
    slot_bytes,
    slot_rank,
)

GPU_MIB = {"A100": 81_920, "H100": 81_559, "H200": 143_771, "L4": 23_034}
"""Memory as nvidia-smi shows it."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_HEADER_BYTES = 100_000_000
UNBOUNDED_TOKENS = 2**40
"""Context of a model that names none."""
SENSELESS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Errors of a file that holds something else than it should."""
TIED = frozenset(("lm_head.weight",))
"""May be left out of a file whose embedding is the head, too."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""By the names of tensors."""
GPUS = re.compile(r"(?:(\d+)x)?(?:([A-Za-z]\w*)|(\d+(?:\.\d+)?)GiB)")


class Gpus(NamedTuple):
    """`devices` of `bytes` of memory each."""

    devices: int
    name: str
    bytes: int


class AdapterSlots(NamedTuple):
    """The slots of an engine on a GPU. `modules` is None on a CPU, which serves every kind of variant; empty
    for a base of another family, whose variants a GPU does not serve.
    """

    bytes: int = 0
    rank: int = 0
    modules: frozenset[str] | None = None


class Base(NamedTuple):
    """What the files of a base say. `refusal`: why it will not be served, empty if nothing speaks against it.

    `item_bytes`: of one number. `bytes_of_rank`: of the weights on one device. `step_bytes`: that iterations
    need beside weights, keys and values. `most_tokens`: of keys and values that an engine makes room for.
    """

    folder: Path
    item_bytes: int
    ranks: int
    shapes: Shapes
    bytes_of_rank: int
    kv_bytes_per_token: int
    step_bytes: int
    most_tokens: int
    slots: AdapterSlots
    refusal: str


class PlannedVariant(NamedTuple):
    """`own_bytes`: of an adapter, 0 of LoRA that waits in host memory for a slot; of a fine-tuned model the
    most that it can need.
    """

    id: str
    kind: str
    own_bytes: int


class PlannedDevice(NamedTuple):
    """One device that the configuration names. `left_bytes`: for activations, CUDA graphs and variants."""

    device: str
    weights_bytes: int
    kv_bytes: int
    left_bytes: int


class Plan(NamedTuple):
    """Bytes on one device. `refused`: why variants, by id, or the base, by its folder, will not be served;
    why a device, by its name.

    `slots_bytes`: of the places of adapters on a GPU, whatever is in them. `devices`: each holds all of this.
    `ranks`: devices over which one base is split.
    """

    site: str
    gpus: Gpus
    shared_bytes: int
    slots_bytes: int
    variants: list[PlannedVariant]
    kv_bytes_per_token: int
    kv_tokens: int
    refused: dict[str, str]
    devices: list[PlannedDevice]
    ranks: int

    @property
    def own_bytes(self) -> int:
        return sum(each.own_bytes for each in self.variants)

    @property
    def used_bytes(self) -> int:
        kv_bytes = self.kv_tokens * self.kv_bytes_per_token
        return self.shared_bytes + self.slots_bytes + self.own_bytes + kv_bytes


def parse_gpus(text: str) -> Gpus:
    """Parse such as H200, 2xH200 or 1x24GiB. Raises ConfigError."""
    found = GPUS.fullmatch(text)
    if found is None or (found[2] and found[2] not in GPU_MIB) or found[1] == "0":
        raise ConfigError(f"gpus cannot be {text!r}: COUNTxNAME of {', '.join(GPU_MIB)}, or COUNTxSIZEGiB")
    size = GPU_MIB[found[2]] * 2**20 if found[2] else int(float(found[3]) * 2**30)
    return Gpus(int(found[1] or 1), found[2] or f"{found[3]} GiB", size)


def plan_groups(configs: Iterable[SiteConfig], gpus: Gpus) -> list[Plan]:
    """Plan the groups of a process, each with what those before it leave. Raises ConfigError."""
    plans: list[Plan] = []
    for config in configs:
        if on_cpu(config) and gpus.name in GPU_MIB:
            raise ConfigError("device is cpu: --gpus 64GiB would be the memory of its machine")
        left = gpus._replace(bytes=gpus.bytes - sum(each.used_bytes for each in plans))
        plans.append(plan(config, left)._replace(gpus=gpus))
    return plans


def plan(config: SiteConfig, gpus: Gpus) -> Plan:
    """Plan one group. Raises ConfigError where its base cannot be read."""
    if config.engine != "native":
        raise ConfigError(f"{config.site} is in front of a server, and a server has no weights to plan here")
    base = read_base(config)
    folder, shared, slots = str(base.folder), base.bytes_of_rank, base.slots.bytes
    per_token = base.kv_bytes_per_token
    refused = {folder: base.refusal} if base.refusal else {}
    left = max(0, gpus.bytes - shared - slots)
    kv_bytes = left // 4 if on_cpu(config) else kv_room(left, base.step_bytes)
    tokens = config.kv_tokens or min(kv_bytes // per_token, base.most_tokens)
    kv_bytes = tokens * per_token
    room = left - kv_bytes
    if room < 0 or tokens < config.page_size:
        refused[folder] = (
            f"the base has {shared:,} bytes and {tokens:,} KV tokens {kv_bytes:,}; "
            f"a device has {gpus.bytes:,}"
        )
        if slots:
            refused[folder] += f", of which slots for adapters take {slots:,}"
    served = planned_variants(config, base, tokens, room, refused)
    own_bytes = sum(each.own_bytes for each in served)
    devices = [
        PlannedDevice(name, shared + slots + own_bytes, kv_bytes, max(0, room - own_bytes))
        for name in names_of_devices(config, gpus, refused)
    ]
    return Plan(config.site, gpus, shared, slots, served, per_token, tokens, refused, devices, base.ranks)


def read_base(config: SiteConfig) -> Base:
    """Read what the files of a base say. Raises ConfigError where they cannot be read."""
    folder, item = Path(config.model).expanduser(), ITEM_BYTES.get(config.dtype, 4 if on_cpu(config) else 2)
    ranks = max(len(each.split("+")) for each in config.devices or (config.device,))
    refusal = ""
    try:
        shapes = dict(tensors(folder))
        per_token = kv_bytes_per_token(folder, item, ranks)
        needed = bytes_of_steps(config, folder, item, ranks)
        most_tokens = tokens_of_contexts(config, folder)
        slots = slots_for(config, shapes, item)
        own = shapes_of_rank(shapes, configuration(folder), ranks)
    except VariantRefused as exc:
        raise ConfigError(f"model {folder} cannot be planned: {exc}") from exc
    except ModelNotSupported as exc:
        own, refusal = shapes, str(exc)
    of_rank = sum(map(prod, own.values())) * item
    return Base(folder, item, ranks, shapes, of_rank, per_token, needed, most_tokens, slots, refusal)


def planned_variants(
    config: SiteConfig, base: Base, tokens: int, room: int, refused: dict[str, str]
) -> list[PlannedVariant]:
    """Return the variants that fit the `room` bytes beside the base and so many KV tokens; note in `refused`
    why the others do not.
    """
    served: list[PlannedVariant] = []
    for variant in config.variants:
        try:
            one = planned(variant, base)
            if one.own_bytes > room:
                raise VariantRefused(
                    f"it needs {one.own_bytes:,} bytes, and {max(0, room):,} are left beside "
                    f"the base and {tokens:,} KV tokens; kv_tokens may be fewer"
                )
        except VariantRefused as exc:
            refused[variant.id] = str(exc)
        else:
            served.append(one)
            room -= one.own_bytes
    return served


def on_cpu(config: SiteConfig) -> bool:
    return {*(config.devices or (config.device,))} == {"cpu"}


def names_of_devices(config: SiteConfig, gpus: Gpus, refused: dict[str, str]) -> list[str]:
    """Return the devices that the configuration names; note in `refused` those beyond what there is."""
    named = [name for each in config.devices or (config.device,) for name in each.split("+")]
    lacking = [each for each in named if each != "cpu"][gpus.devices :]
    for device in lacking:
        refused[device] = f"the configuration names {len(named)} devices, and there are {gpus.devices}"
    return [name for name in named if name not in lacking]


def shapes_of_rank(base: Shapes, config: Mapping[str, Any], ranks: int) -> Shapes:
    """Return the shapes of what one rank keeps of each tensor. Raises ModelNotSupported."""
    if ranks == 1:
        return base
    try:
        sizes = sizes_of(config, ranks)
    except SENSELESS as exc:
        raise VariantRefused(f"config.json cannot be read: {exc!r}") from exc
    return {name: part_shape(part_of(name, shape, sizes, 0, ranks), shape) for name, shape in base.items()}


def slots_for(config: SiteConfig, base: Shapes, item: int) -> AdapterSlots:
    """Return the slots that an engine makes for the variants of a site, which orders may bring, too."""
    if on_cpu(config):
        return AdapterSlots()
    families = configuration(Path(config.model).expanduser()).get("architectures") or [""]
    if not (config.variants or config.models_from or config.training) or families[0] not in FAMILIES:
        return AdapterSlots(modules=frozenset())
    layers = 1 + max((int(each[1]) for name in base if (each := LAYER.match(name))), default=-1)
    per_layer = [
        {module: base.get(f"model.layers.{layer}.{module}.weight") for module in chain(*MODULES.values())}
        for layer in range(layers)
    ]
    if not per_layer or any(each is None or len(each) != 2 for each in per_layer[0].values()):
        return AdapterSlots(modules=frozenset())
    first: Any = per_layer[0]
    sizes = [
        Size(
            first[each[0]][1],
            tuple(first[module][0] for module in each),
            f"model.layers.0.{each[0]}.bias" in base,
        )
        for each in MODULES.values()
    ]
    rank = largest_rank(config)
    known = {f"model.layers.{n}.{module}" for n, one in enumerate(per_layer) for module in one}
    known |= {f"{module}.bias" for module in known} & base.keys()
    return AdapterSlots(
        ADAPTER_SLOTS * slot_bytes(sizes, layers, rank, item), slot_rank(rank), frozenset(known)
    )


def check_gpu(variant: VariantConfig, own: Shapes, slots: AdapterSlots) -> None:
    """Refuse what an engine on a GPU does not serve. Raises VariantRefused."""
    if slots.modules is None:
        return
    if not slots.modules:
        raise VariantRefused(
            f"engines on a GPU serve variants of {', '.join(FAMILIES)}, which the base is not"
        )
    if own.keys() == {EMBEDDINGS}:
        return
    what = ""
    for name, shape in own.items() if variant.adapter else ():
        module = name.removeprefix("base_model.model.").partition(".lora_")[0].replace(".base_layer", "")
        if module not in slots.modules:
            what = f"it changes {module}"
        elif ".lora_A." in name and shape[0] > slots.rank:
            raise VariantRefused(f"{module} has rank {shape[0]}; slots here have {slots.rank}")
    if what:
        raise VariantRefused(f"{what}; {SERVED_ON_GPU}")


def planned(variant: VariantConfig, base: Base) -> PlannedVariant:
    """Check a variant's shapes against the base's, and its kind. Raises VariantRefused."""
    if (variant.adapter or variant.model).startswith(HUB):
        raise VariantRefused("it is on the Hub, and plans read the headers of files that are here")
    folder = Path(variant.adapter or variant.model).expanduser()
    own = dict(tensors(folder, "adapter_model" if variant.adapter else "model"))
    if own.keys() == {EMBEDDINGS}:
        check_prefix(own[EMBEDDINGS], base.kv_bytes_per_token // base.item_bytes)
    elif variant.adapter:
        check_adapter(own, base.shapes)
    else:
        check_same_shapes(own, base.shapes)
    check_gpu(variant, own, base.slots)
    if variant.adapter and base.slots.bytes and own.keys() != {EMBEDDINGS}:
        return PlannedVariant(variant.id, "adapter", 0)
    size = sum(map(prod, own.values())) * base.item_bytes
    return PlannedVariant(variant.id, "adapter" if variant.adapter else "model", size)


def check_adapter(own: Shapes, base: Shapes) -> None:
    most = RANK_CLASSES[-1]
    for name, shape in own.items():
        if "lora_magnitude" in name:
            raise VariantRefused("DoRA is not served: its norms depend on the merged weight")
        module, found, _ = name.removeprefix("base_model.model.").partition(".lora_A.")
        if not found:
            continue
        up = own.get(name.replace(".lora_A.", ".lora_B."))
        weight = base.get(f"{module}.weight")
        if weight is None or up is None:
            raise VariantRefused(f"the base has no module {module}" if up else f"{module} has half a product")
        if weight not in ((up[0], shape[1]), (shape[1], up[0])):  # some families transpose theirs
            raise VariantRefused(f"wrong base: {module} is {weight}, its adapter {up} x {shape}")
        if shape[0] > most:
            raise VariantRefused(f"{module} has rank {shape[0]}; the limit is {most}")


def check_prefix(shape: tuple[int, ...], numbers: int) -> None:
    """Check the shape of prefix tuning; a token has so many numbers of keys and values in the base."""
    if len(shape) != 2 or shape[1] != numbers or shape[0] > MAX_VIRTUAL_TOKENS:
        raise VariantRefused(
            f"wrong base: {EMBEDDINGS} is {shape}; the base needs {numbers} numbers a token, of at most "
            f"{MAX_VIRTUAL_TOKENS} tokens"
        )


def check_same_shapes(own: Shapes, base: Shapes) -> None:
    for name, shape in own.items():
        if name not in base and name not in TIED:
            raise VariantRefused(f"the base has no parameter {name}")
        if shape != base.get(name, shape):
            raise VariantRefused(f"wrong base: {name} is {shape}, and {base[name]} in the base")
    if missing := base.keys() - own.keys() - TIED:
        raise VariantRefused(f"it lacks {len(missing)} tensors of the base, such as {min(missing)}")


def tensors(folder: Path, stem: str = "model") -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes in a folder's safetensors files. Raises VariantRefused."""
    files = [*folder.glob(f"{stem}.safetensors"), *sorted(folder.glob(f"{stem}-*-of-*.safetensors"))]
    if not files:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        reason = "pickles can run code and are not read" if pickled else "there is none"
        raise VariantRefused(f"{folder} needs {stem}.safetensors: {reason}")
    for path in files:
        for name, (shape, end_bytes) in header(path).items():
            if end_bytes > path.stat().st_size:
                raise VariantRefused(
                    f"{path} is cut: {name} ends at byte {end_bytes:,} of {path.stat().st_size:,}"
                )
            yield name, shape


def header(path: Path) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return each tensor's shape, and the byte of the file at which it ends. Raises VariantRefused."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise VariantRefused(f"{path} is no safetensors file: a header of {size:,} bytes")
            found: dict[str, Any] = json.loads(file.read(size))
        read = {
            name: (tuple(map(int, each["shape"])), 8 + size + int(each["data_offsets"][1]))
            for name, each in found.items()
            if name != "__metadata__"
        }
        if any(min(shape, default=0) < 0 for shape, _ in read.values()):
            raise ValueError("a negative size")
    except (OSError, *SENSELESS) as exc:
        raise VariantRefused(f"{path} cannot be read: {exc!r}") from exc
    return read


def kv_bytes_per_token(folder: Path, item: int, ranks: int) -> int:
    """Return the bytes of a token's keys and values in all layers, on one rank. Raises VariantRefused."""
    config = configuration(folder)
    try:
        found: dict[str, Any] = config.get("text_config") or config
        heads = int(found["num_attention_heads"])
        kv_heads = int(found.get("num_key_value_heads") or heads)
        head_dim = int(found.get("head_dim") or int(found["hidden_size"]) // heads)
        return max(1, 2 * int(found["num_hidden_layers"]) * max(1, kv_heads // ranks) * head_dim * item)
    except SENSELESS as exc:
        raise VariantRefused(f"config.json cannot be read: {exc!r}") from exc


def bytes_of_steps(config: SiteConfig, folder: Path, item: int, ranks: int) -> int:
    """Return the bytes that iterations need beside weights, keys and values. Raises VariantRefused."""
    found = configuration(folder)
    rows = slots_on("cuda", config)
    tokens = EngineSettings(slots=rows, token_budget=config.token_budget).token_budget_on("cuda")
    try:
        return step_bytes(found.get("text_config") or found, tokens, rows, item, ranks)
    except SENSELESS as exc:
        raise VariantRefused(f"config.json cannot be read: {exc!r}") from exc


def tokens_of_contexts(config: SiteConfig, folder: Path) -> int:
    """Return the tokens of as many contexts as requests run at once: an engine makes room for no more.

    Raises VariantRefused.
    """
    found = configuration(folder)
    try:
        context = int((found.get("text_config") or found).get("max_position_embeddings") or UNBOUNDED_TOKENS)
    except SENSELESS as exc:
        raise VariantRefused(f"config.json cannot be read: {exc!r}") from exc
    return slots_on("cpu" if on_cpu(config) else "cuda", config) * context


def configuration(folder: Path) -> dict[str, Any]:
    """Return a model's config.json. Raises VariantRefused."""
    try:
        found: dict[str, Any] = dict(json.loads((folder / "config.json").read_text("utf-8")))
    except (OSError, *SENSELESS) as exc:
        raise VariantRefused(f"config.json cannot be read: {exc!r}") from exc
    return found
