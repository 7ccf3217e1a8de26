"""Train one adapter in slices that the caller runs one at a time, whenever the device is idle.

Synchronous: no threads, no sleeping, no files. The adapter does not depend on when the slices run; on a CPU
it is bit-identical.
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
"""Number of consecutive steps with non-finite gradients after which the job fails."""
SNAPSHOT_INTERVAL_S = 300.0
MIN_TRAIN_TOKENS = 256
"""Minimum tokens of a micro-batch whose size is fitted. A GPU computes fewer tokens no faster."""
NEARLY = 0.95
"""Fraction of the best throughput that a smaller micro-batch size must reach to be chosen."""
BETWEEN_SLICES_S = 1e-4
"""Seconds of the engine's loop between two slices, which the slice times do not include."""
REHEARSED_LAYERS = 3
"""Number of layers whose backward pass is run, twice, to measure the slice times of a micro-batch size."""
Event: TypeAlias = StepDone | Snapshot | Failed


class Trainer:
    """Train an adapter on a dataset, one slice per call of `run_slice`.

    `about` identifies base model and data by digest; a snapshot can be resumed only with an equal `about` and
    recipe. `train_tokens` is the maximum size of a micro-batch; it is halved once if memory runs out. With
    `slice_s`, `warm_up` chooses the smallest efficient size up to `train_tokens` whose layer slices take at
    most `slice_s` each; without it, the order of summation is the same on every machine. With `padded`, each
    micro-batch is padded to one of a few warmed-up sizes. `costs` holds the slice times of earlier jobs with
    adapters of this shape. Raises TrainingRefused.
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
        self._made: tuple[float, float] | None = None  # loss and accuracy of a step not yet reported
        self._size = self._sizes[0]  # of the current micro-batch
        self._snapshot_s, self._snapshot_interval_s = clock(), snapshot_interval_s
        self._slices = self._run()
        self.ended = self.step == self.total_steps
        self._next: Slice = next(self._slices, Slice.UPDATE)
        if self.ended:
            self._events.append(self.snapshot())

    # ---- between slices

    @property
    def train_tokens(self) -> int:
        """The maximum number of tokens in a micro-batch. A longer example forms a micro-batch of its own."""
        return self._train_tokens

    @property
    def following(self) -> NextSlice:
        """The expected duration of the next slice."""
        cost = partial(self._costs.seconds, size=self._size, now_s=self._clock())
        whole_s = len(self._model.layers) * sum(map(cost, LAYER_SLICES))
        return NextSlice(cost(self._next), whole_s, self._next is Slice.BEGIN)

    def run_slice(self, *, ahead: bool = False) -> float:
        """Run the next slice and return its duration in seconds. An error ends the job with a Failed event.

        The first lack of memory halves `train_tokens` instead. With `ahead`, the call waits only for the
        previous slice and returns its duration, so a GPU may compute this slice while the next is launched.
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
        except Exception as error:  # noqa: BLE001 - a failing job must not stop serving
            self._fail(f"{type(error).__name__}: {error}")
        with released():
            self._model.wait(slices=1 if ahead else 0)
            ended = self._clock()
        self._costs.observe(kind, size, ended - began, ended)
        return ended - began

    def warm_up(self) -> None:
        """Choose the micro-batch size; run micro-batches of each size and an update, discarding the results.

        Slices that run between inference steps then neither compile nor allocate, and their durations are
        known. Sizes whose durations are known from other jobs are skipped.
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
        """Return the state after the last step. A resumed job recomputes the current step's gradients."""
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
        """Run the slices of `warm_up`, then those of the job."""
        if self._slice_s is not None:
            self._train_tokens = yield from self._fit(self._slice_s)
        self._sizes = sizes_up_to(self._train_tokens, self._longest)
        sizes = self._sizes if self._padded else (self._train_tokens,)
        for size in reversed(sizes):  # the largest allocates memory that the others reuse
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
        """Run optimizer steps on copies of the factors, and take a snapshot."""
        spare, self._size = Optimizer([each.detach().clone() for each in self.adapter.parameters()]), 0
        for _ in range(3):
            yield Slice.UPDATE
            spare.step(0.0)
            self._model.forget_factors()
        self.snapshot()

    def _fit(self, slice_s: float) -> Generator[Slice, None, int]:
        """Return the smallest micro-batch size in tokens that has at least NEARLY of the best throughput.

        Sizes that exceed the memory, or with a layer slice longer than `slice_s`, are excluded; the first is
        excluded by neither.
        """
        speeds = dict[int, float]()  # tokens per second, by size
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
        """Run a micro-batch of `size` tokens twice, up to the backward pass of REHEARSED_LAYERS layers."""
        examples = self._some(size)
        for _ in range(2 if examples else 0):
            packed = self._packed(examples, size)
            slices = run_micro_batch(self._model, self.adapter, self._adapted, packed, 1)
            with closing(slices):
                backward = 0
                for kind in slices:
                    backward += kind is Slice.BACKWARD
                    if backward > REHEARSED_LAYERS:  # each yielded slice is timed and must be computed
                        break
                    yield kind

    def _some(self, size: int) -> list[Example]:
        """Return examples that fit a micro-batch of `size` tokens: the shortest ones, at most a batch.

        For a size above `train_tokens`, return only the longest example that fits.
        """
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
            else:  # memory ran out after the update, which must not be repeated
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
        """Validate at the end of an epoch, and report the last step. Fail after MAX_SKIPPED skipped steps."""
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
        """Run one micro-batch per group of example indices and sum losses, hits and, in place, gradients."""
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
            del result  # free its gradients before the next are allocated
        return total

    def _packed(self, examples: Sequence[Example], size: int | None = None) -> Packed:
        """Pack examples into a micro-batch of `size` tokens, by default the smallest size that fits them."""
        packed = pack(examples)
        self._size = size or fitting_size(self._sizes, len(packed.ids))
        return pad(packed, self._size, self._model.head_tokens) if self._padded else packed

    def _update(self) -> bool:
        """Run an optimizer step and return True. If a gradient is not finite, skip it and return False."""
        finite = self._optimizer.step(self.recipe.learning_rate_at(self.step, self.total_steps))
        if finite:
            self._model.forget_factors()  # the fused optimizer does not increment tensor versions
        self._skipped = 0 if finite else self._skipped + 1
        return finite

    def _validate(self) -> Generator[Slice, None, float | None]:
        if not self.valid_examples:
            return None
        groups = micro_batches([len(each.ids) for each in self.valid_examples], self._train_tokens)
        total = yield from self._passes(self.valid_examples, groups, self._valid_count, backward=False)
        return total.loss_sum / self._valid_count

    def _after_lack_of_memory(self) -> None:
        """Restart the step with half the tokens per micro-batch. Fail if the size was halved before."""
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
