"""Plan the memory of a site's device from the headers of its files alone: no weight is read.

Does not tell which layers of a fine-tuned model equal the base's, which takes their contents: what it owns is
the most that it can be. Nor whether an engine computes a variant exactly: that is certified when it loads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from site_engine.config import SiteConfig, VariantConfig
from site_engine.core.adapter_slots import RANK_CLASSES
from site_engine.errors import ConfigError, VariantRefused

GPU_MIB = {"A100": 81_920, "H100": 81_559, "H200": 143_771, "L4": 23_034}
"""Memory as nvidia-smi shows it."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_SHARE = 0.85
"""Of the memory that the weights leave; the rest is for activations, CUDA graphs and variants."""
MAX_HEADER_BYTES = 100_000_000
SENSELESS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""Errors of a file that holds something else than it should."""
TIED = frozenset(("lm_head.weight",))
"""May be left out of a file whose embedding is the head, too."""
GPUS = re.compile(r"(?:(\d+)x)?(?:([A-Za-z]\w*)|(\d+(?:\.\d+)?)GiB)")


class Gpus(NamedTuple):
    """`devices` of `bytes` of memory each."""

    devices: int
    name: str
    bytes: int


class PlannedVariant(NamedTuple):
    """`own_bytes`: of an adapter; of a fine-tuned model the most that it can need."""

    id: str
    kind: str
    own_bytes: int


class Plan(NamedTuple):
    """Bytes on one device. `refused`: why variants, by id, or the base, by its folder, will not be served."""

    gpus: Gpus
    shared_bytes: int
    variants: list[PlannedVariant]
    kv_bytes_per_token: int
    kv_tokens: int
    refused: dict[str, str]

    @property
    def own_bytes(self) -> int:
        return sum(each.own_bytes for each in self.variants)


def parse_gpus(text: str) -> Gpus:
    """Parse such as H200, 2xH200 or 1x24GiB. Raises ConfigError."""
    found = GPUS.fullmatch(text)
    if found is None or (found[2] and found[2] not in GPU_MIB) or found[1] == "0":
        raise ConfigError(f"gpus cannot be {text!r}: COUNTxNAME of {', '.join(GPU_MIB)}, or COUNTxSIZEGiB")
    size = GPU_MIB[found[2]] * 2**20 if found[2] else int(float(found[3]) * 2**30)
    return Gpus(int(found[1] or 1), found[2] or f"{found[3]} GiB", size)


def plan(config: SiteConfig, gpus: Gpus) -> Plan:
    """Plan the group of a site. Raises ConfigError where its base cannot be read."""
    if config.engine != "native":
        raise ConfigError(f"{config.site} is in front of a server, and a server has no weights to plan here")
    folder, item = Path(config.model).expanduser(), ITEM_BYTES.get(config.dtype, 2)
    try:
        base = dict(tensors(folder))
        per_token = kv_bytes_per_token(folder, item)
    except VariantRefused as exc:
        raise ConfigError(f"model {folder} cannot be planned: {exc}") from exc
    shared = sum(map(prod, base.values())) * item
    left = max(0, gpus.bytes - shared)
    tokens = config.kv_tokens or int(left * KV_SHARE) // per_token
    room = left - tokens * per_token
    refused = {}
    if room < 0 or tokens < config.page_size:
        refused[str(folder)] = (
            f"the base has {shared:,} bytes and {tokens:,} KV tokens {tokens * per_token:,}; "
            f"a device has {gpus.bytes:,}"
        )
    served = []
    for variant in config.variants:
        try:
            one = planned(variant, base, item)
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
    return Plan(gpus, shared, served, per_token, tokens, refused)


def planned(variant: VariantConfig, base: Mapping[str, tuple[int, ...]], item: int) -> PlannedVariant:
    """Check a variant's shapes against the base's. Raises VariantRefused."""
    folder = Path(variant.adapter or variant.model).expanduser()
    own = dict(tensors(folder, "adapter_model" if variant.adapter else "model"))
    if variant.adapter:
        check_adapter(own, base)
    else:
        check_same_shapes(own, base)
    size = sum(map(prod, own.values())) * item
    return PlannedVariant(variant.id, "adapter" if variant.adapter else "model", size)


def check_adapter(own: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> None:
    most = RANK_CLASSES[-1]
    for name, shape in own.items():
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


def check_same_shapes(own: Mapping[str, tuple[int, ...]], base: Mapping[str, tuple[int, ...]]) -> None:
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


def kv_bytes_per_token(folder: Path, item: int) -> int:
    """Return the bytes of a token's keys and values in all layers. Raises VariantRefused."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        found: dict[str, Any] = config.get("text_config") or config
        heads = int(found["num_attention_heads"])
        kv_heads = int(found.get("num_key_value_heads") or heads)
        head_dim = int(found.get("head_dim") or int(found["hidden_size"]) // heads)
        return max(1, 2 * int(found["num_hidden_layers"]) * kv_heads * head_dim * item)
    except (OSError, *SENSELESS) as exc:
        raise VariantRefused(f"config.json cannot be read: {exc!r}") from exc
