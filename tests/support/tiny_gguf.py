"""Random models of a few thousand weights as GGUF files, written as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

CONTROL = gguf.TokenType.CONTROL
SPECIAL = ("<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    *(merge.replace(" ", "") for merge in MERGES),
    *SPECIAL,
]
VOCAB = len(WORDS)


def tiny_sizes(**others: Any) -> dict[str, Any]:
    """Sizes of a configuration, in multiples of 32 so that rows are whole blocks of any quantization."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": WORDS.index(SPECIAL[0]),
        "eos_token_id": WORDS.index(SPECIAL[1]),
        "pad_token_id": None,
        **others,
    }


def write_gguf(
    path: Path,
    model: Any,
    family: str,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    without: tuple[str, ...] = (),
    split: str = "gpt-2",
) -> Path:
    """Write a transformers model. `metadata` and `tensors` are added to what the model has.

    A file of the family mamba gets the tensors of Llama.
    """
    writer = gguf.GGUFWriter(path, family)
    write_config(writer, model.config)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    write_words(writer, split, model.config.eos_token_id)
    for name, weights in tensors_of(model, family).items():
        if name in without:
            continue
        if weights.ndim > 1 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weights)
    for name, weights in (tensors or {}).items():
        writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(heads)
    writer.add_value_length(heads)
    writer.add_rope_dimension_count(heads)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_words(writer: gguf.GGUFWriter, split: str, end: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(WORDS)
    writer.add_token_types([CONTROL if word in SPECIAL else gguf.TokenType.NORMAL for word in WORDS])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(WORDS.index(SPECIAL[0]))
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def tensors_of(model: Any, family: str) -> dict[str, np.ndarray]:
    """Return the weights by the names, and in the layout, of the format."""
    known = family if family != "mamba" else "llama"
    (architecture,) = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == known]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    found = {}
    for name, parameter in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        weights = parameter.float().numpy()
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weights = interleaved(weights, model.config, "q_proj" in name)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            weights = weights + 1
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weights
    return found


def interleaved(weights: np.ndarray, config: Any, of_queries: bool) -> np.ndarray:
    """Order the rows as llama.cpp rotates them: pairs of neighbours instead of halves of a head."""
    heads = config.num_attention_heads if of_queries else config.num_key_value_heads
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)
