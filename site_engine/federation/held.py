"""Attempts and counts that wait for their model to wake.

Does not wake a model: `wake` does, and the site says which models sleep. What is not wanted any more, such as
an attempt that was cancelled, is dropped when the next one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from site_engine.core.request_queue import has_place
from site_engine.errors import NotServed, Reason
from site_engine.messages import Model, ModelState


class HeldCall(NamedTuple):
    """`begin` is called once `model` is awake, or `refuse` with the reason if it cannot be."""

    model: str
    tenant: str
    is_wanted: Callable[[], bool]
    begin: Callable[[], None]
    refuse: Callable[[NotServed], None]


class HeldCalls:
    """Holds at most `most` calls, of which one tenant has at most its part."""

    def __init__(self, most: int) -> None:
        self.wake: Callable[[str], None] = lambda model: None
        self._most = most
        self._asleep: frozenset[str] = frozenset()
        self._calls: list[HeldCall] = []

    def is_asleep(self, model: str) -> bool:
        """Return whether a model of the site sleeps, or is waking."""
        return model in self._asleep

    def hold(self, call: HeldCall) -> None:
        """Hold a call and have its model woken. Refuse the call if too many are held."""
        self._calls = [each for each in self._calls if each.is_wanted()]
        of_tenant = sum(each.tenant == call.tenant for each in self._calls)
        if not has_place(of_tenant, len(self._calls), self._most):
            held = f"{len(self._calls)} attempts wait for models to wake, {of_tenant} of them of this tenant"
            call.refuse(NotServed(Reason.FULL, held))
            return
        self._calls.append(call)
        self.wake(call.model)

    def set_models(self, models: Iterable[Model]) -> None:
        """Begin the calls of models that are awake, and refuse those of models that are gone."""
        states = {each.id: each.state for each in models}
        self._asleep = frozenset(each for each, state in states.items() if state is not ModelState.READY)
        due = [each for each in self._calls if each.model not in self._asleep]
        self._calls = [each for each in self._calls if each.model in self._asleep]
        for call in due:
            if not call.is_wanted():
                continue
            if call.model in states:
                call.begin()
            else:
                gone = f"{call.model} is not served here any more"
                call.refuse(NotServed(Reason.MODEL_UNKNOWN, gone, "model"))

    def refuse(self, model: str, reason: str) -> None:
        """Refuse the calls of a model that cannot be woken now."""
        due = [each for each in self._calls if each.model == model and each.is_wanted()]
        self._calls = [each for each in self._calls if each.model != model]
        for call in due:
            call.refuse(NotServed(Reason.FULL, f"{model} sleeps here and cannot be woken: {reason}"))
