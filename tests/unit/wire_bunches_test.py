"""Bunches change the cost of messages, not what is said nor its order; who cannot read them gets none."""

from __future__ import annotations

import asyncio
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Model, SiteIdentity
from gateway.federation import codec as gateway_codec
from gateway.federation.directory import Directory
from gateway.federation.link import Link
from gateway.federation.offloading import Offloading
from gateway.federation.outbox import LARGE_BYTES
from site_engine.federation import codec as site_codec
from wire import federation_pb2 as pb

MODELS = MappingProxyType({"m": Model("m", "1", 100, 0, "mico")})
IDENTITY = SiteIdentity("alpha", "boot", "aws", "here", MODELS, slots=4, kv_capacity_tokens=100)
LARGE = site_codec.MAX_STEP_BYTES // 2 + 1


def link(*, reads_bunches: bool) -> Link:
    directory = Directory()
    directory.join(IDENTITY, 0.0)
    offloading = Offloading({}, directory, lambda: 0.0)
    return Link(IDENTITY, directory, offloading, lambda: 0.0, reads_bunches=reads_bunches)


async def sent(here: Link) -> list[pb.GatewayMessage]:
    messages = []
    while here.outbox.bytes:
        messages.append(pb.GatewayMessage.FromString(await here.next_message()))
    return messages


@given(st.lists(st.sampled_from([1, 1, 1, LARGE]), max_size=12))
def test_what_a_site_says_is_the_same_in_bunches_and_none_is_large(sizes: list[int]) -> None:
    said = [
        pb.SiteMessage(released=pb.Released(release_id=f"{number}", attempt_ids=["a" * size]))
        for number, size in enumerate(sizes)
    ]
    bunches = list(site_codec.bundle(said))
    assert [each for bunch in bunches for each in gateway_codec.messages_of(bunch)] == said
    assert all(len(bunch.bunch.messages) < 2 or bunch.ByteSize() < 2.1 * LARGE for bunch in bunches)
    assert len(bunches) <= 1 + sizes.count(LARGE)


@given(st.lists(st.sampled_from([1, 100, 130, 20_000, 3_000_000]), max_size=5))
def test_a_bunch_is_written_from_its_serialized_messages_as_protobuf_writes_it(sizes: list[int]) -> None:
    messages = [
        pb.GatewayMessage(release=pb.Release(release_id=f"{number}", attempt_ids=["a" * size]))
        for number, size in enumerate(sizes)
    ]
    expected = pb.GatewayMessage(bunch=pb.GatewayBunch(messages=messages)).SerializeToString()
    assert gateway_codec.bunch(each.SerializeToString() for each in messages) == expected


@pytest.mark.parametrize("reads_bunches", [True, False])
def test_a_site_hears_all_in_order_and_in_bunches_only_if_it_reads_them(reads_bunches: bool) -> None:
    async def scenario() -> None:
        here = link(reads_bunches=reads_bunches)
        for number in range(5):
            here.release(str(number), [])
        messages = await sent(here)
        assert len(messages) == (1 if reads_bunches else 5)
        heard = [each.release.release_id for message in messages for each in site_codec.unbundle(message)]
        assert heard == ["0", "1", "2", "3", "4"]

    asyncio.run(scenario())


def test_what_is_alone_is_no_bunch_and_long_prompts_do_not_make_one_without_end() -> None:
    async def scenario() -> None:
        here = link(reads_bunches=True)
        here.release("alone", [])
        (message,) = await sent(here)
        assert message.WhichOneof("body") == "release"
        for _ in range(8):
            here.release("long", ["a" * (LARGE_BYTES - 100)])
        assert [len(message.bunch.messages) for message in await sent(here)] == [5, 3]
        for _ in range(2):
            here.release("larger", ["a" * LARGE_BYTES])
        assert [message.WhichOneof("body") for message in await sent(here)] == ["release", "release"]

    asyncio.run(scenario())


def test_a_gateway_takes_a_bunch_as_its_messages_and_no_bunch_within_one() -> None:
    async def scenario() -> None:
        here = link(reads_bunches=True)
        loads = [pb.SiteMessage(load=pb.Load(seq=seq, running=seq)) for seq in (1, 2, 3)]
        here.receive(pb.SiteMessage(bunch=pb.SiteBunch(messages=loads)))
        (site,) = here._directory.sites
        assert (site.load.seq, site.load.running) == (3, 3)
        nested = pb.SiteMessage(bunch=pb.SiteBunch(messages=loads))
        with pytest.raises(gateway_codec.ProtocolError):
            here.receive(pb.SiteMessage(bunch=pb.SiteBunch(messages=[nested])))

    asyncio.run(scenario())
