"""A fault of the site in one request leaves the link, and the requests beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from site_engine import messages as m
from site_engine.errors import Reason
from tests.unit.site_site_test import QuietEngine, Scene, assign


def test_a_request_whose_preparation_breaks_is_rejected_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare(
        self: QuietEngine, asked: m.Assign, reply: Callable[[object], None], is_wanted: Callable[[], bool]
    ) -> None:
        if asked.attempt_id == "odd":
            raise RecursionError("nested too deeply")
        self.tenants.append(asked.tenant)

    monkeypatch.setattr(QuietEngine, "prepare", prepare)
    scene = Scene(max_preparing=2)
    connection = scene.link()
    for attempt_id in ("before", "odd", "after"):
        scene.site.receive(connection, assign(attempt_id))
    sent = connection.attempts.outbox.take(float("inf"))
    rejected = [each for each in sent if isinstance(each, m.Rejected)]
    assert [(each.attempt_id, each.reason) for each in rejected] == [("odd", Reason.INTERNAL)]
    assert "RecursionError" in rejected[0].message
    assert [each in connection.attempts for each in ("before", "odd", "after")] == [True, False, True]
    assert "attempt odd cannot be prepared" in caplog.text
