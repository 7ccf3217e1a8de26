"""Convert a GGUF file once to a folder of safetensors, tokenizer and configuration, which the loader reads.

transformers unpacks the weights and rebuilds the tokenizer. What transformers would leave out silently (a
number of the configuration, a tensor, the split of a text before its merges) is set from the file here, or
the file is refused: the model served is the model in the file.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from site_engine.errors import ModelNotSupported
from site_engine.model.cache import make_once, models_folder
from site_engine.model.gguf_header import Header, read_header

SUFFIX = ".gguf"
FORMAT = 1
"""Of what is converted: a higher number makes the entries of older versions again."""
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "starcoder2")
"""Families that tests convert and compare with the model that the file was written from."""
MODEL_TYPES = {"gemma3": "gemma3_text"}  # the text of a model that sees too
FLOAT32_ELEMENTS = 1 << 30
"""A model of more weights is kept in bfloat16, in half the space: in float32 no CPU would answer with it."""
NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Attributes of a configuration by the names that their values have in a file, after the family's."""
SPECIAL = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
ROPE = ("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor")
SPLITS_OF_TRANSFORMERS = ("llama3", "llama-v3", "llama-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "gpt-4o")
SPLITS_OF_GPT2 = ("gpt-2", "gpt2", "phi-2", "olmo", "mpt")
SPLITS_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r")
"""Each digit is a word of its own, the rest is split as by GPT-2; transformers does not know these."""
ENDS_OF_TURNS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "</s>",
)
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONTROL = 3
"""The type of a token that is no text."""


def converted(source: Path, *, show_progress: bool = False) -> Path:
    """Return the folder of the model in a GGUF file, converted on first use and when the file has changed.

    Raises ModelNotSupported with the reason if the file can't be served, OSError if nothing can be kept.
    """
    return make_once(*entry_of(source), partial(convert, source, show_progress=show_progress))


def entry_of(source: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder in the cache of a file's model, and the note that it has when it is up to date."""
    try:
        place = source.resolve()
        about = place.stat()
    except OSError as error:
        raise ModelNotSupported(f"{source} cannot be read: {error.strerror}") from error
    key = hashlib.sha256(str(place).encode()).hexdigest()[:12]
    note = {"source": str(place), "bytes": about.st_size, "modified_ns": about.st_mtime_ns, "format": FORMAT}
    return models_folder() / key / place.stem, note


def convert(source: Path, folder: Path, *, show_progress: bool = False) -> None:
    """Write the model of a GGUF file to `folder`. Raises ModelNotSupported and OSError."""
    header = read_header(source)
    check_family(source, header)
    dtype = "float32" if header.elements <= FLOAT32_ELEMENTS else "bfloat16"
    check_room(folder, header.elements * (4 if dtype == "float32" else 2))
    with nullcontext() if show_progress else redirect_stderr(StringIO()):  # of its bars
        try:
            model, tokenizer = load(source, header, dtype)
        except ModelNotSupported:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ModelNotSupported(f"{source} cannot be converted: {reason}") from error
        tokenizer.save_pretrained(folder)
        save_weights(model, folder)


def save_weights(model: Any, folder: Path) -> None:
    """Write configuration and weights. Raises OSError if they can't be written."""
    from safetensors import SafetensorError

    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(folder)) from error


def check_family(source: Path, header: Header) -> None:
    """Raise ModelNotSupported if the file's family, or something that it asks for, is not known here."""
    if header.family not in FAMILIES:
        raise ModelNotSupported(
            f"{source} is of the family {header.family!r}; GGUF files of {', '.join(FAMILIES)} are served"
        )
    if not header.metadata.get("tokenizer.ggml.tokens"):
        raise ModelNotSupported(f"{source} has no vocabulary")
    prefix = f"{header.family}."
    asked = {key.removeprefix(prefix) for key in header.metadata if key.startswith(prefix)}
    if unknown := sorted(asked - {*NUMBERS, *ROPE}):
        raise ModelNotSupported(f"{source} sets {prefix}{unknown[0]}, which is not understood here")
    scaling = header.metadata.get(f"{prefix}rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelNotSupported(f"{source} scales its positions by {scaling!r}, which is not understood here")
    split = header.metadata.get("tokenizer.ggml.pre", "default")
    known = (*SPLITS_OF_TRANSFORMERS, *SPLITS_OF_GPT2, *SPLITS_BY_DIGIT)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2" and split not in known:
        raise ModelNotSupported(f"{source} splits text as {split!r} does, which is not understood here")


def check_room(folder: Path, needed_bytes: int) -> None:
    """Raise OSError if the disk of `folder` has too little room."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        reason = f"{needed_bytes / 1e6:,.0f} MB are needed, {free_bytes / 1e6:,.0f} MB are free"
        raise OSError(errno.ENOSPC, reason, str(folder))


def load(source: Path, header: Header, dtype: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a file, complete. Raises ModelNotSupported."""
    import torch
    import transformers

    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    config = config_of(source, header)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place, config=config)
    set_split(tokenizer, header.metadata)
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        **place,
        config=config,
        dtype=getattr(torch, dtype),
        quantization_config=transformers.GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    check_complete(source, header, model, found)
    if ends := ends_of_turns(header.metadata):
        model.generation_config.eos_token_id = ends
    return model, tokenizer


