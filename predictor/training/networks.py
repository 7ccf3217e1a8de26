"""The neural models: a large text encoder that teaches, and a small one that serves.

Both turn word pieces `[prompts, pieces]` into a representation `[prompts, width]`; a head makes of it, of
lexical scores and of the served model, logits over ranges of length. Needs torch; training only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from predictor.training.length_head import Head, HeadConfig
from predictor.wordpiece import MAX_PIECES, PAD_MULTIPLE


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Sizes of an attention over states of `width`; its heads together are `attention` wide."""

    width: int
    attention: int
    heads: int


class Attention(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Multi-head attention of `asking` over `told`, both of one width."""

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.attention)
        self.key = nn.Linear(config.width, config.attention)
        self.value = nn.Linear(config.width, config.attention)
        self.out = nn.Linear(config.attention, config.width)

    def forward(self, asking: Tensor, told: Tensor, real: Tensor) -> Tensor:
        query, key, value = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.query(asking), self.key(told), self.value(told))
        )
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=real[:, None, None, :])
        mixed: Tensor = self.out(found.transpose(1, 2).flatten(2))
        return mixed


class Layer(nn.Module):  # type: ignore[misc]
    """Attention and a hidden layer, each after a normalisation and added to what was there."""

    def __init__(self, config: AttentionConfig, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.hidden_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, hidden)
        self.down = nn.Linear(hidden, config.width)

    def forward(self, state: Tensor, told: Tensor | None, real: Tensor) -> Tensor:
        asking = self.attention_norm(state)
        state = state + self.attention(asking, asking if told is None else told, real)
        hidden: Tensor = state + self.down(torch.relu(self.up(self.hidden_norm(state))))
        return hidden


class Teacher(nn.Module):  # type: ignore[misc]
    """A pretrained encoder from a folder or the Hub: the mean of its last states over the real pieces."""

    def __init__(self, source: str) -> None:
        super().__init__()
        from transformers import AutoModel

        self.encoder = AutoModel.from_pretrained(source, dtype=torch.float32)
        self.width = int(self.encoder.config.hidden_size)

    def forward(self, pieces: Tensor) -> Tensor:
        real = (pieces != 0).long()
        states = self.encoder(input_ids=pieces, attention_mask=real).last_hidden_state
        pooled: Tensor = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return pooled


class LengthNet(nn.Module):  # type: ignore[misc]
    """A text encoder with a head."""

    def __init__(self, body: nn.Module, head: HeadConfig, side: Tensor, models: int, ranges: int) -> None:
        """`side` `[prompts, features]` is what its standardisation is measured on."""
        super().__init__()
        self.body = body
        self.head = Head(head, body.width + side.shape[1], models, ranges)
        self.head.mean[body.width :] = side.mean(0)
        self.head.scale[body.width :] = 1.0 / side.std(0).clamp_min(0.02)

    def forward(self, pieces: Tensor, side: Tensor, owner: Tensor, model: Tensor) -> Tensor:
        """Logits `[rows, ranges]`; row i is of prompt `owner[i]` and answered by `model[i]`."""
        return self.told(self.read(pieces), side, owner, model)

    def read(self, pieces: Tensor) -> Tensor:
        """What the encoder makes of each prompt."""
        with torch.autocast(pieces.device.type, torch.bfloat16, enabled=pieces.is_cuda):
            found: Tensor = self.body(pieces)
        return found.float()

    def told(self, read: Tensor, side: Tensor, owner: Tensor, model: Tensor) -> Tensor:
        """Logits from what was read."""
        logits: Tensor = self.head(torch.cat([read, side], 1)[owner], model)
        return logits


def keep_pieces(encoder: nn.Module, kept: Sequence[int]) -> None:
    """Leaves of an encoder's table only the rows of some pieces."""
    table = encoder.embeddings.word_embeddings.weight.detach()
    encoder.embeddings.word_embeddings = nn.Embedding.from_pretrained(table[torch.as_tensor(kept)])


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What is kept of a teacher's layer; before it, `merged` neighbours become one, which lessens its work.

    Where the first layer merges, a piece is its row of the table and no more: places are told to the groups.
    """

    heads: int
    hidden: int
    merged: int = 1


@dataclass(frozen=True, slots=True)
class TrimmedConfig:
    """How much of a teacher a student keeps: its first layers, their strongest heads and neurons."""

    layers: tuple[LayerConfig, ...] = (LayerConfig(6, 768, merged=4), LayerConfig(6, 768))
    queries: int = 4
    query_attention: int = 192
    query_heads: int = 6
    query_hidden: int = 1024


class TrimmedLayer(nn.Module):  # type: ignore[misc]
    """A BERT layer: attention and a hidden layer, each added to what was there and then normalised."""

    def __init__(self, attention: AttentionConfig, kept: LayerConfig) -> None:
        super().__init__()
        width = attention.width
        self.merged = kept.merged
        if kept.merged > 1:
            self.merge = _mean_of(kept.merged, width)
        self.attention = Attention(attention)
        self.attention_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, kept.hidden)
        self.down = nn.Linear(kept.hidden, width)
        self.hidden_norm = nn.LayerNorm(width)

    def forward(self, state: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """New states, and which of them are real."""
        if self.merged > 1:
            state, real = _merged(self.merge, state, real, self.merged)
        state = self.attention_norm(state + self.attention(state, state, real))
        hidden = self.down(functional.gelu(self.up(state), approximate="tanh"))
        added: Tensor = self.hidden_norm(state + hidden)
        return added, real


class Trimmed(nn.Module):  # type: ignore[misc]
    """The beginning of a teacher, trimmed, and a layer where learned queries read its states."""

    def __init__(self, config: TrimmedConfig, teacher: nn.Module) -> None:
        super().__init__()
        self.config = config
        self.table, self.places, self.begin_norm = _beginning(teacher.embeddings)
        self.together = config.layers[0].merged
        layers = config.layers
        if self.together > 1:
            self.merge = _mean_of(self.together, self.table.shape[1])
            self.table = nn.Parameter(self.begin_norm(self.table + self.places.mean(0)).detach())
            self.places = nn.Parameter(torch.zeros(MAX_PIECES // self.together, self.table.shape[1]))
            layers = (replace(layers[0], merged=1), *layers[1:])
        self.layers = nn.ModuleList(map(_trimmed, teacher.encoder.layer, layers))
        reading = AttentionConfig(self.table.shape[1], config.query_attention, config.query_heads)
        self.told_norm = nn.LayerNorm(self.table.shape[1])
        self.queries = nn.Parameter(torch.randn(config.queries, self.table.shape[1]) * 0.5)
        self.reader = Layer(reading, config.query_hidden)
        self.width = config.queries * self.table.shape[1]

    def forward(self, pieces: Tensor) -> Tensor:
        pieces = functional.pad(pieces, (0, -pieces.shape[1] % PAD_MULTIPLE))
        state, real = functional.embedding(pieces, self.table), pieces != 0
        if self.together > 1:
            state, real = _merged(self.merge, state, real, self.together)
        state = self.begin_norm(state + self.places[: state.shape[1]])
        for layer in self.layers:
            state, real = layer(state, real)
        queries = self.queries.expand(len(pieces), -1, -1)
        read: Tensor = self.reader(queries, self.told_norm(state), real)
        return read.flatten(1)


def _beginning(embeddings: nn.Module) -> tuple[nn.Parameter, nn.Parameter, nn.LayerNorm]:
    """A teacher's table of pieces, what it tells of places, and the normalisation of their sum."""
    table = embeddings.word_embeddings.weight.detach().float().clone()
    places = embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]
    norm = _copied(nn.LayerNorm(table.shape[1]), embeddings.LayerNorm)
    return nn.Parameter(table), nn.Parameter(places[:MAX_PIECES].detach().float().clone()), norm


