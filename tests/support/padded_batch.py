"""MICO's padded batch (section 3.4) as a runner: every pass adds columns to all rows; masks hide the padding.

Corrected: dead places stay finite and the score mask hides them, positions count a row's own tokens, a window
looks at positions and not at columns. For comparison: does not page or share, and padding may take several
times the room of the tokens. With the policy "static" it is the batch that ends as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F  # noqa: N812 - torch's own convention

from site_engine.core.request import Request
from site_engine.core.schedule_plan import ScheduledChunk, SchedulePlan
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model import attention_context
from site_engine.model.attention_context import Scoring
from site_engine.model.kv_cache import KVCache, LayerShape
from site_engine.model.loader import LoadedModel
from site_engine.model.runner import Forward, Logits, split_logits, wants_prompt_logprobs
from site_engine.model.torch_attention import additive_mask, scaled_attention

FIRST_COLUMNS = 256


def padded_engine(
    model: LoadedModel, settings: EngineSettings, clock: Callable[[], float], *, apart: bool = False
) -> SiteEngine:
    """Build an engine over a padded batch. Its page pool counts tokens for admission and holds none.

    With `apart` a prompt is computed on its own and its keys and values are put in ("decoupled"), instead of
    adding its length in columns to every row.
    """
    if settings.prefix_cache or settings.debug_poison:
        raise ValueError("prefix_cache and debug_poison need pages, a padded batch has none")
    return SiteEngine(model, PaddedRunner(model, settings, apart=apart), settings, clock)


class Columns:
    """Keys and values of `rows` rows, `[rows, kv_heads, column, dim]` per layer. `valid` [rows, column] says
    which places hold a token of their row; the others hold anything finite. In use are `begin` to `end`.
    """

    def __init__(
        self, layers: Sequence[LayerShape], rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def room(shape: LayerShape, dim: int) -> torch.Tensor:
            return torch.zeros(rows, shape.kv_heads, FIRST_COLUMNS, dim, dtype=dtype, device=device)

        self.rows = rows
        self.begin = self.end = 0
        self.valid = torch.zeros(rows, FIRST_COLUMNS, dtype=torch.bool)
        self.keys = [room(shape, shape.key_dim) for shape in layers]
        self.values = [room(shape, shape.value_dim) for shape in layers]

    @property
    def length(self) -> int:
        return self.end - self.begin

    def tokens(self, row: int) -> int:
        return int(self.valid[row, self.begin : self.end].sum())

    def keep(self, row: int, tokens: int) -> None:
        """Keep only the first tokens of a row, and no number of an emptied row."""
        own = self.valid[row, self.begin : self.end]
        own &= own.cumsum(0) <= tokens
        if tokens == 0:
            for room in (*self.keys, *self.values):
                room[row, :, self.begin : self.end] = 0.0

    def release(self) -> None:
        """Give up the columns before the first that any row still needs."""
        used = self.valid[:, self.begin : self.end].any(0)
        leading = int(used.int().argmax()) if bool(used.any()) else self.length
        self.begin += leading
        if self.begin == self.end:
            self.begin = self.end = 0

    def make_room(self, columns: int) -> None:
        """Make room for columns after the end, by moving the used ones to the front or into larger memory."""
        capacity = self.valid.shape[1]
        if self.end + columns <= capacity:
            return
        larger = capacity
        while 2 * (self.length + columns) > larger:  # half stays free, so that moving is rare
            larger *= 2
        self.valid = self._moved(self.valid[..., None], larger)[..., 0]
        self.keys = [self._moved(room, larger) for room in self.keys]
        self.values = [self._moved(room, larger) for room in self.values]
        self.begin, self.end = 0, self.length

    def _moved(self, room: torch.Tensor, columns: int) -> torch.Tensor:
        return F.pad(room[..., self.begin : self.end, :], (0, 0, 0, columns - self.length))

    def put(self, row: int, other: Columns) -> None:
        """Another batch's only row goes to the last columns of an empty row; columns are added if too few."""
        short = other.length - self.length
        if short > 0:
            self.make_room(short)
            self.end += short
            self._open_left(short)
        last, whole = slice(self.end - other.length, self.end), slice(other.begin, other.end)
        self.valid[row, last] = other.valid[0, whole]
        rooms = zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True)
        for room, kept in rooms:
            room[row, :, last] = kept[0, :, whole]

    def _open_left(self, columns: int) -> None:
        """Move all rows right, into columns just added at the end; those that open at the left are empty."""
        begin, end = self.begin, self.end
        for room in (self.valid[..., None], *self.keys, *self.values):
            moved = room[..., begin : end - columns, :].clone()
            room[..., begin : begin + columns, :] = 0
            room[..., begin + columns : end, :] = moved


