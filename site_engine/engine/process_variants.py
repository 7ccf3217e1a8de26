"""Add variants to an engine in a process of its own, and remove them: the site's side."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from site_engine.core.chain import Chain, Variant
from site_engine.engine import process_messages as pm
from site_engine.errors import VariantRefused


class RemoteVariants:
    """Adds and removes variants. `chains` holds the chains of variants that accept requests, by id."""

    def __init__(self, send: Callable[[pm.Message], None]) -> None:
        self.chains: dict[str, Chain] = {}
        self._send = send
        self._next_call = count(1)
        self._adding: dict[int, Callable[[Chain | VariantRefused], None]] = {}
        self._removing: dict[int, Callable[[VariantRefused | None], None]] = {}
        self._lost = ""

    def add(self, variant: Variant, reply: Callable[[Chain | VariantRefused], None]) -> None:
        """Load a variant and publish it; reply with its chain or the refusal."""
        if self._lost:
            reply(VariantRefused(self._lost))
            return
        call = next(self._next_call)
        self._adding[call] = reply
        self._send(pm.AddVariant(call, variant))

    def remove(self, variant_id: str, reply: Callable[[VariantRefused | None], None]) -> None:
        """Remove a variant: submitted requests finish with it, new ones are refused."""
        if self._lost:
            reply(VariantRefused(self._lost))
            return
        call = next(self._next_call)
        self.chains.pop(variant_id, None)
        self._removing[call] = reply
        self._send(pm.RemoveVariant(call, variant_id))

    def handle(self, message: pm.VariantAdded | pm.VariantRemoved) -> None:
        if isinstance(message, pm.VariantRemoved):
            removed = self._removing.pop(message.call)
            removed(VariantRefused(message.message) if message.message else None)
            return
        reply = self._adding.pop(message.call)
        if message.chain is None:
            reply(VariantRefused(message.message))
        else:
            self.chains[message.chain.id] = message.chain
            reply(message.chain)

    def lose(self, refusal: str) -> None:
        """Refuse all that waits, and what comes: the process is lost."""
        self._lost = refusal
        adding, self._adding = self._adding, {}
        removing, self._removing = self._removing, {}
        for reply in (*adding.values(), *removing.values()):
            reply(VariantRefused(refusal))
