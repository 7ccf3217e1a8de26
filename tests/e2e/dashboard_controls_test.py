"""Controls of the page in a real Chromium: what a press does where something is in its way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.browser import Browser
from tests.support.local_federation import LocalFederation, mico_here
from tests.support.page_scripts import row

pytestmark = pytest.mark.e2e

THREE_SNAPSHOTS = """
new Promise((done) => {
  const feed = new EventSource("/admin/stream");
  let seen = 0;
  feed.addEventListener("snapshot", () => ++seen === 3 && done(feed.close()));
})
"""
FAST_REFRESH = """
const every = window.setInterval;
window.setInterval = (act, ms) => every(act, ms === 30000 ? 100 : ms);
"""
REFUSED = """
const ask = window.fetch;
window.fetch = (url, options) => %s
  ? Promise.resolve(new Response('{"error": {"message": "the database is away"}}', { status: 503 }))
  : ask(url, options);
"""
"""Refuses the requests for which an expression is true."""
HOLD_DECISIONS = """
window.held = {};
const ask = window.fetch;
window.fetch = (url, options) => url.includes("/decisions/") ? new Promise((answer) => {
  held[url.split("/").at(-1)] = async () => {
    answer(await ask(url, options));
    for (let turn = 0; turn < 20; turn++) await new Promise((next) => setTimeout(next));
  };
}) : ask(url, options);
"""
FILTERED = """
(async () => {
  const { SiteTable } = await import("/admin/static/site_table.js");
  const { sites: [site] } = await (await fetch("/admin/api/overview")).json();
  const many = Array.from({ length: 12 }, (_, i) => ({ ...site, name: `site-${i}` }));
  const table = document.createElement("table"), filter = document.createElement("input");
  table.append(document.createElement("thead"), document.createElement("tbody"));
  const shown = new SiteTable(table, filter, () => null);
  shown.show(many, []);
  filter.value = "site-11";
  shown.show(many, []);
  shown.show(many.slice(1), []);
  const during = [table.tBodies[0].rows.length, filter.hidden];
  filter.value = "";
  shown.show(many.slice(1), []);
  return [during, [table.tBodies[0].rows.length, filter.hidden]];
})()
"""


@contextmanager
def before_load(page: Browser, script: str) -> Iterator[None]:
    """Load the page anew after a script of the test."""
    added = page.call("Page.addScriptToEvaluateOnNewDocument", source=script)
    try:
        page.run("window.before = true")
        page.call("Page.reload")
        page.until(
            "!window.before && document.querySelector('#feed')?.innerText.startsWith('live')",
            "the page is live",
        )
        yield
    finally:
        page.call("Page.removeScriptToEvaluateOnNewDocument", identifier=added["identifier"])


def test_the_same_query_can_be_looked_up_again(page: Browser) -> None:
    """Its record may be written only after the first look: the page itself says so."""
    page.type("#request-id", "not-written-yet")
    page.key("Enter", 13)
    page.until("document.querySelector('#decision').innerText.includes('Nothing is known')", "the first look")
    page.run("document.querySelector('#decision p').dataset.seen = 'once'")
    page.click("#lookup button")
    page.until("!document.querySelector('#decision p').dataset.seen", "another look")


def test_the_query_asked_for_last_is_the_one_explained(page: Browser) -> None:
    page.run(HOLD_DECISIONS)
    for request_id in ("first", "second"):
        page.run("document.querySelector('#request-id').value = ''")
        page.type("#request-id", request_id)
        page.key("Enter", 13)
        page.until(f"!!held.{request_id}", "it is asked for")
    page.run("held.second()")
    page.run("held.first()")
    assert "Nothing is known of second" in page.text("#decision")


def test_a_weight_that_cannot_be_does_not_keep_a_site_from_being_drained(
    page: Browser, federation: LocalFederation
) -> None:
    site = federation.running.sites[0].name
    page.run(f"{row(site)}.querySelector('.acts button:last-child').click()")
    page.run("document.querySelector('#verbs input[value=weight]').click()")
    page.run("document.querySelector('#weight').value = 150")
    page.click("#no")
    page.run(f"{row(site)}.querySelector('.acts button').click()")
    page.until("!document.querySelector('#yes').disabled", "it can be sent")
    page.type("#reason", "a rehearsal")
    page.key("Enter", 13)
    try:
        page.until("!document.querySelector('#act').open", "it is sent")
        page.until(f"{row(site)}.className === 'draining'", "it drains")
    finally:
        page.run("document.querySelector('#act').close()")
        flags = ("--base-url", federation.base_url, "--api-key", federation.api_key)
        mico_here(federation.folder.path, "sites", "resume", site, "--reason", "it is over", *flags)
    page.until(f"{row(site)}.className === 'ready'", "it is ready again")
    assert page.complaints == []


def test_no_weight_is_not_the_weight_zero(page: Browser, federation: LocalFederation) -> None:
    page.run(f"{row(federation.running.sites[0].name)}.querySelector('.acts button:last-child').click()")
    page.run("document.querySelector('#verbs input[value=weight]').click()")
    page.until("!document.querySelector('#yes').disabled", "it can be sent")
    page.run("document.querySelector('#weight').value = ''")
    page.type("#reason", "a rehearsal")
    assert not page.run("document.querySelector('#act form').checkValidity()")
    page.run("document.querySelector('#weight').dispatchEvent(new Event('input'))")
    page.until("document.querySelector('#preview').innerText.startsWith('weight: how much')", "it asks")
    page.click("#no")


def test_a_sign_out_that_fails_is_told_and_the_page_goes_on(page: Browser) -> None:
    page.run(REFUSED % 'options?.method === "DELETE"')
    page.click("#leave")
    page.until("document.querySelector('header').innerText.includes('the database is away')", "why")
    before = page.text("#feed")
    page.until(f"document.querySelector('#feed').innerText !== {json.dumps(before)}", "the page advances")
    page.run(THREE_SNAPSHOTS)
    assert page.text("#feed").startswith("live")
    assert page.complaints == []


def test_a_paused_page_stands_still_with_its_plots(page: Browser) -> None:
    newest = "#load table tbody tr:first-child th"
    with before_load(page, FAST_REFRESH):
        page.run("document.querySelector('#load details').open = true")
        page.until(f"document.querySelector('{newest}') !== null", "the plot as a table")
        page.click("#pause")
        before = page.text(newest)
        page.run(THREE_SNAPSHOTS)
        assert page.text(newest) == before


FIRST_TICK = "document.querySelector('#load text[text-anchor=start]').textContent"


def test_another_window_is_shown_also_while_the_page_is_paused(page: Browser) -> None:
    before = page.until(FIRST_TICK, "the plot")
    page.click("#pause")
    page.click("#windows [data-minutes='360']")
    page.until(f"{FIRST_TICK} !== {json.dumps(before)}", "the six hours")


def test_plots_are_drawn_when_a_hidden_page_is_seen_again(page: Browser) -> None:
    before = page.until(FIRST_TICK, "the plot")
    page.run("Object.defineProperty(document, 'hidden', { configurable: true, value: true })")
    page.click("#windows [data-minutes='360']")
    page.run(THREE_SNAPSHOTS)
    page.run("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.until(f"{FIRST_TICK} !== {json.dumps(before)}", "the six hours")


def test_one_record_that_cannot_be_read_keeps_no_other_off_the_page(
    page: Browser, federation: LocalFederation
) -> None:
    flags = ("quotas", "set", "--tenant", "default", "--reason", "a trial", "--tokens-per-month")
    mico_here(federation.folder.path, *flags, "321000000")
    try:
        with before_load(page, REFUSED % 'url.includes("fine_tuning")'):
            page.until("document.querySelector('#quotas').innerText.includes('of 321.0 M')", "the quota")
    finally:
        mico_here(federation.folder.path, *flags, "none")


def test_a_filter_that_hides_sites_is_seen(page: Browser) -> None:
    assert page.run(FILTERED) == [[1, False], [11, True]]
