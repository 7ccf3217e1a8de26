"""Train one adapter in slices that its caller runs one at a time, whenever there is time.

Plain and synchronous: no threads, no sleeping, no files. However the slices are spread, the adapter is the
same, bit by bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from site_engine.core.loader_turns import pause, released
from site_engine.core.slack import NextSlice, SliceCosts
from site_engine.core.training import Failed, Recipe, StepDone
from site_engine.errors import TrainingRefused
from site_engine.training.adapter import new_adapter
from site_engine.training.data import Dataset, Example
from site_engine.training.micro_batch import MicroBatch, run_micro_batch
from site_engine.training.optimizer import Optimizer
from site_engine.training.packing import (
    Packed,
    batch_at,
    fitting_size,
    micro_batches,
    pack,
    pad,
    sizes_up_to,
)
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.slices import LAYER_SLICES, Slice
from site_engine.training.snapshot import Snapshot

MAX_SKIPPED = 3
"""Steps in a row whose gradients were not finite; the job fails with the last of them."""
SNAPSHOT_INTERVAL_S = 300.0
MIN_TRAIN_TOKENS = 256
"""Of a micro-batch whose size is fitted: a GPU computes fewer no faster."""
NEARLY = 0.95
"""Share of the best speed that a size must have to be preferred for its shorter slices."""
BETWEEN_SLICES_S = 1e-4
"""Of the engine's loop, which the times of slices leave out."""
REHEARSED_LAYERS = 3
"""Computed backward, twice, to see how long slices of a size take."""
Event: TypeAlias = StepDone | Snapshot | Failed


