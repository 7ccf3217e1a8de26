"""Train Llama-family layers with few kernels: a forward pass, and a backward pass that recomputes it.

PyTorch computes the products with frozen weights; norms, rotations and gates take one kernel each; an
adapter's products are added in place. The backward pass recomputes all of the forward pass but the last
product; attention only if there is too little memory to keep its results. Other families are not supported
here and train with the transformers implementation.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.tensor_split import FAMILIES
from site_engine.cuda.kernels import training_kernels
from site_engine.model.attention_context import Scoring
from site_engine.training.adapter import Factors, exact_product
from site_engine.training.context import PackedContext
from site_engine.training.packed_attention import Attention
from site_engine.training.slices import Slice

GATE_ROWS, GATE_COLUMNS, LOGIT_BLOCK = 32, 128, 4096
Gradients = dict[str, tuple[torch.Tensor, torch.Tensor]]


def fits(model: Any) -> bool:
    """Return whether this module can train a transformers model."""
    return (
        type(model).__name__ in FAMILIES
        and model.config.hidden_act == "silu"
        and all(
            type(each) is torch.nn.Linear
            for layer in model.base_model.layers
            for each in (model.lm_head, *_projections(layer).values())
        )
    )


def _projections(layer: Any) -> dict[str, Any]:
    attention, mlp = layer.self_attn, layer.mlp
    return {
        **{
            f"self_attn.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        },
        **{f"mlp.{name}": getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")},
    }


# ---- norms


class Norm(NamedTuple):
    """An RMS norm, optionally fused with the residual sum before it."""

    weight: torch.Tensor
    epsilon: float

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden)
        self._launch(training_kernels.sum_norm, hidden, hidden, hidden, self.weight, out, ADDED=False)
        return out

    def add(self, hidden: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum and its norm."""
        total, out = torch.empty_like(hidden), torch.empty_like(hidden)
        self._launch(training_kernels.sum_norm, hidden, added, total, self.weight, out, ADDED=True)
        return total, out

    def backward(
        self, hidden: torch.Tensor, gradient: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Overwrite `gradient` with the gradient of the norm's input, plus `beside`, and return it."""
        past = gradient if beside is None else beside
        kernel = training_kernels.norm_backward
        self._launch(kernel, hidden, self.weight, gradient, past, gradient, BESIDE=beside is not None)
        return gradient

    def _launch(self, kernel: Any, *given: torch.Tensor, **how: bool) -> None:
        rows, size = given[0].shape
        pad = 1 << (size - 1).bit_length()
        warps = 8 if pad > 2048 else 4
        kernel[(rows,)](*given, self.epsilon, **how, SIZE=size, SIZE_PAD=pad, num_warps=warps)


# ---- projections


class Rounded(NamedTuple):
    """The adapter factors of some modules, rounded to 16 bits."""

    down: torch.Tensor  # [all ranks, in]
    scaled_down: torch.Tensor
    ups: dict[str, torch.Tensor]  # [out, rank] by module name
    scaled_ups: dict[str, torch.Tensor]
    parts: dict[str, slice]  # of the rows of `down`, by module name


class Joined:
    """Projections that share one input, with an adapter's contributions."""

    def __init__(self, modules: Mapping[str, Any], factors: Factors, scale: float) -> None:
        self._modules, self._scale = modules, scale
        self._factors = {name: factors[name] for name in modules if name in factors}
        self._rounded: Rounded | None = None

    def forward(
        self, rows: torch.Tensor, *, add: bool = True
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Map rows [tokens, in] to the output of each projection and the adapter's scaled inner products.

        Without `add` the outputs leave out the adapter.
        """
        inner, outs = self.inner(rows), []
        rounded = self.rounded(rows.dtype)
        for name, module in self._modules.items():
            out = F.linear(rows, module.weight, module.bias)
            if add and rounded is not None and inner is not None and name in rounded.ups:
                out.addmm_(inner[:, rounded.parts[name]], rounded.ups[name].T)
            outs.append(out)
        return outs, inner

    def inner(self, rows: torch.Tensor) -> torch.Tensor | None:
        """Return the adapter's scaled inner products [tokens, all ranks], or None if no module is adapted."""
        rounded = self.rounded(rows.dtype)
        return None if rounded is None else rows @ rounded.scaled_down.T

    def backward(
        self,
        gradients: Sequence[torch.Tensor],
        rows: torch.Tensor,
        inner: torch.Tensor | None,
        found: Gradients,
    ) -> torch.Tensor:
        """Return the gradient of the rows and store those of the factors in `found`."""
        given: torch.Tensor | None = None
        for gradient, module in zip(gradients, self._modules.values(), strict=True):
            given = gradient @ module.weight if given is None else given.addmm_(gradient, module.weight)
        assert given is not None
        rounded = self.rounded(rows.dtype)
        if inner is None or rounded is None:
            return given
        through, ups = torch.empty_like(inner), {}
        for gradient, name in zip(gradients, self._modules, strict=True):
            if name in rounded.ups:
                part = rounded.parts[name]
                torch.mm(gradient, rounded.scaled_ups[name], out=through[:, part])
                ups[name] = exact_product(gradient.T, inner[:, part])
        downs = exact_product(through.T, rows)
        found.update({name: (downs[rounded.parts[name]], up) for name, up in ups.items()})
        return given.addmm_(through, rounded.down)

    def rounded(self, dtype: torch.dtype) -> Rounded | None:
        """Return the rounded factors, cached until `forget`; None if no module is adapted."""
        if self._factors and self._rounded is None:
            joined = torch.cat([down.detach() for down, _ in self._factors.values()])
            ups = {name: up.detach() for name, (_, up) in self._factors.items()}
            ends = list(accumulate((down.shape[0] for down, _ in self._factors.values()), initial=0))
            self._rounded = Rounded(
                joined.to(dtype),
                (joined * self._scale).to(dtype),
                {name: up.to(dtype) for name, up in ups.items()},
                {name: (up * self._scale).to(dtype) for name, up in ups.items()},
                {name: slice(*ends_of) for name, ends_of in zip(ups, pairwise(ends), strict=True)},
            )
        return self._rounded

    def forget(self) -> None:
        """Discard the rounded factors after the factors have changed."""
        self._rounded = None


# ---- a layer


class Attended(NamedTuple):
    """The results of the attention half of a layer's forward pass."""

    inner: torch.Tensor | None
    attention: Attention  # of rotated queries and keys
    output_inner: torch.Tensor | None
    between: torch.Tensor


Rotary = tuple[torch.Tensor, torch.Tensor]


class TrainedLayer:
    """A decoder layer with the adapter's factors for its modules, whose names begin with `name`."""

    def __init__(self, name: str, layer: Any, factors: Factors, scale: float) -> None:
        modules = {f"{name}.{each}": module for each, module in _projections(layer).items()}
        joined = [
            Joined({f"{name}.{each}": modules[f"{name}.{each}"] for each in names.split()}, factors, scale)
            for names in (
                "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj mlp.up_proj",
                "mlp.down_proj",
            )
        ]
        self._joined = joined
        self._query_key_value, self._output, self._gate_up, self._down = joined
        self._before, self._between = (
            Norm(norm.weight, norm.variance_epsilon)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm)
        )
        attention = layer.self_attn
        self._dim = attention.head_dim
        self._scoring = Scoring(attention.scaling, sliding_window(attention))
        query, key, value, output = (module.out_features for module in list(modules.values())[:4])
        self.kept_numbers = 2 * query + key + value + output  # per token, with `keep`

    def forward(
        self, hidden: torch.Tensor, rotary: Rotary, context: PackedContext, *, keep: bool = False
    ) -> tuple[torch.Tensor, Attended | None]:
        """Map hidden states [tokens, dim]. With `keep`, also return the results that `backward` can reuse."""
        half, normed = self._attend(hidden, rotary, context)
        parts, inner = self._gate_up.forward(normed, add=False)
        gated = torch.empty_like(parts[0])
        self._gate(training_kernels.gate_forward, parts, inner, gated)
        out = self._down.forward(gated)[0][0].add_(half.between)
        return out, half if keep else None

    def backward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        context: PackedContext,
        gradient: torch.Tensor,
        kept: Attended | None = None,
    ) -> Generator[Slice, None, tuple[torch.Tensor, Gradients]]:
        """Return the gradient of the layer's input and those of its factors, by module name.

        Yields the kind of each slice after the first.
        """
        half, between_normed = kept, None
        if half is None:
            half, between_normed = self._attend(hidden, rotary, context)
        else:
            between_normed = self._between.forward(half.between)
        factors: Gradients = {}
        parts, inner = self._gate_up.forward(between_normed, add=False)
        gated = torch.empty_like(parts[0])
        self._gate(training_kernels.gate_forward, parts, inner, gated)
        wanted = self._down.backward([gradient], gated, self._down.inner(gated), factors)
        del gated
        yield Slice.GATE_UP_BACKWARD
        self._gate(training_kernels.gate_backward, parts, inner, wanted)
        normed = self._gate_up.backward(parts, between_normed, inner, factors)
        between = self._between.backward(half.between, normed, gradient)
        del parts, inner, wanted, between_normed
        yield Slice.ATTENTION_BACKWARD
        attended = half.attention.output
        wanted = self._output.backward([between], attended.flatten(1), half.output_inner, factors)
        parts = [part.contiguous() for part in half.attention.backward(wanted.view(attended.shape))]
        _rotate(parts[0], rotary, -1)
        _rotate(parts[1], rotary, -1)
        flat = [part.flatten(1) for part in parts]
        normed = self._query_key_value.backward(flat, self._before.forward(hidden), half.inner, factors)
        return self._before.backward(hidden, normed, between), factors

    def forget_factors(self) -> None:
        """Discard the rounded factors after the adapter's factors have changed."""
        for each in self._joined:
            each.forget()

    def _gate(
        self, kernel: Any, parts: Sequence[torch.Tensor], inner: torch.Tensor | None, other: torch.Tensor
    ) -> None:
        """Launch a gate kernel. Without an adapter, `other` is passed as placeholder for its products."""
        rows, width = other.shape
        rounded, rank = self._gate_up.rounded(other.dtype), 0
        added = [other] * 4
        if inner is not None and rounded is not None:
            ups = list(rounded.ups.values())
            rank = ups[0].shape[1]
            added = [inner, inner[:, rank:], *ups]
        kernel[(-(-rows // GATE_ROWS), -(-width // GATE_COLUMNS))](
            *parts, *added, other, rows, width, added[0].stride(0),
            RANK=rank, RANK_PAD=max(16, 1 << (rank - 1).bit_length()), ROWS=GATE_ROWS, COLUMNS=GATE_COLUMNS,
        )  # fmt: skip

    def _attend(
        self, hidden: torch.Tensor, rotary: Rotary, context: PackedContext
    ) -> tuple[Attended, torch.Tensor]:
        """Compute the attention half. Return its results and the normed input of the MLP half."""
        outs, inner = self._query_key_value.forward(self._before.forward(hidden))
        query, key, value = (each.view(each.shape[0], -1, self._dim) for each in outs)
        _rotate(query, rotary, 1)
        _rotate(key, rotary, 1)
        attention = context.attention((query, key, value), self._scoring)
        (out,), output_inner = self._output.forward(attention.output.flatten(1))
        between, normed = self._between.add(hidden, out)
        return Attended(inner, attention, output_inner, between), normed


def _rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], sign: int) -> None:
    """Apply rotary embeddings to heads [tokens, heads, dim] in place. A `sign` of -1 applies the inverse."""
    rows, count, dim = heads.shape
    half = dim // 2
    training_kernels.rotate[(rows,)](
        heads, *(each.view(rows, dim) for each in rotary), count,
        SIGN=sign, HEADS_PAD=1 << (count - 1).bit_length(), HALF=half, HALF_PAD=1 << (half - 1).bit_length(),
    )  # fmt: skip


