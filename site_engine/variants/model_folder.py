"""Read what a fine-tuned model's folder has other than the base: its tensors that are not equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from site_engine.core.loader_turns import released
from site_engine.errors import VariantRefused
from site_engine.variants.tensor_files import TensorFile, read_json, refuse_not_finite

WEIGHTS, INDEX, PICKLE = "model.safetensors", "model.safetensors.index.json", "pytorch_model*.bin"
MAX_INDEX_BYTES = 64_000_000
OF_NO_ACCOUNT = frozenset(
    (
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)
"""Settings of config.json that change nothing of the logits."""


def read_own_tensors(folder: Path, model: Any, *, room_bytes: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors unlike the base's by module and parameter. Raises VariantRefused with the reason."""
    check_config(folder, model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing, own = names_by_tensor(model), dict[str, dict[str, torch.Tensor]]()
    used_bytes = 0
    for path in weight_files(folder):
        with TensorFile(path) as file:
            for name in sorted(set(file.names) - dict(model.named_buffers()).keys()):
                ours = same_parameter(path, name, file.shape(name), parameters)
                tied = [each for each in missing.pop(id(ours), []) if each not in file.names]
                with released():
                    tensor = file.read(name, ours)
                    equal = torch.equal(tensor, ours)
                    if not equal:
                        refuse_not_finite(name, tensor)
                if equal:
                    continue
                used_bytes += tensor.nbytes
                if used_bytes > room_bytes:
                    more = f"more than {used_bytes:,} bytes of its own"
                    raise VariantRefused(f"{folder} has {more}, and there is room for {room_bytes:,}")
                for each in (name, *tied):
                    module, _, parameter = each.rpartition(".")
                    own.setdefault(module, {})[parameter] = tensor
    if missing:
        first = next(iter(missing.values()))[0]
        raise VariantRefused(f"{folder} lacks {len(missing)} tensors of the base, {first} the first")
    if not own:
        raise VariantRefused(f"{folder} holds the base itself")
    return own


def same_parameter(path: Path, name: str, shape: tuple[int, ...], ours: Mapping[str, Any]) -> Any:
    """Return the base's parameter of this name and shape."""
    if name not in ours:
        raise VariantRefused(f"{path}: the base has no parameter {name}")
    if shape != tuple(ours[name].shape):
        raise VariantRefused(f"wrong base: {name} is {shape}, and {tuple(ours[name].shape)} in the base")
    return ours[name]


def check_config(folder: Path, model: Any) -> None:
    """Refuse a folder whose config.json is not the base's. Code of the folder is never run."""
    read_json(folder / "config.json")  # before transformers does, however large it is
    try:
        found = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True).to_dict()
    except (OSError, ValueError) as error:
        raise VariantRefused(f"{folder}: config.json cannot be read: {error}") from error
    base = model.config.to_dict()
    if found.get("vocab_size") != base.get("vocab_size"):
        sizes = f"{found.get('vocab_size')} tokens, the base's {base.get('vocab_size')}"
        raise VariantRefused(f"{folder}: its vocabulary is another: {sizes}")
    other = sorted(
        name
        for name in found.keys() | base.keys()
        if name not in OF_NO_ACCOUNT and found.get(name) != base.get(name)
    )
    if other:
        name = other[0]
        values = f"{name} is {found.get(name)!r}, and {base.get(name)!r} in the base"
        raise VariantRefused(f"wrong base: {folder} differs in {', '.join(other)}: {values}")


def weight_files(folder: Path) -> Iterator[Path]:
    if (folder / WEIGHTS).is_file():
        yield folder / WEIGHTS  # whatever index is beside it, as transformers does
        return
    try:
        if (folder / INDEX).is_file():
            weights = read_json(folder / INDEX, MAX_INDEX_BYTES)["weight_map"].values()
            yield from (folder / Path(name).name for name in sorted(set(weights)))
            return
    except (KeyError, AttributeError, TypeError) as error:
        raise VariantRefused(f"{folder}: {INDEX} cannot be read: {error!r}") from error
    pickled = any(folder.glob(PICKLE))
    reason = "pickles can run code and are not read" if pickled else "it is missing"
    raise VariantRefused(f"{folder}: {WEIGHTS} is needed: {reason}")


def names_by_tensor(model: Any) -> dict[int, list[str]]:
    """Return the names of each parameter; tied ones have several, of which a file may have any."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
