"""Run a model's forward and backward pass in slices: a layer or part of one, or the head on some tokens.

Training uses a copy of the modules that shares all tensors with the served model, which is not changed. The
computation before and after the layers runs in the model family's own code, with the layers' `forward`
replaced during that call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.loader_turns import pause, released
from site_engine.core.training import AdapterShape
from site_engine.errors import TrainingRefused
from site_engine.model import attention_context, certify
from site_engine.model.hf_attention import install_hook
from site_engine.model.pausing import PauseBeforeOperations
from site_engine.training.adapter import Adapter, Factors, attach, target_modules
from site_engine.training.context import PackedContext
from site_engine.training.slices import Slice
from site_engine.variants.certify import plain_model

if TYPE_CHECKING:
    from site_engine.training.llama_layers import Attended, TrainedHead, TrainedLayer

SAMPLE_LENGTHS = (11, 1, 6)
HEAD_TOKENS, FUSED_HEAD_TOKENS = 256, 1024
"""Maximum number of tokens whose logits are in memory at a time."""


class LayerCall(NamedTuple):
    """The arguments of a layer besides the hidden states."""

    more: tuple[Any, ...]
    named: dict[str, Any]


class Begun(NamedTuple):
    """A micro-batch before its first layer: hidden states [1, tokens, dim] and all layers' arguments."""

    hidden: torch.Tensor
    calls: Sequence[LayerCall]
    context: PackedContext
    kept: dict[int, Attended] | None = None  # by layer, for `backward`; None: recompute


class Recomputed(NamedTuple):
    """The input of a layer [1, tokens, dim] and, where autograd differentiates the layer, its output."""

    below: torch.Tensor
    above: torch.Tensor | None = None


