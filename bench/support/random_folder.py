"""A model's folder with random weights. Layers may be the same bytes of the file: few to write, and a device
still has all of them in its memory. Of such a file only readers that go by the offsets of tensors take any.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers

LAYER = re.compile(r"\.layers\.(\d+)\.")
TYPES = {torch.bfloat16: "BF16", torch.float32: "F32"}
STD = 0.02


def random_folder(
    folder: Path, config: Any, tokenizer: Any, dtype: torch.dtype, *, layers_alike: bool
) -> int:
    """Write a folder and return the bytes of the tensors that a model has."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    header: dict[str, Any] = {}
    written: list[torch.Size] = []
    places: dict[str, list[int]] = {}
    end = whole = 0
    for name, parameter in model.named_parameters():
        source = LAYER.sub(".layers.0.", name) if layers_alike else name
        size = parameter.numel() * dtype.itemsize
        whole += size
        if source not in places:
            places[source], end = [end, end + size], end + size
            written.append(parameter.shape)
        header[name] = {"dtype": TYPES[dtype], "shape": parameter.shape, "data_offsets": places[source]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    generator = torch.Generator().manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape in written:
            numbers = torch.ones(shape)
            if len(shape) > 1:
                numbers.normal_(std=STD, generator=generator)
            file.write(numbers.to(dtype).view(torch.uint8).numpy().tobytes())
    return whole
