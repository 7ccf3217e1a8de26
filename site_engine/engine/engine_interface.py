"""The engine as its thread uses it."""

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
    """Where keys and values of requests come from other engines, and go to them."""

    def meet(self, inboxes: Iterable[InboxAddress]) -> None:
        """Open the ways into inboxes of other engines before a request waits for that."""


class Engine(Protocol):
    """Synchronous, called by one thread only."""

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request, moved: Moved | None = None) -> None: ...
    def cancel(self, request_id: str) -> object: ...

    def end_by_text(self, request_id: str, generated: int) -> None:
        """End a request whose text, which is read elsewhere, has ended after so many tokens."""

    def expect(self) -> None:
        """Be ready for a request that another engine is about to give up."""

    def send_ahead(self, request_id: str, to: InboxPlace | None) -> bool:
        """Begin to copy the keys and values of a request to the place `to` while it goes on; return whether
        that is under way.
        """

    def export(self, request_id: str, to: InboxPlace | None) -> tuple[Sequence[Output], Moved | None]:
        """Take a request out, for another engine, and copy the rest to the place `to`, if any; return also
        what was under way, which may end it.
        """

    def waits(self, request_id: str) -> bool:
        """Return whether a request is here and has not started."""

    def release(self, request_ids: Sequence[str]) -> Sequence[str]: ...
    def step(self) -> Sequence[Output]: ...
    def load(self) -> LoadFigures: ...

    def load_variant(self, variant: Variant) -> Callable[[], Chain]:
        """Load and certify a variant, on any thread and for long; return what publishes it between two
        iterations. Both raise VariantRefused.
        """

    def remove_variant(self, variant_id: str) -> None: ...

    @property
    def inbox(self) -> Inbox: ...

    @property
    def training(self) -> TrainingLoop:
        """The training of this engine; the thread calls nothing of it while there are no jobs."""
