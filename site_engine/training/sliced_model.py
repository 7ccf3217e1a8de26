"""A model's forward and backward pass in slices: one layer, or the head on a few tokens, at a time.

A copy of the modules is trained, which shares all tensors with the model that serves: nothing of the latter
is changed. Whatever a family does before and after its layers is done by its own code: while that runs, the
layers are stood in for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from site_engine.core.training import AdapterShape
from site_engine.errors import TrainingRefused
from site_engine.model import attention_context, certify
from site_engine.model.hf_attention import install_hook
from site_engine.training.adapter import Adapter, attach, target_modules
from site_engine.training.context import PackedContext
from site_engine.variants.certify import alone

SAMPLE_LENGTHS = (11, 1, 6)


class LayerCall(NamedTuple):
    """What a layer gets beside the hidden states."""

    more: tuple[Any, ...]
    named: dict[str, Any]


class Begun(NamedTuple):
    """A micro-batch before its first layer: hidden states [1, tokens, dim] and the calls of all layers."""

    hidden: torch.Tensor
    calls: Sequence[LayerCall]
    context: PackedContext


class SlicedModel:
    """The layers of a model of transformers, called one by one. Raises TrainingRefused where that gives other
    logits than the whole model.
    """

    def __init__(self, model: Any) -> None:
        self._model = alone(model)
        install_hook(self._model)
        for parameter in self._model.parameters():
            parameter.requires_grad_(False)
        found = [
            (name, module)
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.ModuleList)
            and len(module) == self._model.config.get_text_config().num_hidden_layers
        ]
        if not found:
            raise TrainingRefused(f"{type(model).__name__} has no list of layers")
        name, layers = found[0]
        self.layers = [(f"{name}.{number}", layer) for number, layer in enumerate(layers)]
        self._returns_tuple = False
        self._launched: deque[torch.cuda.Event] = deque()  # the ends of slices
        parameter = next(self._model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        with torch.no_grad():
            off = self._difference()
        if not off <= certify.TOLERANCE.get(self.dtype, 1e-6):
            raise TrainingRefused(
                f"{type(model).__name__} computes other logits layer by layer: they differ by {off:.1e}"
            )

    def wait(self, slices: int = 0) -> None:
        """Wait until the device has computed all that it was given but the last slices; on a CPU it has."""
        if self.device.type != "cuda":
            return
        launched = torch.cuda.Event()
        launched.record()
        self._launched.append(launched)
        while len(self._launched) > slices:
            self._launched.popleft().synchronize()

    def targets(self, shape: AdapterShape) -> dict[str, Any]:
        """Return the modules that an adapter of this shape changes. Raises TrainingRefused."""
        return target_modules(self.layers, shape)

    def attach(self, adapter: Adapter) -> list[list[str]]:
        """Let the modules add the adapter's products; return the adapted modules of each layer."""
        modules = dict(self._model.named_modules())
        for name in adapter.factors:
            attach(name, modules[name], adapter)
        return [
            [each for each in adapter.factors if each.startswith(f"{layer}.")] for layer, _ in self.layers
        ]

    def begin(self, ids: torch.Tensor, positions: torch.Tensor, begins: Sequence[int]) -> Begun:
        """Compute what comes before the layers, for packed ids and positions [tokens]."""
        context, calls, entered = PackedContext(begins), list[LayerCall](), list[torch.Tensor]()

        def record(hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
            entered.append(hidden)
            calls.append(LayerCall(more, named))
            return (hidden,) if self._returns_tuple else hidden

        with self._layers_as(record), attention_context.use(context):
            self._model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        if len(calls) != len(self.layers):
            raise TrainingRefused(f"{len(calls)} calls of {len(self.layers)} layers")
        return Begun(entered[0].detach(), calls, context)

    def layer(self, number: int, hidden: torch.Tensor, begun: Begun) -> torch.Tensor:
        """Map hidden states [1, tokens, dim] through one layer."""
        call = begun.calls[number]
        with attention_context.use(begun.context):
            out = self.layers[number][1](hidden, *call.more, **call.named)
        self._returns_tuple = isinstance(out, tuple)
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map what the last layer gives for some tokens, [tokens, dim], to logits [tokens, vocabulary]."""
        tokens = hidden.shape[0]

        def last(*_: Any, **__: Any) -> Any:
            return (hidden[None],) if self._returns_tuple else hidden[None]

        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.device)
        with self._layers_as(last), attention_context.use(PackedContext((0, tokens))):
            logits: torch.Tensor = self._model(
                input_ids=ids, position_ids=torch.arange(tokens, device=self.device)[None], use_cache=False
            ).logits[0]
        return logits

    @contextmanager
    def _layers_as(self, forward: Callable[..., Any]) -> Iterator[None]:
        for _, layer in self.layers:
            layer.forward = forward
        try:
            yield
        finally:
            for _, layer in self.layers:
                del layer.forward

    def _difference(self) -> float:
        """Return the largest difference of sliced logits from the whole model's, relative to the largest."""
        vocabulary = self._model.config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(0)
        sequences = [torch.randint(0, vocabulary, (length,), generator=draw) for length in SAMPLE_LENGTHS]
        begins = [sum(SAMPLE_LENGTHS[:number]) for number in range(len(SAMPLE_LENGTHS) + 1)]
        ids = torch.cat(sequences).to(self.device)
        positions = torch.cat([torch.arange(length) for length in SAMPLE_LENGTHS]).to(self.device)
        expected = []
        for each in sequences:
            with attention_context.use(PackedContext((0, len(each)))):
                whole = self._model(input_ids=each[None].to(self.device), use_cache=False).logits[0]
            expected.append(whole)
        wanted = torch.cat(expected)
        begun = self.begin(ids, positions, begins)
        hidden = begun.hidden
        for number in range(len(self.layers)):
            hidden = self.layer(number, hidden, begun)
        off = (self.head(hidden[0]) - wanted).abs().max() / wanted.abs().max().clamp(min=1.0)
        return float(off) if bool(torch.isfinite(off)) else float("inf")
