"""Load one rank's share of a model: a model of the same class with fewer heads and a narrower MLP.

Reads only the rank's part of the files. Its output and down projections compute partial sums, which hooks
complete over the group.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from site_engine.core.tensor_split import BY_ROWS, Sizes, part_of, sizes_of
from site_engine.errors import ModelNotSupported
from site_engine.model.tensor_group import TensorGroup
from site_engine.model.weights import read_parts

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_shard(source: str, group: TensorGroup, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the share of a folder's model that a rank computes. Raises ModelNotSupported, OSError."""
    folder = Path(source)
    if not folder.is_dir():
        raise ModelNotSupported(
            f"a model on {group.size} devices has to be in a folder, which {source!r} is not"
        )
    config = transformers.AutoConfig.from_pretrained(source)
    sizes = sizes_of(config.to_dict(), group.size)
    with torch.device("meta"):
        shapes = {
            name: tuple(each.shape)
            for name, each in transformers.AutoModelForCausalLM.from_config(config).named_parameters()
        }
        model = transformers.AutoModelForCausalLM.from_config(
            rank_config(config, sizes, group.size), dtype=dtype
        )
    parts = {name: part_of(name, shape, sizes, group.rank, group.size) for name, shape in shapes.items()}
    weights = {name: each.to(dtype) for name, each in read_parts(folder, parts, device).items()}
    if config.tie_word_embeddings and EMBEDDING in weights:
        weights[HEAD] = weights[EMBEDDING]
    complete(model, weights, group)
    if (folder / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return model


def rank_config(config: Any, sizes: Sizes, ranks: int) -> Any:
    """Return the configuration of the model that one rank computes."""
    own = copy.deepcopy(config)
    own.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own.num_attention_heads, own.num_key_value_heads, own.intermediate_size = sizes.of_rank(ranks)
    return own


def complete(model: Any, weights: dict[str, torch.Tensor], group: TensorGroup) -> None:
    """Give a model on no device its weights, and its row-split projections the sum over the ranks.

    Raises ModelNotSupported for weights of other names or shapes than the model's.
    """
    try:
        model.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise ModelNotSupported(f"the files do not fit the model: {error}") from error
    model.requires_grad_(False)
    body = model.model
    body.rotary_emb = type(body.rotary_emb)(body.config).to(weights[EMBEDDING].device)  # computed, in no file
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in BY_ROWS:
            module.register_forward_hook(lambda module, given, product: group.sum(product))
