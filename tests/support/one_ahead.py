"""Run `mico` with the protocols of the link one ahead, and messages that today's does not know.

`python -m tests.support.one_ahead gateway …` takes the arguments of `mico`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from gateway.federation import codec as gateway_codec
from gateway.federation.pings import Pings
from mico.cli import main
from site_engine import messages
from site_engine.federation import codec as site_codec
from wire import federation_pb2 as pb

UNKNOWN_KIND = b"\x9a\x06\x00"
"""Field 99 of a message, empty."""


def step_ahead() -> None:
    """Speak the protocols from today's highest to the one after it, and add an unknown kind to each ping."""
    for codec in (gateway_codec, site_codec):
        codec.LOWEST_PROTOCOL, codec.HIGHEST_PROTOCOL = codec.HIGHEST_PROTOCOL, codec.HIGHEST_PROTOCOL + 1
    send, encode = Pings.send, site_codec.encode

    def send_and_more(pings: Pings) -> str | None:
        pings._outbox.put(pb.GatewayMessage.FromString(UNKNOWN_KIND))
        return send(pings)

    def encode_and_more(message: Any) -> Iterator[pb.SiteMessage]:
        yield from encode(message)
        if isinstance(message, messages.Pong):
            yield pb.SiteMessage.FromString(UNKNOWN_KIND)

    Pings.send = send_and_more  # type: ignore[method-assign]
    site_codec.encode = encode_and_more


if __name__ == "__main__":
    step_ahead()
    sys.exit(main())
