"""The peer of a model that is split over devices: transformers with a `device_map`, layer after layer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

STD = 0.02


def placed_model(config: Any, devices: Sequence[str], dtype: torch.dtype) -> Any:
    """Return a model with random weights, drawn on the devices that hold its layers in equal parts."""
    from accelerate import dispatch_model  # type: ignore[import-untyped]

    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    layers = config.num_hidden_layers
    places = {f"model.layers.{at}": devices[at * len(devices) // layers] for at in range(layers)}
    places |= {"model.embed_tokens": devices[0], "model.rotary_emb": devices[0]}
    places |= {"model.norm": devices[-1], "lm_head": devices[-1]}
    for name, device in places.items():
        module = model.get_submodule(name).to_empty(device=device)
        for parameter in module.parameters():
            parameter.data.normal_(std=STD) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(devices[0])  # computed, not drawn
    return dispatch_model(model.eval(), places, main_device=devices[0], force_hooks=True)


def step_ms(
    config: Any, devices: Sequence[str], dtype: torch.dtype, prompts: tuple[int, int], steps: int
) -> float:
    """Return the milliseconds of a token of `generate` for prompts [rows, tokens] at once."""
    model = placed_model(config, devices, dtype)
    ids = torch.randint(10, config.vocab_size, prompts, device=devices[0])
    took: list[float] = []
    with torch.inference_mode():
        for tokens in (8, 8, 8 + steps):
            began_s = time.perf_counter()
            model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
            took.append(time.perf_counter() - began_s)
    return (took[2] - took[1]) / steps * 1e3
