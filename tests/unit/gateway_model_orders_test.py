"""Orders to a site, whose answers may come over a later stream than the order went."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import BadRequest, Overloaded
from gateway.federation.model_orders import ModelOrder, ModelOrders
from gateway.federation.outbox import Outbox
from wire import federation_pb2 as pb


def test_the_answer_to_an_order_of_a_lost_link_ends_no_order_of_the_next() -> None:
    """A site keeps what it owes a gateway, and answers once it has carried the order out."""

    async def given(orders: ModelOrders, outbox: Outbox, kind: str) -> tuple[asyncio.Task[None], str]:
        waiting = asyncio.create_task(orders.carry_out(ModelOrder(kind, "one"), 60))
        message = pb.GatewayMessage.FromString(await outbox.next(in_bunches=False))
        return waiting, message.order.order_id

    async def scenario() -> None:
        before, after = Outbox(), Outbox()
        lost, orders = ModelOrders("alpha", before), ModelOrders("alpha", after)
        adding, added = await given(lost, before, "add")
        lost.close("its stream broke")
        with pytest.raises(Overloaded, match="not known"):
            await adding
        removing, removed = await given(orders, after, "remove")
        orders.ordered(pb.Ordered(order_id=added))
        orders.ordered(pb.Ordered(order_id=removed, error="one is not served here"))
        with pytest.raises(BadRequest, match="one is not served here"):
            await removing

    asyncio.run(scenario())
