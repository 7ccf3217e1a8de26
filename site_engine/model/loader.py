"""Load a transformers model and certify that the engine computes what the model computes.

The model runs unmodified on packed tokens; `hf_attention.py` answers its attention calls.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from site_engine.core.startup import StartUp
from site_engine.errors import ModelNotSupported
from site_engine.model import certify, gguf
from site_engine.model.cpu_optimize import optimize_for_cpu
from site_engine.model.hf_attention import install_hook, probe_layers
from site_engine.model.kv_cache import LayerShape
from site_engine.model.shard import load_shard
from site_engine.model.tensor_group import TensorGroup
from site_engine.model.weights import Weights
from site_engine.text.detokenize import Vocabulary
from site_engine.text.vocabulary import vocabulary_of

DEFAULT_CONTEXT_TOKENS = 2048
_DEFAULT_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 2**31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A certified model. `layers` has one shape per attention call, in the order of the calls.

    With a `group` the layers are those of one of its ranks.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    vocabulary: Vocabulary
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # by the names of `Sampling`
    group: TensorGroup | None = None

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Map ids and positions [1, tokens] to logits [wanted, vocabulary], in the current context."""
        return _forward(self.model, ids, positions, wanted)


def _check_folder(source: str) -> None:
    """Raise ModelNotSupported for a path without a model, which transformers would look for on the Hub."""
    folder = Path(source)
    if source.startswith(("/", ".")) and not folder.is_dir():
        raise ModelNotSupported(f"cannot load {source!r}: there is no such folder")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelNotSupported(f"cannot load {source!r}: the folder has no config.json")


