"""A client of the tests asks again what was refused for late reports, and nothing else."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.domain import Credit, LoadReport, Site, SiteIdentity, SiteState
from gateway.routing.filters import why_not
from tests.support import patience


@pytest.mark.parametrize(
    ("refusals", "asked"),
    [
        ([(503, "no site can serve it: a: load report 5.0 s old"), (200, "yes")], 2),
        ([(503, "no site can serve it: a: down"), (200, "yes")], 1),
        ([(500, "a: load report 5.0 s old"), (200, "yes")], 1),
    ],
)
def test_only_what_late_reports_refuse_is_asked_again(
    refusals: list[tuple[int, str]], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "PAUSE_S", 0.0)
    bodies: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(request.read())
        status, text = refusals[len(bodies) - 1]
        return httpx.Response(status, stream=httpx.ByteStream(text.encode()))

    with (
        patience.patient(httpx.Client(transport=httpx.MockTransport(answer))) as client,
        client.stream("POST", "http://here/", json={"n": 1}) as answered,
    ):
        status, text = refusals[asked - 1]
        assert (answered.status_code, "".join(answered.iter_text())) == (status, text)
    assert bodies == [b'{"n":1}'] * asked


def test_the_gateway_says_of_a_late_report_what_clients_look_for() -> None:
    identity = SiteIdentity("a", "b", "c", "r", models={}, slots=1, kv_capacity_tokens=1)
    late = Site(identity, SiteState.READY, LoadReport(seq=1, received_s=0.0), Credit())
    demand: Any = None  # is not looked at
    assert patience.LATE.decode() in f"a: {why_not(demand, late, 9.0)}"
