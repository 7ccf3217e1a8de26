"""The variants of one base: loaded and certified on any thread, published between two steps, removed at once.

Tensors that are equal are stored once: those of the base are used in place, and versions of a module that
several variants own are shared by their content. What nobody refers to any more is freed.
"""

from __future__ import annotations

import copy
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
import transformers

from site_engine.core.adapter_slots import AdapterSlots
from site_engine.core.chain import Block, BlockKind, Chain, Variant
from site_engine.errors import VariantRefused
from site_engine.model.cpu_optimize import optimize_for_cpu
from site_engine.model.loader import LoadedModel
from site_engine.model.pausing import PauseBeforeOperations
from site_engine.variants.certify import Certifier
from site_engine.variants.changes import Change, LoadedVariant
from site_engine.variants.grouped import group_module
from site_engine.variants.hub import local_folder
from site_engine.variants.model_folder import read_own_tensors
from site_engine.variants.peft_folder import Adapter, modules_of, read_adapter
from site_engine.variants.tensor_files import content_hash, read_json

MAX_VARIANTS = 1024
LAYER = re.compile(r"\.(\d+)\.")


class VariantStore:
    """`slots` bound the adapters that run at once. `prepare` gets a variant whose factors are in host memory,
    returns it ready for the engine's own kernels, and raises VariantRefused for one that they do not compute;
    None: factors go to the device.
    """

    def __init__(
        self,
        model: LoadedModel,
        slots: AdapterSlots | None = None,
        prepare: Callable[[LoadedVariant], LoadedVariant] | None = None,
    ) -> None:
        self.slots = slots
        self.certifier = Certifier(model)
        self._prepare = prepare or self._on_device
        self._model = model
        self._modules = modules_of(model.model)
        self._served: dict[str, LoadedVariant] = {}
        self._versions: WeakValueDictionary[str, Any] = WeakValueDictionary()  # of modules, by content
        self._loading = threading.Lock()
        self._certified: dict[str, None] = {}  # fingerprints, the newest last: they are not certified again

    @property
    def served(self) -> Mapping[str, LoadedVariant]:
        """The variants that take requests, by id."""
        return self._served

    def load(self, variant: Variant) -> Callable[[], Chain]:
        """Load, check and certify a variant; return the function that publishes it, between two steps.

        May be called on any thread. Raises VariantRefused with the reason, as the returned function does.
        """
        with self._loading, PauseBeforeOperations():
            self._check_name(variant.id)
            loaded = self._load(variant)
            if variant.fingerprint not in ("", loaded.fingerprint):
                raise VariantRefused(f"the files of {variant.id} have changed; remove it and add it anew")
            loaded = self._prepare(loaded)
            for name in loaded.changes:
                group_module(name, self._modules[name])
            if loaded.fingerprint not in self._certified:
                self.certifier.certify(loaded)
                self._certified[loaded.fingerprint] = None
                if len(self._certified) > MAX_VARIANTS:
                    del self._certified[next(iter(self._certified))]

        def publish() -> Chain:
            self._check_name(variant.id)
            self._served[variant.id] = loaded
            return loaded.chain

        return publish

    def remove(self, variant_id: str) -> None:
        """Take no more requests for a variant; it stays in memory while requests refer to it."""
        if variant_id not in self._served:
            raise VariantRefused(f"{variant_id} is not served here")
        removed = self._served.pop(variant_id)
        if self.slots is not None:
            self.slots.forget(removed)

    def _check_name(self, variant_id: str) -> None:
        if not variant_id or variant_id == self._model.name or variant_id in self._served:
            raise VariantRefused(f"the name {variant_id!r} is in use or empty")
        if len(self._served) >= MAX_VARIANTS:
            raise VariantRefused(f"{MAX_VARIANTS} variants are served, which is the limit")

    def _load(self, variant: Variant) -> LoadedVariant:
        source, room_bytes = variant.adapter or variant.model, free_bytes() // 2
        folder = local_folder(source, room_bytes if variant.adapter else None)
        if bool(variant.adapter) == bool(variant.model) or not folder.is_dir():
            raise VariantRefused(f"{variant.id} needs the folder of an adapter or of a model, got {source!r}")
        try:
            if variant.adapter:
                model = self._model
                found = read_adapter(folder, model.model, model.layers, room_bytes=room_bytes)
            else:
                if self._model.device.type == "cuda":
                    room_bytes = min(room_bytes, torch.cuda.mem_get_info(self._model.device)[0])
                found = Adapter(own=read_own_tensors(folder, self._model.model, room_bytes=room_bytes))
            return self._loaded(variant, folder, found)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise VariantRefused(f"{folder} does not fit the memory: {error}") from error

    def _loaded(self, variant: Variant, folder: Path, found: Adapter) -> LoadedVariant:
        changes: dict[str, Change] = {}
        owned: dict[str, list[str]] = {}  # contents by module
        for name, tensors in found.own.items():
            named = {each: content_hash(tensor) for each, tensor in sorted(tensors.items())}
            changes[name] = self._own(name, self._modules.get(name), tensors, named)
            owned[name] = [f"{each} {content}" for each, content in named.items()]
        for name, product in found.low_rank.items():
            changes[name] = changes.get(name, Change())._replace(low_rank=product)
        eos, tokenizer = end_tokens(folder, self._model), own_tokenizer(folder, self._model)
        if eos != self._model.eos_token_ids:
            tokenizer = tokenizer or str(folder)
        blocks = tuple(own_blocks(found, owned))
        fingerprint = hashlib.sha256(" ".join(block.id for block in blocks).encode()).hexdigest()[:32]
        size = sum(block.bytes for block in blocks)
        chain = Chain(variant.id, fingerprint, blocks, size, eos, tokenizer)
        rank = max((product.down.shape[0] for product in found.low_rank.values()), default=0)
        virtual = tuple(each.to(self._model.device) for each in found.virtual)
        return LoadedVariant(chain, changes, rank, virtual)

    def _own(
        self, name: str, module: Any, tensors: Mapping[str, torch.Tensor], hashes: Mapping[str, str]
    ) -> Change:
        """Return the change by a module's own tensors: a difference of biases, or a version of the module."""
        for each, tensor in tensors.items():
            ours = None if module is None else module._parameters.get(each)
            if ours is None:
                raise VariantRefused(f"the base has no parameter {name}.{each}")
            if ours.shape != tensor.shape:
                vocabulary = ours.shape[0] == self._model.vocab_size != tensor.shape[0]
                reason = "its vocabulary is another" if vocabulary else "wrong base"
                sizes = f"{tuple(tensor.shape)}, and {tuple(ours.shape)} in the base"
                raise VariantRefused(f"{reason}: {name}.{each} is {sizes}")
        tensors = {each: tensor.to(self._model.device) for each, tensor in tensors.items()}
        if list(tensors) == ["bias"] and "weight" in module._parameters:
            return Change(bias=tensors["bias"] - module.bias.detach())
        key = f"{name} {sorted(hashes.items())}"
        version = self._versions.get(key)
        if version is None:
            version = copy.copy(module)
            version.__dict__.pop("forward", None)
            own = {each: torch.nn.Parameter(tensor, requires_grad=False) for each, tensor in tensors.items()}
            version._parameters = {**module._parameters, **own}
            self._versions[key] = version = optimize_for_cpu(version)
        return Change(own=version)

    def _on_device(self, variant: LoadedVariant) -> LoadedVariant:
        """Copy the factors of a variant to the device, where no slots hold them."""
        device = self._model.device
        changes = {
            name: change if change.low_rank is None else change._replace(low_rank=change.low_rank.to(device))
            for name, change in variant.changes.items()
        }
        return replace(variant, changes=changes)


