"""The page's figures and acts from the terminal, against a real federation."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.local_federation import LocalFederation, eventually, run_here

pytestmark = pytest.mark.e2e

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(federation: LocalFederation) -> Iterator[Run]:
    """One command: its exit status, stdout and stderr. All orders are lifted afterwards."""
    told = {"MICO_BASE_URL": federation.base_url, "MICO_API_KEY": federation.api_key}
    federation.wait_until_ready()
    try:
        yield partial(run_here, **told)
    finally:
        with federation.http() as http:
            for site in federation.running.sites:
                for verb in ("resume", "weight"):
                    path = f"/admin/api/sites/{site.name}/{verb}"
                    whole = {"reason": "the test is over", "weight": 100}
                    http.post(path, json=whole).raise_for_status()
        federation.wait_until_ready()


def test_top_shows_every_site_and_speaks_json(run: Run, federation: LocalFederation) -> None:
    assert run("top", "-n", "2", "--every", "0.2")[1].count("token load") == 2
    status, out, _ = run("top", "-n", "1")
    assert status == 0
    for site in federation.running.sites:
        assert site.name in out
    snapshot = json.loads(run("top", "-n", "1", "--json")[1])
    assert {"seq", "at", "banner", "totals", "sites", "events", "routes", "quality"} <= set(snapshot)
    assert {site["name"] for site in snapshot["sites"]} >= {s.name for s in federation.running.sites}


def test_top_drains_a_site_by_keys(run: Run, federation: LocalFederation) -> None:
    """In a terminal of its own: choose, ask why, say yes, see it, quit."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    told = {"MICO_BASE_URL": federation.base_url, "MICO_API_KEY": federation.api_key, "TERM": "xterm"}
    told |= {"COLUMNS": "", "LINES": ""}  # or those of the terminal that runs the tests would count
    top = subprocess.Popen(
        [sys.executable, "-m", "mico", "top"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | told,
    )
    os.close(theirs)
    shown = bytearray()

    def look() -> bool:
        """Whoever does not read its output holds it up."""
        if select.select([ours], [], [], 0)[0]:
            with suppress(OSError):  # of Linux, once nobody holds the other end
                shown.extend(os.read(ours, 65_536))
        return True

    def until(words: str) -> None:
        try:
            eventually(lambda: look() and words.encode() in shown, words)
        except AssertionError:
            sys.stderr.write(f"the last screen: {shown[-4_000:].decode(errors='replace')}\n")
            raise
        shown.clear()

    site = sorted(federation.sites())[0]
    try:
        for keys, words in (("", "q quit"), ("s", "by load"), ("ssss", "by name"), ("jd", "Why?")):
            os.write(ours, keys.encode())
            until(words)
        os.write(ours, b"too warm\r")
        until(f"Drain {site}? y")
        os.write(ours, b"y")
        until("done: ")
        assert federation.sites()[site]["orders"][0]["reason"] == "too warm"
        os.write(ours, b"q")
        eventually(lambda: look() and top.poll() is not None, "it ends")
        assert top.returncode == 0
    finally:
        top.kill()
        top.wait()
        os.close(ours)


def test_an_act_needs_a_reason_and_says_what_it_does(run: Run, federation: LocalFederation) -> None:
    site = federation.running.sites[0].name
    assert run("sites", "drain", site)[0] == 2
    assert run("sites", "drain", site, "--reason", "x", "--for", "soon")[0] == 2
    status, out, err = run("sites", "drain", site, "--dry-run", "--json")
    assert (status, json.loads(out)["done"]) == (0, False)
    federation.wait_until_ready()  # also the site: nothing was done
    status, out, err = run("sites", "drain", site, "--reason", "a rehearsal", "--for", "10m")
    assert (status, out) == (0, "")
    assert f"drain {site}" in err
    (order,) = federation.sites()[site]["orders"]
    assert (order["what"], order["reason"]) == ("drain", "a rehearsal")
    assert order["until_at"] - order["given_at"] == pytest.approx(600)


def test_what_hurts_is_not_done_unless_somebody_says_yes(run: Run, federation: LocalFederation) -> None:
    first, *others = [site.name for site in federation.running.sites]
    for site in others:
        assert run("sites", "pause", site, "--reason", "x", "--yes")[0] == 0

    def ready() -> set[str]:
        return {name for name, site in federation.sites().items() if site["state"] == "ready"}

    eventually(lambda: ready() == {first}, "the others are paused, and the first one reports")
    told = "No other site can serve"
    eventually(
        lambda: told in run("sites", "drain", first, "--dry-run", "--json")[1], "it knows of the others"
    )
    status, _, err = run("sites", "drain", first, "--reason", "x")
    assert status == 1
    assert told in err
    assert "--yes" in err
    eventually(lambda: ready() == {first}, "the first one goes on")


def test_a_weight_changes_the_expected_shares(run: Run, federation: LocalFederation) -> None:
    site = federation.running.sites[0].name
    status, out, _ = run("sites", "weight", site, "0", "--reason", "x", "--yes", "--json")
    shares = {share["site"]: share for share in json.loads(out)["preview"]["shares"]}
    assert status == 0
    assert shares[site]["after"] == 0.0 < shares[site]["before"]
    assert federation.sites()[site]["weight"] == 0.0


def test_an_unknown_site_is_named_with_those_there_are(run: Run, federation: LocalFederation) -> None:
    status, _, err = run("sites", "drain", "nowhere", "--reason", "x")
    assert status == 1
    assert federation.running.sites[0].name in err


def test_drills_break_what_they_say_and_mend_it(
    run: Run, federation: LocalFederation, tmp_path: Path
) -> None:
    here = ("--folder", str(federation.folder.path), "drill")
    site = federation.running.sites[1].name
    status, _, err = run(*here, "stale", site, "--for", "8s")
    assert status == 0, err
    snapshot = json.loads(run("top", "-n", "1", "--json")[1])
    told = [event["text"] for event in snapshot["events"] if event["site"] == site]
    assert "is stale: its reports stopped" in told
    federation.wait_until_ready()
    status, _, err = run(*here, "overload", "--clients", "2", "--for", "1s")
    assert status == 0, err
    assert "0 refused" in err
    assert run(*here, "kill-site", "nowhere")[0] == 2
    assert run("--folder", str(tmp_path), "drill", "kill-site")[0] == 1  # no federation runs there