class SlicedModel:
    """Call the layers of a transformers model one by one.

    Raises TrainingRefused if the logits then differ from those of the whole model. `fused` selects fused
    kernels for the layers; None selects them on a GPU, in 16 bits, for supported model families.
    """

    def __init__(self, model: Any, *, fused: bool | None = None) -> None:
        self._model = plain_model(model)
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
        self._launched: deque[torch.cuda.Event] = deque()  # events at the ends of slices
        parameter = next(self._model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        in_16_bits = self.device.type == "cuda" and self.dtype.itemsize == 2
        self._fused = in_16_bits and _can_fuse(self._model) if fused is None else fused
        self._head: TrainedHead | None = None
        self._trained: list[TrainedLayer] = []
        if self._fused:
            self._fuse({}, 1.0)
        with torch.no_grad(), PauseBeforeOperations():
            off = self._difference()
        if not off <= certify.TOLERANCE.get(self.dtype, 1e-6):
            raise TrainingRefused(
                f"{type(model).__name__} computes other logits layer by layer: they differ by {off:.1e}"
            )

    def wait(self, slices: int = 0) -> None:
        """Wait until the device has computed all but the last `slices` slices. Do nothing on a CPU."""
        if self.device.type != "cuda":
            return
        launched = torch.cuda.Event()
        launched.record()
        self._launched.append(launched)
        while len(self._launched) > slices:
            self._launched.popleft().synchronize()

    def targets(self, shape: AdapterShape) -> dict[str, Any]:
        """Return the target modules of an adapter of this shape, by name. Raises TrainingRefused."""
        return target_modules(self.layers, shape)

    def attach(self, adapter: Adapter) -> list[list[str]]:
        """Apply the adapter in the model's modules. Return the names of the adapted modules per layer."""
        if self._fused:
            self._fuse(adapter.factors, adapter.scale)
        else:
            modules = dict(self._model.named_modules())
            for name in adapter.factors:
                attach(name, modules[name], adapter)
        return [
            [each for each in adapter.factors if each.startswith(f"{layer}.")] for layer, _ in self.layers
        ]

    def forget_factors(self) -> None:
        """Discard the layers' rounded copies of the adapter's factors after the factors have changed."""
        for each in self._trained:
            each.forget_factors()

    def begin(
        self, ids: torch.Tensor, positions: torch.Tensor, begins: Sequence[int], *, backward: bool = False
    ) -> Begun:
        """Run the computation before the layers for packed ids and positions [tokens]."""
        context, calls, entered = PackedContext(begins), list[LayerCall](), list[torch.Tensor]()

        def record(hidden: torch.Tensor, *more: Any, **named: Any) -> Any:
            entered.append(hidden)
            calls.append(LayerCall(more, named))
            return (hidden,) if self._returns_tuple else hidden

        with self._layers_as(record), attention_context.use(context):
            self._model.base_model(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        if len(calls) != len(self.layers):
            raise TrainingRefused(f"{len(calls)} calls of {len(self.layers)} layers")
        keeps = backward and bool(self._trained) and self._has_room(len(ids))
        return Begun(entered[0].detach(), calls, context, {} if keeps else None)

    def layer(self, number: int, hidden: torch.Tensor, begun: Begun) -> torch.Tensor:
        """Run one layer on hidden states [1, tokens, dim]."""
        call = begun.calls[number]
        if self._trained:
            rotary = call.named["position_embeddings"]
            trained, kept = self._trained[number], begun.kept
            out, half = trained.forward(hidden[0], rotary, begun.context, keep=kept is not None)
            if kept is not None and half is not None:
                kept[number] = half
            return out[None]
        with attention_context.use(begun.context):
            out = self.layers[number][1](hidden, *call.more, **call.named)
        self._returns_tuple = isinstance(out, tuple)
        result: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return result

    @property
    def recomputes(self) -> bool:
        """Whether `recompute` does any work. Fused layers are recomputed in `backward`."""
        return not self._trained

    def recompute(self, number: int, below: torch.Tensor, begun: Begun) -> Recomputed:
        """Recompute the output of a layer for `backward`."""
        if not self.recomputes:
            return Recomputed(below)
        below = below.requires_grad_(number > 0)
        with torch.enable_grad():
            return Recomputed(below, self.layer(number, below, begun))

    def backward(
        self, number: int, again: Recomputed, begun: Begun, gradient: torch.Tensor, factors: Factors
    ) -> Generator[Slice, None, tuple[torch.Tensor, list[torch.Tensor]]]:
        """Return the gradients of a layer's input and of its factors.

        If autograd differentiates the first layer, `gradient` is returned in place of its input's gradient.
        Yields the kind of each slice after the first.
        """
        if again.above is None:
            rotary = begun.calls[number].named["position_embeddings"]
            trained = self._trained[number]
            kept = None if begun.kept is None else begun.kept.pop(number)
            passes = trained.backward(again.below[0], rotary, begun.context, gradient[0], kept)
            given, made = yield from passes
            return given[None], [each for name in factors for each in made[name]]
        wanted = [factor for pair in factors.values() for factor in pair]
        wrt = [again.below, *wanted] if number > 0 else wanted
        found = torch.autograd.grad(again.above, wrt, gradient, materialize_grads=True)
        return (found[0], list(found[1:])) if number > 0 else (gradient, list(found))

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, count: int | None, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Compute the head's loss on the last layer's output [tokens, dim].

        Returns the sum of the losses of the first `rows` tokens, the number of these whose top prediction is
        the target and, if `count` is given, the gradient of sum / count with respect to `hidden`.
        """
        if self._head is not None:
            return self._head.loss(hidden, targets, count, rows)
        part = hidden.requires_grad_(count is not None)
        with torch.set_grad_enabled(count is not None):
            logits = self.head(part)[:rows]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(logits, targets[:rows], reduction="sum")
        gradient = None if count is None else torch.autograd.grad(loss / count, part)[0]
        return loss.detach(), (logits.detach().argmax(-1) == targets[:rows]).sum(), gradient

    @property
    def head_tokens(self) -> int:
        """The maximum number of tokens whose logits are in memory at a time."""
        return HEAD_TOKENS if self._head is None else FUSED_HEAD_TOKENS

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the last layer's output [tokens, dim] to logits [tokens, vocabulary]."""
        tokens = hidden.shape[0]

        def last(*_: Any, **__: Any) -> Any:
            return (hidden[None],) if self._returns_tuple else hidden[None]

        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.device)
        with self._layers_as(last), attention_context.use(PackedContext((0, tokens))):
            logits: torch.Tensor = self._model(
                input_ids=ids, position_ids=torch.arange(tokens, device=self.device)[None], use_cache=False
            ).logits[0]
        return logits

    def _has_room(self, tokens: int) -> bool:
        """Return whether half of the free memory can hold the attention results that `backward` uses."""
        if self.device.type != "cuda":
            return True
        free = torch.cuda.mem_get_info(self.device)[0]
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        kept = tokens * self.dtype.itemsize * sum(each.kept_numbers for each in self._trained)
        return bool(kept <= free // 2)

    def _fuse(self, factors: Factors, scale: float) -> None:
        """Set up fused kernels for the layers and the head."""
        from site_engine.training.llama_layers import TrainedHead, TrainedLayer  # requires Triton

        self._trained = []
        for name, layer in self.layers:
            pause()
            self._trained.append(TrainedLayer(name, layer, factors, scale))
        self._head = TrainedHead(self._model.base_model.norm, self._model.lm_head)

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
        """Return the largest difference of the sliced from the whole logits, relative to the largest logit.

        With a fused head, the relative difference of the loss counts as well.
        """
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
        if self._head is not None:  # compile its kernels now rather than while serving
            loss, _, gradient = self._head.loss(hidden[0], ids, 1, len(ids))
            assert gradient is not None
            deque(self.backward(0, Recomputed(begun.hidden), begun, gradient[None], {}), maxlen=0)
            exact = F.cross_entropy(wanted.float(), ids, reduction="sum")
            off = torch.maximum(off, (loss - exact).abs() / exact)
        with released():
            return float(off) if bool(torch.isfinite(off)) else float("inf")


def _can_fuse(model: Any) -> bool:
    from site_engine.training.llama_layers import fits  # requires Triton

    return fits(model)