def load(
    source: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    weights: Callable[[], Weights | None] | None = None,
    vocabulary: Vocabulary | None = None,
    startup: StartUp | None = None,
    group: TensorGroup | None = None,
) -> LoadedModel:
    """Load safetensors from a folder or a Hub id, or a GGUF file, which is converted on first use.

    `weights` returns those of the folder on the device if they could be read, and `vocabulary` stands in for
    the tokenizer's. Of a `group` each rank loads its share, at the same time. Raises ModelNotSupported with
    the reason, OSError if a converted file can't be kept.
    """
    startup = startup or StartUp(time.monotonic)
    if source.endswith(gguf.SUFFIX):
        source = str(gguf.converted(Path(source)))
    _check_folder(source)
    try:
        with startup.part("tokenizer"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        with startup.part("model"):
            found = weights() if weights is not None else None
            if group is not None:
                model = load_shard(source, group, torch.device(device), getattr(torch, dtype))
            elif found is not None:
                model = _with_weights(source, found, torch.device(device), getattr(torch, dtype))
            else:
                model = _whole(
                    transformers.AutoModelForCausalLM,
                    source,
                    dtype=getattr(torch, dtype),
                    use_safetensors=True,
                ).to(device)
    except ModelNotSupported:
        raise
    except Exception as error:  # whatever the readers of tokenizers, settings and weights raise
        raise ModelNotSupported(f"cannot load {source!r}: {type(error).__name__}: {error}") from error
    model = optimize_for_cpu(model)
    revision = _revision(source, model)
    with startup.part("logits compared with the model's own"):
        name = Path(source).name or Path(source).resolve().name
        return from_model(model, tokenizer, name=name, revision=revision, vocabulary=vocabulary, group=group)


def _with_weights(source: str, weights: Weights, device: torch.device, dtype: torch.dtype) -> Any:
    """Make the model of a folder around weights on the device, which transformers renames and places."""
    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        kind = type(transformers.AutoModelForCausalLM.from_config(config))
    model = _whole(kind, None, config=config, state_dict=weights, dtype=dtype, device_map={"": device})
    weights.clear()
    if (Path(source) / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of memory that transformers reserves for weights that it would read
    return model


def _whole(kind: Any, source: str | None, **settings: Any) -> Any:
    """Load a model whose files have all of its tensors: transformers draws the others at random.

    Raises ModelNotSupported.
    """
    model, found = kind.from_pretrained(source, output_loading_info=True, **settings)
    if absent := sorted(found["missing_keys"]):
        raise ModelNotSupported(f"its files lack {len(absent)} tensors of the model, {absent[0]} the first")
    return model


def from_model(
    model: Any,
    tokenizer: Any = None,
    *,
    name: str = "model",
    revision: str = "unversioned",
    eos_token_ids: Iterable[int] | None = None,
    vocabulary: Vocabulary | None = None,
    group: TensorGroup | None = None,
) -> LoadedModel:
    """Hook and certify a model that is in memory. Raises ModelNotSupported with the reason."""
    model.eval()
    parameter = next(model.parameters())
    device = parameter.device
    if device.type == "cuda":  # cuDNN plans attention for 4 to 10 ms, in each thread for each shape
        torch.backends.cuda.enable_cudnn_sdp(False)
    config = model.config.get_text_config()
    prompts = certify.sample_prompts(config.vocab_size)
    with _as_not_supported(model):
        with torch.inference_mode():  # as transformers runs it: [tokens, vocabulary] of each prompt
            expected = [
                model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
                for ids in prompts
            ]
        install_hook(model)
        layers = probe_layers(model)
        off = certify.largest_difference(partial(_forward, model), layers, prompts, expected)
    tolerance = certify.limit(parameter.dtype, len(layers))
    if off > tolerance:
        raise ModelNotSupported(
            f"{type(model).__name__} computes other logits on packed tokens than alone: they differ by "
            f"{off:.1e} of the largest (limit {tolerance:.1e})"
        )
    eos = model.generation_config.eos_token_id if eos_token_ids is None else tuple(eos_token_ids)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        revision=revision,
        context_tokens=context_tokens_of(config),
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(each for each in end_tokens(eos) if 0 <= each < config.vocab_size),
        vocabulary=vocabulary or vocabulary_of(tokenizer),
        layers=layers,
        dtype=parameter.dtype,
        device=device,
        sampling_defaults=sampling_defaults(model.generation_config),
        group=group,
    )


def end_tokens(named: Any) -> tuple[int, ...]:
    """Return the tokens that end an answer. Raises ModelNotSupported for what is no token."""
    ids = () if named is None else tuple(named) if isinstance(named, list | tuple) else (named,)
    if wrong := [each for each in ids if not isinstance(each, int)]:
        raise ModelNotSupported(f"eos_token_id has {wrong[0]!r}, which is no id of a token")
    return ids


def sampling_defaults(config: transformers.GenerationConfig) -> dict[str, float]:
    """Return the sampling that generation_config.json recommends, without its limits on length.

    Raises ModelNotSupported for values that mean nothing.
    """
    found = {name: getattr(config, name, None) for name in _DEFAULT_RANGES}
    if config.do_sample is False:
        found["temperature"] = 0.0
    for name, (low, high) in _DEFAULT_RANGES.items():
        value = found[name]
        if value is not None and not (isinstance(value, int | float) and low <= value <= high):
            raise ModelNotSupported(f"generation_config.json has {name} {value!r}, not {low:g} to {high:g}")
    return {name: value for name, value in found.items() if value is not None}


def _forward(model: Any, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=wanted
    ).logits[0]
    return logits if logits.shape[0] == wanted.shape[0] else logits[wanted]


@contextmanager
def _as_not_supported(model: Any) -> Iterator[None]:
    """Turn whatever a model raises while it is tried out into the reason not to serve it."""
    try:
        yield
    except ModelNotSupported as error:
        raise ModelNotSupported(f"{type(model).__name__}: {error}") from error
    except Exception as error:
        raise ModelNotSupported(
            f"{type(model).__name__} cannot run on packed tokens: {type(error).__name__}: {error}"
        ) from error


def context_tokens_of(config: Any) -> int:
    """Return the context length, prompt and response together.

    Rotary scalings that change with the longest row of a batch, and chunked attention, are exact only within
    the first window, so the context ends there.
    """
    names = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
    limit = next((found for name in names if (found := getattr(config, name, None))), DEFAULT_CONTEXT_TOKENS)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limit = min(limit, config.attention_chunk_size)
    return int(limit)


def _revision(source: str, model: Any) -> str:
    """Return the Hub commit, or a digest of the folder's configuration and the ends of its weights."""
    folder = Path(source)
    if not folder.is_dir():
        return str(getattr(model.config, "_commit_hash", None) or "unversioned")
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, path.stat().st_size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:12]
