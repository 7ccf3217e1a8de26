"""The state of `mico top`: the sort order, the selected site, and a drain that is being entered.

No I/O: converts keys and answers to requests for the gateway. Does not render or send anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

HELP = "s sort · ↑↓ choose · d drain · p pause · q quit"
Site = dict[str, Any]


class SortOrder(NamedTuple):
    name: str
    key: Callable[[Site], Any]


SORT_ORDERS = (
    SortOrder("name", lambda site: site["name"]),
    SortOrder("load", lambda site: -(site["load"] or 0.0)),
    SortOrder("tok/s", lambda site: -site["output_per_s"]),
    SortOrder("first token", lambda site: -(site["ttft_p95_s"] or 0.0)),
    SortOrder("errors", lambda site: -site["errors_per_min"]),
)


class DrainStage(Enum):
    """The stage of entering a drain: none, typing the reason, or confirming after the preview."""

    NONE = "none"
    REASON = "reason"
    CONFIRM = "confirm"


class DrainRequest(NamedTuple):
    """A drain to request from the gateway, or only its preview if `dry_run`."""

    site: str
    reason: str
    dry_run: bool


@dataclass(slots=True)
class TopState:
    snapshot: dict[str, Any]
    batches: list[dict[str, Any]] = field(default_factory=list)
    order: int = 0
    selected: str = ""
    paused: bool = False
    finished: bool = False
    stage: DrainStage = DrainStage.NONE
    reason: str = ""
    messages: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def sites(self) -> list[Site]:
        """Return the sites in the selected order, then by name."""
        order = SORT_ORDERS[self.order]
        return sorted(self.snapshot["sites"], key=lambda site: (order.key(site), site["name"]))

    def press(self, key: str) -> DrainRequest | None:
        if key == "quit":
            self.finished = True
            return None
        if self.stage is DrainStage.REASON:
            return self._type_reason(key)
        if self.stage is DrainStage.CONFIRM:
            return self._confirm(key)
        self._command(key)
        return None

    def show_answer(self, answer: dict[str, Any]) -> None:
        """Show the preview of a dry run and ask for confirmation, or report a completed drain."""
        preview = answer["preview"]
        if answer["done"]:
            self._end_drain(f"done: {preview['text']}")
            return
        self.stage = DrainStage.CONFIRM
        self.messages = [*(f"warning: {text}" for text in preview["warnings"]), preview["text"]]

    def show_refusal(self, why: str) -> None:
        self._end_drain(f"not drained: {why}")

    def footer(self) -> list[str]:
        """Return the last lines of the screen: messages, and the current prompt or the list of keys."""
        if self.stage is DrainStage.REASON:
            return [f"Drain {self.selected}. Why? {self.reason}▏  (Enter goes on, Esc leaves)"]
        if self.stage is DrainStage.CONFIRM:
            return [*self.messages, f"Drain {self.selected}? y does it, any other key leaves"]
        state = " · PAUSED, p goes on" if self.paused else ""
        return [*self.messages, f"{HELP} · by {SORT_ORDERS[self.order].name}{state}"]

    def _command(self, key: str) -> None:
        self.messages = []
        if key == "q":
            self.finished = True
        elif key == "s":
            self.order = (self.order + 1) % len(SORT_ORDERS)
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key in ("up", "k", "down", "j"):
            self._select(-1 if key in ("up", "k") else 1)
        elif key == "d":
            self._begin_drain()

    def _select(self, by: int) -> None:
        names = [site["name"] for site in self.sites]
        if self.selected in names:
            self.selected = names[(names.index(self.selected) + by) % len(names)]
        elif names:
            self.selected = names[0 if by > 0 else -1]

    def _begin_drain(self) -> None:
        if any(site["name"] == self.selected for site in self.snapshot["sites"]):
            self.stage, self.reason = DrainStage.REASON, ""
        else:
            self.messages = ["Choose a site first: ↓ and ↑."]

    def _type_reason(self, key: str) -> DrainRequest | None:
        if key == "escape":
            self._end_drain("")
        elif key == "back":
            self.reason = self.reason[:-1]
        elif key == "enter" and self.reason.strip():
            return DrainRequest(self.selected, self.reason.strip(), dry_run=True)
        elif len(key) == 1 and key.isprintable():
            self.reason += key
        return None

    def _confirm(self, key: str) -> DrainRequest | None:
        if key in ("y", "Y"):
            return DrainRequest(self.selected, self.reason.strip(), dry_run=False)
        self._end_drain("nothing was changed")
        return None

    def _end_drain(self, messages: str) -> None:
        self.stage, self.messages = DrainStage.NONE, [messages] if messages else []