def sliding_window(attention: Any) -> int | None:
    """Return the sliding window of an attention module of these families, or None."""
    if type(attention).__name__.startswith("Mistral"):
        window: int | None = getattr(attention.config, "sliding_window", None)
        return window
    return getattr(attention, "sliding_window", None)


# ---- the head


class TrainedHead:
    """The final norm, the output projection to logits, and the loss."""

    def __init__(self, norm: Any, head: Any) -> None:
        self._norm = Norm(norm.weight, norm.variance_epsilon)
        self._weight, self._bias = head.weight, head.bias

    def loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, count: int | None, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Compute the loss on hidden states [tokens, dim].

        Returns the sum of the losses of the first `rows` tokens, the number of these whose top prediction is
        the target and, if `count` is given, the gradient of sum / count with respect to the hidden states.
        """
        logits = F.linear(self._norm.forward(hidden), self._weight, self._bias)
        tokens, vocabulary = logits.shape
        losses, hits = (torch.empty(tokens, device=hidden.device) for _ in range(2))
        backward = count is not None
        training_kernels.cross_entropy[(tokens,)](
            logits, targets, losses, hits, vocabulary, 1.0 / (count or 1),
            BACKWARD=backward, BLOCK=LOGIT_BLOCK, num_warps=8,
        )  # fmt: skip
        gradient = self._norm.backward(hidden, logits @ self._weight) if backward else None
        return losses[:rows].sum(), hits[:rows].sum(), gradient