def config_of(source: Path, header: Header) -> Any:
    """Return the configuration that the file states. Raises ModelNotSupported."""
    from transformers import AutoConfig

    prefix = f"{header.family}."
    stated = {key.removeprefix(prefix): value for key, value in header.metadata.items()}
    names = {tensor.name for tensor in header.tensors}
    values = {
        "vocab_size": len(header.metadata["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": "output.weight" not in names,
        **{
            f"{name}_token_id": header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL
        },
        **{name: stated[key] or None for key, name in NUMBERS.items() if key in stated},
    }
    config = AutoConfig.for_model(MODEL_TYPES.get(header.family, header.family), **values)
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (rotated := stated.get("rope.dimension_count", heads)) != heads:
        raise ModelNotSupported(
            f"{source} rotates {rotated} of {heads} dimensions, which is not understood here"
        )
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    rope["rope_theta"] = stated.get("rope.freq_base", rope["rope_theta"])
    if stated.get("rope.scaling.type") == "linear":
        rope.update(rope_type="linear", factor=stated["rope.scaling.factor"])
    if ROPE_FACTORS in names:
        scale_as_llama3(source, config, header)
    return config


def scale_as_llama3(source: Path, config: Any, header: Header) -> None:
    """Scale positions by the rule of Llama 3.1 and later, of which a file has the factors as a tensor.

    Raises ModelNotSupported if the factors follow another rule.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    tensor = next(each for each in header.tensors if each.name == ROPE_FACTORS)
    with source.open("rb") as file:
        file.seek(header.data_start + tensor.offset)
        factors = torch.frombuffer(bytearray(file.read(4 * tensor.elements)), dtype=torch.float32)
    size = 2 * len(factors)
    plain = config.rope_parameters["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    config.rope_parameters.update(LLAMA3_ROPE, factor=float(factors.max()))
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
    if scaled.shape != plain.shape or not torch.allclose(plain / factors, scaled, rtol=1e-3):
        raise ModelNotSupported(f"{source} scales its positions by a rule that is not understood here")


def set_split(tokenizer: Any, metadata: Mapping[str, Any]) -> None:
    """Set how a text is split before its merges, where transformers does not know it."""
    from tokenizers import pre_tokenizers

    if metadata.get("tokenizer.ggml.pre") in SPLITS_BY_DIGIT:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def check_complete(source: Path, header: Header, model: Any, found: Mapping[str, Any]) -> None:
    """Raise ModelNotSupported unless every weight of the model is from the file, and all of the file used."""
    if absent := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise ModelNotSupported(f"{source} has no {absent[0]} that fits the model, {len(absent)} such in all")
    used = sum(parameter.numel() for parameter in model.parameters())
    there = sum(tensor.elements for tensor in header.tensors if tensor.name != ROPE_FACTORS)
    if used != there:
        raise ModelNotSupported(f"{source} has {there:,} weights, of which transformers reads {used:,}")


def ends_of_turns(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and the one its template writes."""
    named = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    template = str(metadata.get("tokenizer.chat_template", ""))
    kinds = metadata.get("tokenizer.ggml.token_type", ())
    written = {
        number
        for number, (token, kind) in enumerate(zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False))
        if kind == CONTROL and token in ENDS_OF_TURNS and token in template
    }
    return sorted(number for number in named | written if number is not None)
