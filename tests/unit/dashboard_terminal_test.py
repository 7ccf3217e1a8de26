"""The screen of `mico top`, and the lengths of time that `mico sites …` reads."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from mico.commands.operate import duration, ends_after
from mico.errors import CommandFailed
from mico.keyboard import TerminalKeyboard
from mico.top_state import SORT_ORDERS, DrainRequest, DrainStage, TopState
from mico.top_view import bar, render, render_screen

SITE = {
    "name": "aws-us",
    "state": "stale",
    "load": 0.5,
    "weight": 100,
    "output_per_s": 12.0,
    "running": 3,
    "slots": 8,
    "pending": 1,
    "ttft_p95_s": None,
    "itl_p95_s": 0.02,
    "kv_used": None,
    "errors_per_min": 0,
    "report_age_s": 4.2,
}
TOTALS = {
    "output_per_s": 12.0,
    "input_per_s": 7.0,
    "in_flight": 4,
    "queued": 1,
    "ttft_p95_s": None,
    "errors_per_min": 1,
    "ended_per_min": 9,
    "headroom": None,
}
SNAPSHOT: dict[str, Any] = {
    "at": 0.0,
    "banner": {"level": "degraded", "text": "Degraded: aws-us stale."},
    "totals": TOTALS,
    "sites": [SITE],
    "events": [
        {"at": 0, "kind": "operator", "site": "aws-us", "text": "drain: why", "who": "ann", "bad": False}
    ],
}


def test_the_screen_says_what_the_page_says() -> None:
    out = StringIO()
    Console(file=out, width=160).print(render(SNAPSHOT))
    text = out.getvalue()
    for words in ("Degraded: aws-us stale.", "12 tok/s", "1 of 9 failed", "stale", "3/8", "50%", "by ann"):
        assert words in text


def test_an_event_of_another_day_has_its_day() -> None:
    noon = datetime(2026, 11, 30, 12).astimezone()
    midnight = noon.replace(hour=0)
    events = [
        {"at": each.timestamp(), "kind": "state", "site": "a", "text": "is down", "who": "", "bad": True}
        for each in (midnight, midnight - timedelta(seconds=1))
    ]
    out = StringIO()
    Console(file=out, width=160).print(render({**SNAPSHOT, "at": noon.timestamp(), "events": events}))
    screen = out.getvalue()
    assert "\n00:00:00 state" in screen
    assert "\n29 Nov 23:59:59 state" in screen


def test_batches_that_have_not_ended_are_on_the_screen() -> None:
    counts = {"total": 900, "completed": 40, "failed": 2}
    mico = {"order": "blend", "shared_prompt_share": 0.71, "in_flight": 64, "ends_at": 1_750_000_000}
    runs = {"id": "batch_1", "tenant": "t", "status": "in_progress", "request_counts": counts, "mico": mico}
    ended = runs | {"id": "batch_2", "status": "completed"}
    new = runs | {"id": "batch_3", "status": "validating", "mico": {"order": "blend"}}
    out = StringIO()
    Console(file=out, width=160).print(render(SNAPSHOT, [runs, ended, new]))
    text = out.getvalue()
    for words in ("batch_1 of t", "42 of 900 ended", "64 run", "71% of prompts shared", "ends about"):
        assert words in text
    assert "batch_2" not in text and "batch_3 of t: validating" in text


def test_a_site_with_several_devices_has_a_line_for_each() -> None:
    device = {
        "device": "cuda:0",
        "lost": False,
        "slots": 64,
        "running": 12,
        "pending": 5,
        "kv_tokens": 1000,
        "kv_free_tokens": 400,
        "tokens_per_s": 321.0,
    }
    lost = {**device, "device": "cuda:1", "lost": True, "running": 0, "kv_free_tokens": 0}
    out = StringIO()
    site = {**SITE, "devices": [device, lost]}
    Console(file=out, width=160).print(render({**SNAPSHOT, "sites": [site]}))
    lines = [line.split() for line in out.getvalue().splitlines() if "cuda:" in line]
    assert lines == [
        ["cuda:0", "serves", "321", "12/64", "5", "60%"],
        ["cuda:1", "lost", "321", "0/64", "5", "100%"],
    ]


def test_an_unknown_load_is_no_empty_bar() -> None:
    assert bar(None) != bar(0.0)
    assert bar(7.0) == bar(1.0)
    assert len(bar(0.3)) == len(bar(None))


def two_sites() -> TopState:
    busy = {**SITE, "name": "b", "load": 0.9, "errors_per_min": 3}
    return TopState({**SNAPSHOT, "sites": [{**SITE, "name": "a"}, busy]})


def pressed(state: TopState, *keys: str) -> list[DrainRequest]:
    return [asked for key in keys if (asked := state.press(key))]


def test_sites_are_sorted_by_what_is_asked_for() -> None:
    state = two_sites()
    for order in SORT_ORDERS:
        names = [site["name"] for site in state.sites]
        assert names == (["b", "a"] if order.name in ("load", "errors") else ["a", "b"])
        assert f"by {order.name}" in state.footer()[-1]
        state.press("s")
    assert state.order == 0


def test_a_drain_needs_a_site_a_reason_and_a_yes() -> None:
    state = two_sites()
    assert pressed(state, "d") == []
    assert state.footer()[0] == "Choose a site first: ↓ and ↑."
    assert pressed(state, "down", "down", "d", "enter") == []
    assert state.stage is DrainStage.REASON
    assert pressed(state, *"too hx", "back", *"ot", "enter") == [DrainRequest("b", "too hot", dry_run=True)]
    state.show_answer({"done": False, "preview": {"warnings": ["it hurts"], "text": "drain b"}})
    assert state.footer() == ["warning: it hurts", "drain b", "Drain b? y does it, any other key leaves"]
    assert pressed(state, "y") == [DrainRequest("b", "too hot", dry_run=False)]
    state.show_answer({"done": True, "preview": {"warnings": [], "text": "drain b"}})
    assert (state.stage, state.footer()[0]) == (DrainStage.NONE, "done: drain b")


@pytest.mark.parametrize("keys", [("escape",), ("x", "enter", "n"), ("x", "enter", "q")])
def test_anything_but_a_yes_changes_nothing(keys: tuple[str, ...]) -> None:
    state = two_sites()
    pressed(state, "j", "d")
    for key in keys:
        asked = state.press(key)
        if asked is not None:
            assert asked.dry_run
            state.show_answer({"done": False, "preview": {"warnings": [], "text": "drain a"}})
    assert (state.stage, state.finished) == (DrainStage.NONE, False)


def test_letters_of_a_reason_are_no_commands() -> None:
    state = two_sites()
    pressed(state, "up", "d", *"sp q")
    assert (state.reason, state.order, state.paused, state.finished) == ("sp q", 0, False, False)
    assert state.selected == "b"
    state.show_refusal("nobody there")
    assert state.footer()[0] == "not drained: nobody there"
    pressed(state, "p", "q")
    assert (state.paused, state.finished) == (True, True)


def test_the_screen_shows_keys_the_chosen_site_and_a_gateway_that_is_away() -> None:
    state = two_sites()
    state.press("down")
    state.error = "the gateway does not answer"
    out = StringIO()
    console = Console(file=out, width=160, height=30, force_terminal=True, color_system="standard")
    console.print(render_screen(state, console))
    assert "STALE: the gateway does not answer" in out.getvalue()
    assert "q quit" in out.getvalue()
    assert "\x1b[7m" in out.getvalue()  # one line is reversed


def test_a_question_is_seen_however_small_the_screen_is() -> None:
    (event,) = SNAPSHOT["events"]
    long = {**event, "text": "a query went " + "far " * 30 + "away"}
    state = TopState(
        {**SNAPSHOT, "sites": [{**SITE, "name": f"s{at}"} for at in range(9)], "events": 6 * [long]}
    )
    assert pressed(state, "j", "d") == []
    for height in (24, 12, 6):
        out = StringIO()
        console = Console(file=out, width=80, height=height)
        console.print(render_screen(state, console))
        assert len(out.getvalue().splitlines()) == height
        assert "Drain s0. Why?" in out.getvalue()


def test_keys_are_told_apart_as_they_come() -> None:
    read, write = os.pipe()
    try:
        os.write(write, b"s\x1b[A\x1b[Bq\r\x7f\x1b")
        terminal = TerminalKeyboard(read)
        keys = [terminal.read_key(1.0) for _ in range(7)]
        assert keys == ["s", "up", "down", "q", "enter", "back", "escape"]
        assert terminal.read_key(0.0) is None
        for part in ("é".encode()[:1], "é".encode()[1:]):  # half a sign is not the end of the input
            os.write(write, part)
            keys.append(terminal.read_key(1.0))
        assert keys[-2:] == [None, "é"]
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5d", 129_600), ("45", 45)]
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert duration(text) == ends_after(text) == seconds


def test_an_order_ends_never_where_nothing_is_said_and_not_where_it_would_at_once() -> None:
    """`--for 0s` held until somebody undid it."""
    assert ends_after(None) == 0.0
    with pytest.raises(CommandFailed, match="no time at all"):
        ends_after("0s")


@pytest.mark.parametrize("text", ["", "soon", "-5m", "5 weeks", "m"])
def test_no_length_of_time(text: str) -> None:
    with pytest.raises(CommandFailed, match="no length of time"):
        duration(text)
