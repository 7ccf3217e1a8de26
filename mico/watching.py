"""What `mico top` is in the middle of: the order of sites, the chosen one, a drain that is asked for.

Pure: keys and answers go in, what to ask the gateway comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

HELP = "s sort · ↑↓ choose · d drain · p pause · q quit"
Site = dict[str, Any]


class Order(NamedTuple):
    name: str
    key: Callable[[Site], Any]


ORDERS = (
    Order("name", lambda site: site["name"]),
    Order("load", lambda site: -(site["load"] or 0.0)),
    Order("tok/s", lambda site: -site["output_per_s"]),
    Order("first token", lambda site: -(site["ttft_p95_s"] or 0.0)),
    Order("errors", lambda site: -site["errors_per_min"]),
)


class Stage(Enum):
    """Of a drain: nobody asks for one, why is being typed, its price is shown and a yes is awaited."""

    NONE = "none"
    REASON = "reason"
    CONFIRM = "confirm"


class Asked(NamedTuple):
    """A drain. With `dry_run` only what it would do."""

    site: str
    reason: str
    dry_run: bool


@dataclass(slots=True)
class Watching:
    snapshot: dict[str, Any]
    order: int = 0
    chosen: str = ""
    paused: bool = False
    over: bool = False
    stage: Stage = Stage.NONE
    reason: str = ""
    told: list[str] = field(default_factory=list)
    trouble: str = ""

    @property
    def sites(self) -> list[Site]:
        """In the order that was asked for; sites that are alike by name."""
        order = ORDERS[self.order]
        return sorted(self.snapshot["sites"], key=lambda site: (order.key(site), site["name"]))

    def press(self, key: str) -> Asked | None:
        if key == "quit":
            self.over = True
            return None
        if self.stage is Stage.REASON:
            return self._type(key)
        if self.stage is Stage.CONFIRM:
            return self._confirm(key)
        self._command(key)
        return None

    def answered(self, answer: dict[str, Any]) -> None:
        """Of a dry run: its price, and the question. Else it is done."""
        preview = answer["preview"]
        if answer["done"]:
            self._leave(f"done: {preview['text']}")
            return
        self.stage = Stage.CONFIRM
        self.told = [*(f"warning: {text}" for text in preview["warnings"]), preview["text"]]

    def refused(self, why: str) -> None:
        self._leave(f"not drained: {why}")

    def footer(self) -> list[str]:
        """The last lines of the screen: what is asked of the person, or what the keys are."""
        if self.stage is Stage.REASON:
            return [f"Drain {self.chosen}. Why? {self.reason}▏  (Enter goes on, Esc leaves)"]
        if self.stage is Stage.CONFIRM:
            return [*self.told, f"Drain {self.chosen}? y does it, any other key leaves"]
        state = " · PAUSED, p goes on" if self.paused else ""
        return [*self.told, f"{HELP} · by {ORDERS[self.order].name}{state}"]

    def _command(self, key: str) -> None:
        self.told = []
        if key == "q":
            self.over = True
        elif key == "s":
            self.order = (self.order + 1) % len(ORDERS)
        elif key in ("p", " "):
            self.paused = not self.paused
        elif key in ("up", "k", "down", "j"):
            self._choose(-1 if key in ("up", "k") else 1)
        elif key == "d":
            self._begin_drain()

    def _choose(self, by: int) -> None:
        names = [site["name"] for site in self.sites]
        if self.chosen in names:
            self.chosen = names[(names.index(self.chosen) + by) % len(names)]
        elif names:
            self.chosen = names[0 if by > 0 else -1]

    def _begin_drain(self) -> None:
        if any(site["name"] == self.chosen for site in self.snapshot["sites"]):
            self.stage, self.reason = Stage.REASON, ""
        else:
            self.told = ["Choose a site first: ↓ and ↑."]

    def _type(self, key: str) -> Asked | None:
        if key == "escape":
            self._leave("")
        elif key == "back":
            self.reason = self.reason[:-1]
        elif key == "enter" and self.reason.strip():
            return Asked(self.chosen, self.reason.strip(), dry_run=True)
        elif len(key) == 1 and key.isprintable():
            self.reason += key
        return None

    def _confirm(self, key: str) -> Asked | None:
        if key in ("y", "Y"):
            return Asked(self.chosen, self.reason.strip(), dry_run=False)
        self._leave("nothing was changed")
        return None

    def _leave(self, told: str) -> None:
        self.stage, self.told = Stage.NONE, [told] if told else []