def _merged(merge: nn.Linear, state: Tensor, real: Tensor, together: int) -> tuple[Tensor, Tensor]:
    """States of neighbours as one, and which of them are real."""
    groups = (state * real[..., None]).unflatten(1, (-1, together))
    return merge(groups.flatten(2)), real.unflatten(1, (-1, together)).any(2)


def _mean_of(together: int, width: int) -> nn.Linear:
    """Makes one of some neighbours: begins as their mean, a little different for each place."""
    merge = nn.Linear(together * width, width, bias=False)
    mean = torch.cat([torch.eye(width) / together] * together, 1)
    merge.weight.data = mean + 0.01 * torch.randn_like(mean)
    return merge


def _trimmed(layer: nn.Module, kept: LayerConfig) -> TrimmedLayer:
    """A teacher's layer with its strongest heads and neurons: those of the largest weights in and out."""
    own, up, down = layer.attention, layer.intermediate.dense, layer.output.dense
    head_width = own.self.query.out_features // own.self.num_attention_heads
    strength = own.self.value.weight.norm(dim=1) * own.output.dense.weight.norm(dim=0)
    heads = strength.unflatten(0, (-1, head_width)).sum(1).topk(kept.heads).indices.sort().values
    columns = (heads[:, None] * head_width + torch.arange(head_width)).flatten()
    neurons = (up.weight.norm(dim=1) * down.weight.norm(dim=0)).topk(kept.hidden).indices.sort().values
    width = down.out_features
    trimmed: TrimmedLayer = TrimmedLayer(AttentionConfig(width, len(columns), kept.heads), kept)
    for name in ("query", "key", "value"):
        _cut(getattr(trimmed.attention, name), getattr(own.self, name), rows=columns)
    _cut(trimmed.attention.out, own.output.dense, columns=columns)
    _cut(trimmed.up, up, rows=neurons)
    _cut(trimmed.down, down, columns=neurons)
    _copied(trimmed.attention_norm, own.output.LayerNorm)
    _copied(trimmed.hidden_norm, layer.output.LayerNorm)
    return trimmed


def _cut(to: nn.Linear, source: nn.Linear, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
    """Copies some outputs or some inputs of a linear layer."""
    with torch.no_grad():
        weight, bias = source.weight, source.bias
        if rows is not None:
            weight, bias = weight[rows], bias[rows]
        to.weight.copy_(weight if columns is None else weight[:, columns])
        to.bias.copy_(bias)


def _copied(to: nn.LayerNorm, source: nn.LayerNorm) -> nn.LayerNorm:
    to.load_state_dict(source.state_dict())
    to.eps = source.eps
    return to