def free_bytes() -> int:
    """Return the free memory of the host, of which a new variant may own half."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def own_blocks(found: Adapter, contents: Mapping[str, list[str]]) -> Iterator[Block]:
    """Yield the blocks that a variant has beside its base: layers, embedding and head by content, adapter."""
    owned: dict[tuple[BlockKind, int], list[str]] = {}
    for name in sorted(contents):
        owned.setdefault(_place(name), []).append(name)
    for (kind, layer), names in owned.items():
        digest = hashlib.sha256(" ".join(f"{name} {contents[name]}" for name in names).encode()).hexdigest()
        size = sum(tensor.nbytes for name in names for tensor in found.own[name].values())
        yield Block(digest, kind, layer, layer + (kind is BlockKind.LAYERS), size)
    if products := found.low_rank:
        factors = [
            f"{name} {content_hash(each.down)} {content_hash(each.up)} {each.scale}"
            for name, each in sorted(products.items())
        ]
        layers = [_place(name)[1] for name in products]
        size = sum(each.down.nbytes + each.up.nbytes for each in products.values())
        digest = hashlib.sha256(" ".join(factors).encode()).hexdigest()
        yield Block(digest, BlockKind.ADAPTER, min(layers), max(layers) + 1, size)
    if found.virtual:
        contents_of = " ".join(map(content_hash, found.virtual))
        digest = hashlib.sha256(f"virtual {contents_of}".encode()).hexdigest()
        size = sum(each.nbytes for each in found.virtual)
        yield Block(digest, BlockKind.ADAPTER, 0, len(found.virtual) // 2, size)


def _place(module: str) -> tuple[BlockKind, int]:
    """Return the kind of block that a module belongs to, and its layer."""
    layer = LAYER.search(module)
    if layer is not None:
        return BlockKind.LAYERS, int(layer[1])
    embeds = re.search(r"embed|wte|wpe", module)
    return (BlockKind.EMBEDDING if embeds else BlockKind.HEAD), 0


def end_tokens(folder: Path, model: LoadedModel) -> tuple[int, ...]:
    """Return the end tokens that a folder's generation_config.json names, else the base's.

    Ids outside the vocabulary end nothing, as of a base.
    """
    path = folder / "generation_config.json"
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise VariantRefused(f"{path} cannot be read: it holds no settings")
    named = found.get("eos_token_id")
    if named is None:
        return model.eos_token_ids
    ids = tuple(named) if isinstance(named, list) else (named,)
    if wrong := [each for each in ids if type(each) is not int]:
        told = ", ".join(map(repr, wrong[:8]))
        raise VariantRefused(f"{path}: eos_token_id names {told}; ids here are 0 to {model.vocab_size - 1}")
    return tuple(each for each in ids if 0 <= each < model.vocab_size)


def own_tokenizer(folder: Path, model: LoadedModel) -> str:
    """Return the folder if its tokenizer has another template than the base's, else nothing.

    Raises VariantRefused for another vocabulary: text, grammars and logits are the base's, token by token.
    """
    if model.tokenizer is None or not (folder / "tokenizer_config.json").is_file():
        return ""
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise VariantRefused(f"{folder}: its tokenizer cannot be read: {error}") from error
    if found.get_vocab() != model.tokenizer.get_vocab():
        sizes = f"{len(found)} tokens, the base's {len(model.tokenizer)}"
        raise VariantRefused(f"{folder}: its vocabulary is another: {sizes}")
    same = found.chat_template == model.tokenizer.chat_template or not found.chat_template
    return "" if same else str(folder)