class PaddedContext:
    """One pass over all rows: `fresh` [rows, width] says where its new columns hold a token."""

    def __init__(self, columns: Columns, fresh: torch.Tensor) -> None:
        self.layer = 0
        self._columns = columns
        self._width = fresh.shape[1]
        columns.make_room(self._width)
        self._end = columns.end + self._width
        self._valid = torch.cat([columns.valid[:, columns.begin : columns.end], fresh], dim=1)
        self._places = (self._valid.cumsum(1) - 1).clamp_(min=0)
        self._masks: dict[tuple[int | None, int, torch.dtype], torch.Tensor] = {}

    @property
    def positions(self) -> torch.Tensor:
        """[rows, width]: the place of each new token among its row's own."""
        return self._places[:, -self._width :]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        columns = self._columns
        keys, values = columns.keys[self.layer], columns.values[self.layer]
        keys[:, :, columns.end : self._end] = self._by_row(key)
        values[:, :, columns.end : self._end] = self._by_row(value)
        k, v = keys[:, :, columns.begin : self._end], values[:, :, columns.begin : self._end]
        q = self._by_row(query).reshape(columns.rows, k.shape[1], -1, query.shape[2])
        group = query.shape[0] // key.shape[0]
        sinks = None
        if scoring.sinks is not None:
            sinks = scoring.sinks.view(1, k.shape[1], group, 1).repeat_interleave(self._width, 2)
        mask = self._mask(scoring.window, group, query)
        out = scaled_attention(q, k, v, mask, scoring._replace(sinks=sinks))
        self.layer += 1
        return out.reshape(columns.rows, query.shape[0], self._width, -1).transpose(1, 2).flatten(0, 1)

    def _by_row(self, packed: torch.Tensor) -> torch.Tensor:
        """[heads, rows x width, dim] -> [rows, heads, width, dim]"""
        return packed.unflatten(1, (self._columns.rows, self._width)).transpose(0, 1)

    def _mask(self, window: int | None, group: int, like: torch.Tensor) -> torch.Tensor:
        """[rows, 1, group x width, columns]: the heads of a group are queries of their KV head."""
        mask = self._masks.get((window, group, like.dtype))
        if mask is None:
            column = torch.arange(self._valid.shape[1])
            seen = self._valid[:, None] & (column <= column[-self._width :, None])
            if window is not None:
                seen &= self.positions[:, :, None] - self._places[:, None] < window
            seen |= ~seen.any(-1, keepdim=True)  # padding reads whatever is there: it has to stay finite
            added = additive_mask(seen.to(like.device), like.dtype)[:, None]
            mask = self._masks[window, group, like.dtype] = added.repeat(1, 1, group, 1)
        return mask


class PaddedRunner:
    """The rows of a batch are seats; a request sits in the row the scheduler gave it.

    Counts `passes` through the model, `kv_length` in columns and `kv_places` in columns times rows, both
    summed over passes, and `computed`, the tokens and the padding that went through the layers.
    """

    def __init__(self, model: LoadedModel, settings: EngineSettings, *, apart: bool) -> None:
        rows, capacity = settings.slots, settings.kv_tokens or settings.slots * model.context_tokens
        pages = capacity // settings.page_size
        self.kv_cache = KVCache(
            [], pages, settings.page_size, model.dtype, model.device
        )  # counts, holds nothing
        self._forward: Forward = model.forward
        self._model = model
        self._apart = apart
        self._columns = Columns(model.layers, rows, model.dtype, model.device)
        self._seats: list[Request | None] = [None] * rows
        self.passes = self.kv_length = self.kv_places = self.computed = 0

    def run(self, plan: SchedulePlan) -> Logits:
        """Compute a plan. Running the same entries twice is harmless: what a row holds beyond them is cut."""
        self._seat(plan.chunks)
        self._columns.release()
        apart = [entry for entry in plan.prefills if self._apart and entry.start == 0]
        joint = [entry for entry in plan.chunks if entry not in apart]
        rows = dict(zip(joint, self._pass(self._columns, joint), strict=True)) if joint else {}
        for entry in apart:
            alone = Columns(self._model.layers, 1, self._model.dtype, self._model.device)
            rows[entry] = self._pass(alone, [entry])[0]
            self._columns.put(entry.request.row, alone)
        return split_logits(plan, torch.cat([rows[entry] for entry in plan.chunks]))

    def _seat(self, entries: list[ScheduledChunk]) -> None:
        """Empty the rows whose request is gone, and bring the others to where their entries start."""
        for row, request in enumerate(self._seats):
            if request is not None and request.row != row:
                self._columns.keep(row, 0)
                self._seats[row] = None
        for entry in entries:
            row = entry.request.row
            held = self._columns.tokens(row)
            if held < entry.start:
                raise RuntimeError(f"row {row} holds {held} tokens, its request goes on after {entry.start}")
            if held > entry.start:
                self._columns.keep(row, entry.start)
            self._seats[row] = entry.request

    def _pass(self, columns: Columns, entries: list[ScheduledChunk]) -> list[torch.Tensor]:
        """Return the requested logits of each entry, `[places, vocabulary]`, from its last columns."""
        width = max(entry.length for entry in entries)
        ids = torch.zeros(columns.rows, width, dtype=torch.long)
        fresh = torch.zeros(columns.rows, width, dtype=torch.bool)
        wanted: list[int] = []
        counts = []
        for request, start, length, samples in entries:
            row = request.row if columns is self._columns else 0
            ids[row, width - length :] = torch.tensor(request.tokens[start : start + length])
            fresh[row, width - length :] = True
            end = (row + 1) * width
            entry = ScheduledChunk(request, start, length, samples)
            counts.append(length if wants_prompt_logprobs(entry) else int(samples))
            wanted += range(end - counts[-1], end)
        step = PaddedContext(columns, fresh)
        device = self._model.device
        with torch.inference_mode(), attention_context.use(step):
            logits = self._forward(
                ids.view(1, -1).to(device),
                step.positions.reshape(1, -1).to(device),
                torch.tensor(wanted or [0], device=device),
            )
        columns.valid[:, columns.end : columns.end + width] = fresh
        columns.end += width
        self._count(columns, width)
        return list(logits[: len(wanted)].split(counts))

    def _count(self, columns: Columns, width: int) -> None:
        self.passes += 1
        self.kv_length += columns.length
        self.kv_places += columns.length * columns.rows
        self.computed += width * columns.rows
