"""Orders of operators to one site, to add or remove a variant or to put a model to sleep or wake it."""

from __future__ import annotations

import asyncio
from typing import NamedTuple
from uuid import uuid4

from gateway.errors import BadRequest, Overloaded
from gateway.federation import codec
from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb


class ModelOrder(NamedTuple):
    """An order. `kind` is "add", "remove", "sleep" or "wake". For "add", `adapter` or `folder` is a folder at
    the site, or `content` is an adapter of `parent` that the site fetches and serves to `tenant` only.
    """

    kind: str
    model: str
    adapter: str = ""
    folder: str = ""
    content: pb.Content | None = None
    tenant: str = ""
    parent: str = ""


class ModelOrders:
    """The orders in progress over one link. `close`, for a lost link, fails these and all later ones."""

    def __init__(self, site: str, outbox: Outbox) -> None:
        self._site = site
        self._outbox = outbox
        self._waiting: dict[str, asyncio.Future[str]] = {}
        self._lost = ""

    async def carry_out(self, order: ModelOrder, within_s: float) -> None:
        """Send an order and return once the site has carried it out.

        Raises BadRequest with the site's reason if it refuses, and Overloaded if the result is unknown, after
        `within_s` or because the link is lost, or if nothing can be sent.
        """
        if self._lost or self._outbox.full:
            raise Overloaded(f"nothing was changed: {self._lost or f'{self._site} reads too slowly'}")
        order_id = uuid4().hex  # unique over links, as sites also answer orders of an earlier link
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[order_id] = answer
        self._outbox.put(pb.GatewayMessage(order=pb.ModelOrder(order_id=order_id, **order._asdict())))
        try:
            async with asyncio.timeout(within_s):
                error = await answer
        except TimeoutError as exc:
            raise Overloaded(
                f"{self._site} has not answered within {within_s:.0f} s; the order may still be carried out:"
                f" mico models show {self._site} tells"
            ) from exc
        finally:
            del self._waiting[order_id]
        if error:
            raise BadRequest(f"{self._site} has changed nothing: {error}")

    def ordered(self, message: pb.Ordered) -> None:
        answer = self._waiting.get(message.order_id)
        if answer is not None and not answer.done():
            answer.set_result(codec.reason(message.error))

    def close(self, reason: str) -> None:
        self._lost = f"{self._site} was lost: {reason}"
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(
                    Overloaded(f"{self._lost}; whether it carried the order out is not known")
                )
