"""The interface of the engine that its thread uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from site_engine.core.chain import Chain, Variant
from site_engine.core.inbox import InboxAddress, InboxPlace
from site_engine.core.load import LoadFigures
from site_engine.core.request import Moved, Output, Request

if TYPE_CHECKING:
    from site_engine.engine.training_loop import TrainingLoop


class Inbox(Protocol):
    """Transfers keys and values of requests from and to other engines."""

    def meet(self, inboxes: Iterable[InboxAddress]) -> None:
        """Connect to the inboxes of other engines ahead of time, so that no request waits for it."""


class Engine(Protocol):
    """A synchronous engine, called by one thread only."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request, moved: Moved | None = None) -> None: ...
    def cancel(self, request_id: str) -> object: ...

    def end_by_text(self, request_id: str, generated: int) -> None:
        """End a request whose text, detokenized in another process, stopped after `generated` tokens."""

    def expect(self) -> None:
        """Prepare for a request that another engine is about to export."""

    def send_ahead(self, request_id: str, to: InboxPlace | None) -> bool:
        """Start copying a request's keys and values to the place `to` while it runs; return whether to call
        again after the next step.
        """

    def export(self, request_id: str, to: InboxPlace | None) -> tuple[Sequence[Output], Moved | None]:
        """Remove a request so that another engine can continue it, and copy the remaining keys and values to
        the place `to`, if given; return pending outputs, which may end the request, and its state.
        """

    def waits(self, request_id: str) -> bool:
        """Return whether a request is waiting in the queue, that is, has not started in this engine."""

    def release(self, request_ids: Sequence[str]) -> Sequence[str]: ...
    def step(self) -> Sequence[Output]: ...
    def load(self) -> LoadFigures: ...

    def load_variant(self, variant: Variant) -> Callable[[], Chain]:
        """Load and certify a variant, on any thread; return the function that publishes it between two
        iterations. Both raise VariantRefused. Loading may take long.
        """

    def remove_variant(self, variant_id: str) -> None: ...

    @property
    def inbox(self) -> Inbox: ...

    @property
    def training(self) -> TrainingLoop:
        """The training loop of this engine. The thread does not call it while there are no jobs."""
