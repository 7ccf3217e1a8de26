"""Controls of the page in a real Chromium: what a press does where something is in its way."""

from __future__ import annotations

import pytest

from tests.support.browser import Browser

pytestmark = pytest.mark.e2e
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


def test_the_same_query_can_be_looked_up_again(page: Browser) -> None:
    """Its record may be written only after the first look: the page itself says so."""
    page.type("#request-id", "not-written-yet")
    page.key("Enter", 13)
    page.until("document.querySelector('#decision').innerText.includes('Nothing is known')", "the first look")
    page.run("document.querySelector('#decision p').dataset.seen = 'once'")
    page.click("#lookup button")
    page.until("!document.querySelector('#decision p').dataset.seen", "another look", within_s=10)


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