class Trainer:
    """`about` names base and data by digest; a snapshot goes on only with the same, and the same recipe.

    `train_tokens` bounds a micro-batch, and is halved once if memory runs out. With `slice_s` it is the most:
    `warm_up` fits it so that no slice of a layer takes longer than that, and to no more than pays;
    without, sums have the same order everywhere. With `padded` each micro-batch is padded to one of a few
    sizes, so that none has one that was not warmed up. `costs`: what slices took of other jobs with adapters
    of this shape. Raises TrainingRefused.
    """

    def __init__(
        self,
        model: SlicedModel,
        data: Dataset,
        recipe: Recipe,
        *,
        about: Mapping[str, Any],
        clock: Callable[[], float],
        valid: Dataset | None = None,
        resumed: Snapshot | None = None,
        train_tokens: int = 2048,
        slice_s: float | None = None,
        padded: bool = False,
        costs: SliceCosts | None = None,
        snapshot_interval_s: float = SNAPSHOT_INTERVAL_S,
    ) -> None:
        self.recipe = recipe
        self.step = 0
        self.total_steps = recipe.total_steps(len(data.examples))
        self.trained_tokens = 0
        self.adapter = new_adapter(model.targets(recipe.shape), recipe.shape, recipe.seed)
        self._about = {**about, "recipe": recipe.as_dict()}
        self.examples = data.examples
        self.valid_examples = () if valid is None else valid.examples
        self._valid_count = sum(int(each.learned.sum()) for each in self.valid_examples)
        self._model, self._clock = model, clock
        self._train_tokens, self._halved, self._skipped = train_tokens, False, 0
        self._slice_s, self._padded, self._rehearses = slice_s, padded, False
        self._longest = max(len(each.ids) for each in (*self.examples, *self.valid_examples))
        self._sizes = sizes_up_to(train_tokens, self._longest)
        self._optimizer = Optimizer(self.adapter.parameters())
        if resumed is not None:
            self._restore(resumed)
        self._adapted = model.attach(self.adapter)
        self._events: list[Event] = []
        self._costs = self._known = SliceCosts() if costs is None else costs
        self._made: tuple[float, float] | None = None  # loss and accuracy of a step that is not told yet
        self._size = self._sizes[0]  # of the micro-batch that runs
        self._snapshot_s, self._snapshot_interval_s = clock(), snapshot_interval_s
        self._slices = self._run()
        self.ended = self.step == self.total_steps
        self._next: Slice = next(self._slices, Slice.UPDATE)
        if self.ended:
            self._events.append(self.snapshot())

    # ---- between slices

    @property
    def train_tokens(self) -> int:
        """The most tokens of a micro-batch, but for a longer example."""
        return self._train_tokens

    @property
    def following(self) -> NextSlice:
        """What the next slice is expected to take."""
        cost = partial(self._costs.seconds, size=self._size, now_s=self._clock())
        whole_s = len(self._model.layers) * sum(map(cost, LAYER_SLICES))
        return NextSlice(cost(self._next), whole_s, self._next is Slice.BEGIN)

    def run_slice(self, *, ahead: bool = False) -> float:
        """Run the next slice and return its seconds. What it raises is the end of the job, as an event.

        With `ahead`, a GPU may still compute the slice while the next one is launched; the seconds are those
        of the slice before.
        """
        if self.ended:
            return 0.0
        began, kind, size = self._clock(), self._next, self._size
        try:
            self._next = next(self._slices)
        except StopIteration:
            self.ended = True
        except (MemoryError, torch.OutOfMemoryError):
            self._after_lack_of_memory()
        except Exception as error:  # noqa: BLE001 - a job's fault must not cost what is served
            self._fail(f"{type(error).__name__}: {error}")
        with released():
            self._model.wait(slices=1 if ahead else 0)
            ended = self._clock()
        self._costs.observe(kind, size, ended - began, ended)
        return ended - began

    def warm_up(self) -> None:
        """Fit the size of micro-batches, and compute some of each size, and an update, for nothing: slices
        beside answers then compile and allocate nothing, and what they take is known. What is known of other
        jobs is left out.
        """
        known, self._costs, self._rehearses = self._costs, SliceCosts(), True
        self._known = known
        self._slices = self._rehearsal()
        self._next = next(self._slices)
        while self._rehearses and not self.ended:
            pause()
            self.run_slice()
        known.adopt(self._costs)
        self._costs = known

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self) -> Snapshot:
        """Return the state after the last step; the gradients of the step that runs are computed again."""
        tensors = self._optimizer.copies(self.adapter.names)
        return Snapshot(self.step, {**self._about, "trained_tokens": self.trained_tokens}, tensors)

    def _restore(self, resumed: Snapshot) -> None:
        about = {**resumed.about}
        self.trained_tokens = int(about.pop("trained_tokens", 0))
        changed = sorted(
            name for name in about.keys() | self._about if about.get(name) != self._about.get(name)
        )
        if changed or not 0 <= resumed.step <= self.total_steps:
            raise TrainingRefused(f"the snapshot is of another job: {', '.join(changed) or 'steps'} differ")
        self.step = resumed.step
        try:
            self._optimizer.restore(self.adapter.names, resumed.tensors)
        except (KeyError, RuntimeError) as error:
            raise TrainingRefused(f"the snapshot is not whole: {error}") from error

    # ---- the job, slice by slice

    def _rehearsal(self) -> Generator[Slice, None, None]:
        """What `warm_up` runs, and then the job."""
        if self._slice_s is not None:
            self._train_tokens = yield from self._fit(self._slice_s)
        self._sizes = sizes_up_to(self._train_tokens, self._longest)
        sizes = self._sizes if self._padded else (self._train_tokens,)
        for size in reversed(sizes):  # the first allocates what the others use, too
            if self._known.knows(Slice.BACKWARD, size):
                continue
            if self._padded:
                examples = self._some(size)
                groups = [range(len(examples))] * 2 if examples else []
                yield from self._passes(examples, groups, 1, size=size)
            else:
                yield from self._rehearse(size)
        if not self._known.knows(Slice.UPDATE, 0):
            yield from self._rehearse_update()
        self._rehearses = False
        yield from self._run()

    def _rehearse_update(self) -> Generator[Slice, None, None]:
        """Make steps of spare factors, and a snapshot."""
        spare, self._size = Optimizer([each.detach().clone() for each in self.adapter.parameters()]), 0
        for _ in range(3):
            yield Slice.UPDATE
            spare.step(0.0)
            self._model.forget_factors()
        self.snapshot()

    def _fit(self, slice_s: float) -> Generator[Slice, None, int]:
        """Return the tokens of a micro-batch: the fewest that are computed nearly as fast as any for which
        there is memory and of which no slice of a layer takes longer than `slice_s`.
        """
        speeds = dict[int, float]()  # tokens a second, by size
        tokens = min(MIN_TRAIN_TOKENS, self._train_tokens)
        while tokens <= self._train_tokens:
            try:
                yield from self._rehearse(tokens)
            except (MemoryError, torch.OutOfMemoryError):
                if not speeds:
                    raise
                break
            taken_s = [self._costs.least_s(kind, tokens) for kind in LAYER_SLICES]
            if speeds and max(taken_s) > slice_s:
                break
            between_s = BETWEEN_SLICES_S * sum(each > 0.0 for each in taken_s)
            speeds[tokens] = tokens / (sum(taken_s) + between_s or 1.0)
            tokens *= 2
        return min(size for size, speed in speeds.items() if speed >= NEARLY * max(speeds.values()))

    def _rehearse(self, size: int) -> Generator[Slice, None, None]:
        """Compute a micro-batch of a size up to some layers backward, twice."""
        examples = self._some(size)
        for _ in range(2 if examples else 0):
            packed = self._packed(examples, size)
            slices = run_micro_batch(self._model, self.adapter, self._adapted, packed, 1)
            with closing(slices):
                backward = 0
                for kind in slices:
                    backward += kind is Slice.BACKWARD
                    if backward > REHEARSED_LAYERS:  # what is yielded is timed, and must be computed
                        break
                    yield kind

    def _some(self, size: int) -> list[Example]:
        """Return as many examples as a micro-batch of a size can have: the shortest, or a long one."""
        fitting = sorted(
            (each for each in self.examples if len(each.ids) <= size), key=lambda each: len(each.ids)
        )
        if size > self._train_tokens:
            return fitting[-1:]
        ends = accumulate(len(each.ids) for each in fitting[: self.recipe.batch_size])
        return [each for each, end in zip(fitting, ends, strict=False) if end <= size]

    def _run(self) -> Generator[Slice, None, None]:
        while not self.ended and (self._made is not None or self.step < self.total_steps):
            if self._made is None:
                yield from self._make_step()
            else:  # memory ran out after its update, which is not made again
                self._size = 0
                yield Slice.UPDATE
            yield from self._end_step()

    def _make_step(self) -> Generator[Slice, None, None]:
        examples = self.examples
        batch = [examples[number] for number in batch_at(self.step, len(examples), self.recipe)]
        count = sum(int(example.learned.sum()) for example in batch)
        groups = micro_batches([len(example.ids) for example in batch], self._train_tokens)
        total = yield from self._passes(batch, groups, count)
        self._size = 0
        yield Slice.UPDATE
        loss, accuracy = total.loss_sum / count, total.correct / count
        if not self._update():
            loss = float("nan")
        self.step += 1
        self.trained_tokens += sum(len(example.ids) for example in batch)
        self._made = loss, accuracy

    def _end_step(self) -> Generator[Slice, None, None]:
        """Validate after an epoch, and tell of the step that was made last."""
        assert self._made is not None
        epoch_ends = self.step % self.recipe.steps_per_epoch(len(self.examples)) == 0
        valid_loss = (yield from self._validate()) if epoch_ends else None
        done = StepDone(self.step, self.total_steps, *self._made, self.trained_tokens, valid_loss)
        fails = self._skipped >= MAX_SKIPPED
        is_due = epoch_ends or self._clock() - self._snapshot_s >= self._snapshot_interval_s
        saved = [self.snapshot()] if is_due and not fails else []
        self._events += [done, *saved]
        self._made = None
        if saved:
            self._snapshot_s = self._clock()
        if fails:
            self._fail(f"the gradients of {MAX_SKIPPED} steps in a row were not finite")

    def _passes(
        self,
        examples: Sequence[Example],
        groups: Iterable[Sequence[int]],
        count: int,
        *,
        size: int | None = None,
        backward: bool = True,
    ) -> Generator[Slice, None, MicroBatch]:
        """Run micro-batches, the groups of examples, and add up what they give: gradients in place."""
        total, sums_up = MicroBatch(), torch._foreach_copy_
        for group in groups:
            packed = self._packed([examples[number] for number in group], size)
            result = yield from run_micro_batch(
                self._model, self.adapter, self._adapted, packed, count, backward=backward
            )
            total.sums += result.sums
            if result.gradients:
                sums_up(self._optimizer.gradients, result.gradients)
                sums_up = torch._foreach_add_
            del result  # its gradients, before the next makes its own
        return total

    def _packed(self, examples: Sequence[Example], size: int | None = None) -> Packed:
        """Pack examples into a micro-batch; `size`: instead of the smallest that holds them."""
        packed = pack(examples)
        self._size = size or fitting_size(self._sizes, len(packed.ids))
        return pad(packed, self._size, self._model.head_tokens) if self._padded else packed

    def _update(self) -> bool:
        """Make an optimizer step; leave it out if a gradient is not finite and return False."""
        finite = self._optimizer.step(self.recipe.learning_rate_at(self.step, self.total_steps))
        if finite:
            self._model.forget_factors()  # the fused optimizer does not count up their versions
        self._skipped = 0 if finite else self._skipped + 1
        return finite

    def _validate(self) -> Generator[Slice, None, float | None]:
        if not self.valid_examples:
            return None
        groups = micro_batches([len(each.ids) for each in self.valid_examples], self._train_tokens)
        total = yield from self._passes(self.valid_examples, groups, self._valid_count, backward=False)
        return total.loss_sum / self._valid_count

    def _after_lack_of_memory(self) -> None:
        """Compute the step again in micro-batches of half the tokens; fail if that was tried before."""
        self._slices.close()
        if self._halved:
            self._fail("the device has too little memory beside what it serves", elsewhere=True)
            return
        self._halved, self._train_tokens = True, max(1, self._train_tokens // 2)
        self._slices = self._rehearsal() if self._rehearses else self._run()
        self._next = next(self._slices)

    def _fail(self, reason: str, *, elsewhere: bool = False) -> None:
        self._events.append(Failed(reason, elsewhere))
        self.ended = True
