"""Train one adapter in slices that its caller runs one at a time, whenever there is time.

Plain and synchronous: no threads, no sleeping, no files. However the slices are spread, and however often a
micro-batch is dropped and computed again, the adapter is the same, bit by bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch

from site_engine.core.slack import NextSlice, SliceCosts, fitted_tokens
from site_engine.core.training import Failed, Recipe, StepDone
from site_engine.errors import TrainingRefused
from site_engine.training.adapter import new_adapter
from site_engine.training.data import Dataset, Example
from site_engine.training.micro_batch import MicroBatch, Slice, Slices, run_micro_batch
from site_engine.training.packing import batch_at, micro_batches, pack
from site_engine.training.sliced_model import SlicedModel
from site_engine.training.snapshot import Snapshot

MAX_GRADIENT_NORM = 1.0
MAX_SKIPPED = 3
"""Steps in a row whose gradients were not finite; the job fails with the last of them."""
SNAPSHOT_INTERVAL_S = 300.0
Event: TypeAlias = StepDone | Snapshot | Failed


class Trainer:
    """`about` names base and data by digest; a snapshot goes on only with the same, and the same recipe.

    `train_tokens` bounds a micro-batch, and is halved once if memory runs out. With `slice_s` it is fitted
    before each step so that a layer's backward pass, the longest kind of slice, takes about as long as that;
    without it, sums have the same order everywhere. Raises TrainingRefused.
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
        self._valid_groups = micro_batches([len(each.ids) for each in self.valid_examples], train_tokens)
        self._valid_count = sum(int(each.learned.sum()) for each in self.valid_examples)
        self._model, self._clock = model, clock
        self._train_tokens, self._halved, self._skipped = train_tokens, False, 0
        self._slice_s = slice_s
        self._backward_s: dict[int, list[float]] = {}  # of this step's slices, by the micro-batch's tokens
        self._optimizer = torch.optim.AdamW(
            self.adapter.parameters(),
            recipe.learning_rate,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=0.0,
            fused=model.device.type == "cuda",  # one launch instead of hundreds
        )
        if resumed is not None:
            self._restore(resumed)
        self._adapted = model.attach(self.adapter)
        self._events: list[Event] = []
        self._costs = SliceCosts()
        self._micro: Slices | None = None
        self._tokens = 1  # of the micro-batch that runs
        self._snapshot_s, self._snapshot_interval_s = clock(), snapshot_interval_s
        self._slices = self._run()
        self.ended = self.step == self.total_steps
        self._next: Slice = next(self._slices, Slice.UPDATE)
        if self.ended:
            self._events.append(self.snapshot())

    # ---- between slices

    @property
    def following(self) -> NextSlice:
        """What the next slice is expected to take."""
        cost, layers = (
            partial(self._costs.seconds, tokens=self._tokens, now_s=self._clock()),
            self._model.layers,
        )
        whole_s = len(layers) * (cost(Slice.FORWARD) + cost(Slice.BACKWARD))
        return NextSlice(cost(self._next), whole_s, self._next is Slice.BEGIN)

    def run_slice(self, *, ahead: bool = False) -> float:
        """Run the next slice and return its seconds. What it raises is the end of the job, as an event.

        With `ahead`, a GPU may still compute the slice while the next one is launched; the seconds are those
        of the slice before.
        """
        if self.ended:
            return 0.0
        began, kind, tokens = self._clock(), self._next, self._tokens
        try:
            self._next = next(self._slices)
        except StopIteration:
            self.ended = True
        except (MemoryError, torch.OutOfMemoryError):
            self._after_lack_of_memory()
        except Exception as error:  # noqa: BLE001 - a job's fault must not cost what is served
            self._fail(f"{type(error).__name__}: {error}")
        self._model.wait(slices=1 if ahead else 0)
        ended = self._clock()
        if kind is Slice.BACKWARD:
            self._backward_s.setdefault(tokens, []).append(ended - began)
        self._costs.observe(kind, tokens, ended - began, ended)
        return ended - began

    def drop(self) -> None:
        """Free what the running micro-batch keeps; it is computed again from its beginning."""
        if self._micro is not None:
            self._micro.close()
            self._next = Slice.BEGIN

    def warm_up(self) -> None:
        """Compute the first micro-batch up to its second backward slice, twice, and drop it: slices beside
        answers then compile nothing, and what they take is known.
        """
        for _ in range(2):
            backward = 0
            while backward < 2 and self._next is not Slice.UPDATE and not self.ended:
                backward += self._next is Slice.BACKWARD
                self.run_slice()
            self.drop()
        self._backward_s.clear()

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def snapshot(self) -> Snapshot:
        """Return the state after the last step; the gradients of the step that runs are computed again."""
        tensors = self.adapter.tensors()
        for name, parameter in zip(list(tensors), self.adapter.parameters(), strict=True):
            for moment, value in self._optimizer.state[parameter].items():
                tensors[f"{moment}.{name}"] = value.detach().clone()
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
        names = list(self.adapter.tensors())
        try:
            with torch.no_grad():
                for name, parameter in zip(names, self.adapter.parameters(), strict=True):
                    parameter.copy_(resumed.tensors[name])
                    moments = {
                        moment: resumed.tensors[f"{moment}.{name}"]
                        for moment in ("step", "exp_avg", "exp_avg_sq")
                        if f"{moment}.{name}" in resumed.tensors
                    }
                    if moments:
                        self._optimizer.state[parameter] = {
                            moment: value.clone().to(parameter.device) for moment, value in moments.items()
                        }
        except (KeyError, RuntimeError) as error:
            raise TrainingRefused(f"the snapshot is not whole: {error}") from error

    # ---- the job, slice by slice

    def _run(self) -> Generator[Slice, None, None]:
        examples = self.examples
        while self.step < self.total_steps:
            if self._slice_s is not None and self._backward_s and not self._halved:
                tokens = max(self._backward_s)
                self._train_tokens = fitted_tokens(tokens, median(self._backward_s[tokens]), self._slice_s)
            self._backward_s.clear()
            numbers = batch_at(self.step, len(examples), self.recipe)
            batch = [examples[number] for number in numbers]
            count = sum(int(example.learned.sum()) for example in batch)
            groups = micro_batches([len(example.ids) for example in batch], self._train_tokens)
            total = yield from self._passes(batch, groups, count)
            yield Slice.UPDATE
            loss = total.loss_sum / count
            if not self._update(total.gradients):
                loss = float("nan")
            self.step += 1
            self.trained_tokens += sum(len(example.ids) for example in batch)
            epoch_ends = self.step % self.recipe.steps_per_epoch(len(examples)) == 0
            valid_loss = (yield from self._validate()) if epoch_ends else None
            done = StepDone(
                self.step, self.total_steps, loss, total.correct / count, self.trained_tokens, valid_loss
            )
            self._events.append(done)
            if self._skipped >= MAX_SKIPPED:
                self._fail(f"the gradients of {MAX_SKIPPED} steps in a row were not finite")
                return
            if epoch_ends or self._clock() - self._snapshot_s >= self._snapshot_interval_s:
                self._snapshot_s = self._clock()
                self._events.append(self.snapshot())

    def _passes(
        self,
        examples: Sequence[Example],
        groups: Iterable[Sequence[int]],
        count: int,
        *,
        backward: bool = True,
    ) -> Generator[Slice, None, MicroBatch]:
        """Run micro-batches, the groups of examples, and add up what they give."""
        total = MicroBatch()
        for group in groups:
            packed = pack([examples[number] for number in group])
            self._tokens = len(packed.ids)
            result: MicroBatch | None = None
            while result is None:  # it was dropped
                self._micro = run_micro_batch(
                    self._model, self.adapter, self._adapted, packed, count, backward=backward
                )
                result = yield from self._micro
            self._micro = None
            total.loss_sum += result.loss_sum
            total.correct += result.correct
            if total.gradients:
                torch._foreach_add_(total.gradients, result.gradients)
            else:
                total.gradients = result.gradients
        return total

    def _update(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Make an optimizer step; leave it out if a gradient is not finite and return False."""
        parameters = self.adapter.parameters()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        finite = bool(torch.isfinite(norm))
        if finite:
            self._optimizer.param_groups[0]["lr"] = self.recipe.learning_rate_at(self.step, self.total_steps)
            self._optimizer.step()
            self._model.forget_factors()  # the fused optimizer does not count up their versions
        self._optimizer.zero_grad(set_to_none=True)
        self._skipped = 0 if finite else self._skipped + 1
        return finite

    def _validate(self) -> Generator[Slice, None, float | None]:
        if not self.valid_examples:
            return None
        passes = self._passes(self.valid_examples, self._valid_groups, self._valid_count, backward=False)
        total = yield from passes
        return total.loss_sum / self._valid_count

    def _after_lack_of_memory(self) -> None:
        """Compute the step again in micro-batches of half the tokens; fail if that was tried before."""
        self._slices.close()
        if self._halved:
            self._fail("the device has too little memory beside what it serves")
            return
        self._halved, self._train_tokens = True, max(1, self._train_tokens // 2)
        self._micro = None
        self._slices = self._run()
        self._next = next(self._slices)

    def _fail(self, reason: str) -> None:
        self._events.append(Failed(reason))
        self.ended = True
