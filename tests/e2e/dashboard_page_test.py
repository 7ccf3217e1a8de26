"""The page in a real Chromium, beside a real federation: what an operator does, step by step."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from gateway.store.database import open_engine
from gateway.store.tables import files
from gateway.tuning.events import Events
from gateway.tuning.ledger import Ledger, new_job_id
from gateway.tuning.values import Job, JobStatus, Plan, StepFigures, TuningLimits
from tests.support.browser import Browser
from tests.support.local_federation import LocalFederation, mico_here
from tests.support.page_scripts import DISORDER, FAINT, FOCUSED, NAMELESS, STATES, WRAPPED_ROWS, row

pytestmark = pytest.mark.e2e


def ask(federation: LocalFederation, tokens: int = 60) -> str:
    """One query answered; its request id."""
    body = {
        "model": federation.model,
        "messages": [{"role": "user", "content": "Say much."}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    with federation.http() as http:
        answered = http.post("/v1/chat/completions", json=body).raise_for_status()
    return str(answered.headers["x-request-id"])


@pytest.fixture
def priced_site(federation: LocalFederation) -> str:
    """The site of a query whose cost is written: the gateway sums what clouds cost once in a while only."""
    messages: Any = [{"role": "user", "content": "Hi"}]
    with federation.sdk() as sdk:
        answer = sdk.chat.completions.with_raw_response.create(
            model=federation.model, messages=messages, max_tokens=4
        )
    assert float(answer.headers["x-mico-cost-usd"]) > 0
    federation.recorded_once([answer.headers["x-request-id"]])
    return str(answer.headers["x-mico-site"])


def test_what_a_cloud_cost_is_on_the_page(
    priced_site: str, page: Browser, federation: LocalFederation
) -> None:
    cloud = json.dumps(federation.sites()[priced_site]["cloud"])
    text = "document.querySelector('#spending tbody').innerText"
    page.until(f"{text}.includes({cloud}) && {text}.includes('$0.0')", "what the cloud cost")


def test_it_lives_shows_load_where_it_is_and_explains_a_query(
    page: Browser, federation: LocalFederation
) -> None:
    before = page.text("#feed")
    page.until(f"document.querySelector('#feed').innerText !== {json.dumps(before)}", "the page advances")
    shown = threading.Event()

    def ask_until_shown() -> str:
        request_id = ask(federation)
        while not shown.is_set():
            ask(federation)
        return request_id

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask_until_shown) for _ in range(6)]
        busy = "[...document.querySelectorAll('#site-table progress')].some((bar) => bar.value > 0)"
        try:
            page.until(busy, "the load is in a bar")
        finally:
            shown.set()
        request_id = asked[0].result()
    page.until("!document.querySelector('#routes').innerText.includes('No query')", "the reasons")
    federation.recorded_once([request_id])
    page.type("#request-id", request_id)
    page.key("Enter", 13)
    page.until("document.querySelector('#decision tr.chosen') !== null", "the explanation")
    explanation = page.text("#decision")
    for word in ("answered", "Attempt 1", "earliest finish", "60 response", "to the first token"):
        assert word in explanation
    federation.wait_until_idle()


def test_a_route_is_shown_with_its_targets_and_hidden_without_one(
    page: Browser, federation: LocalFederation
) -> None:
    assert page.run("document.querySelector('#model-routes-section').hidden")
    targets = [{"model": federation.model, "weight": 95}, {"model": "<b>canary</b>", "weight": 5}]
    with federation.http() as http:
        body = {"name": "assistant", "targets": targets, "reason": "a rehearsal"}
        http.post("/admin/api/routes", json=body).raise_for_status()
        page.until("!document.querySelector('#model-routes-section').hidden", "the section")
        asked = {"model": "assistant", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        answered = http.post("/v1/chat/completions", json=asked).raise_for_status()
        assert (answered.json()["model"], answered.headers["x-mico-model"]) == ("assistant", federation.model)
        page.until("document.querySelector('#model-routes').innerText.includes('100')", "the share")
        assert "<b>canary</b>" in page.text("#model-routes")
        http.post("/admin/api/routes/remove", json={"name": "assistant", "reason": "over"}).raise_for_status()
    page.until("!document.querySelector('#model-routes').innerText.includes('canary')", "its end")


def test_a_site_is_drained_with_a_reason_and_resumed(page: Browser, federation: LocalFederation) -> None:
    site = federation.running.sites[0].name
    page.run(f"{row(site)}.querySelector('.acts button').click()")
    page.until("document.querySelector('#preview p') !== null", "what it would do")
    assert page.run("document.activeElement.id") == "reason"
    page.key("Enter", 13)  # without a reason the browser itself objects
    assert page.run("document.querySelector('#act').open")
    page.type("#reason", "a rehearsal")
    page.key("Enter", 13)
    page.until(f"{row(site)}.className === 'draining'", "the table says so")
    page.until("document.querySelector('#banner').innerText.includes('draining')", "the banner says so")
    page.until("document.querySelector('#events').innerText.includes('a rehearsal')", "the event")
    assert federation.sites()[site]["state"] == "draining"
    assert federation.sites()[site]["orders"][0]["reason"] == "a rehearsal"
    flags = ("--base-url", federation.base_url, "--api-key", federation.api_key)
    mico_here(federation.folder.path, "sites", "resume", site, "--reason", "it is over", *flags)
    page.until(f"{row(site)}.className === 'ready'", "it is ready again")


HOLD_ACTS = """
window.held = [];
const ask = window.fetch;
window.fetch = (url, options) => url.includes("/sites/") ? new Promise((answer) => held.push(async () => {
  const got = await ask(url, options);
  answer(new Response(await got.text(), { status: got.status }));
  for (let turn = 0; turn < 3; turn++) await new Promise((next) => setTimeout(next));
})) : ask(url, options);
"""


def test_the_effect_that_is_shown_is_on_the_site_that_is_asked_about(
    page: Browser, federation: LocalFederation
) -> None:
    one, two = (site.name for site in federation.running.sites[:2])
    page.run(HOLD_ACTS)
    for number, site in enumerate((one, two), 1):
        page.run(f"{row(site)}.querySelector('.acts button').click()")
        page.until(f"held.length === {number}", "it is asked what that would do")
        if site == one:
            page.click("#no")
    page.run("held[1]()")
    assert f"drain {two}".capitalize() in page.text("#preview")
    page.run("held[0]()")  # answered when nobody asks for it any more
    assert f"drain {two}".capitalize() in page.text("#preview")


def test_a_killed_site_is_shown_and_its_return_too(page: Browser, federation: LocalFederation) -> None:
    site = federation.running.sites[-1].name
    federation.kill(site)
    try:
        page.until(f"{row(site)}.className === 'down'", "the table says so")
        named = f"({site}|more)[^:]* down"  # beside sites that other tests have left
        page.until(f"/{named}/.test(document.querySelector('#banner').innerText)", "the banner")
        page.until(f"/down\\s+since \\d\\d:\\d\\d/.test({row(site)}.innerText)", "since when")
        assert page.text("#banner").startswith(("Degraded: ", "Critical: "))  # or what failed just before
    finally:
        federation.restart_dead()
    page.until(f"{row(site)}.className === 'ready'", "it is back")


def test_it_is_clean_accessible_and_fits_a_phone(
    page: Browser, federation: LocalFederation, tmp_path: Path
) -> None:
    for width, dark in ((1440, False), (1440, True), (390, False)):
        page.size(width, 900, dark=dark)
        page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(NAMELESS) == []
        assert page.run(FAINT) == []
        assert page.run(DISORDER) == 0
        page.picture(tmp_path / f"{width}-{dark}.png")
        assert (tmp_path / f"{width}-{dark}.png").stat().st_size > 10_000
    page.run("document.querySelector('#load details').open = true")
    page.until("document.querySelectorAll('#load table tbody tr').length > 1", "the plot as a table")
    page.click("#pause")
    page.run(STATES)
    for dark in (False, True):
        page.size(1440, 900, dark=dark)
        assert page.run(FAINT) == []
    root = federation.base_url.removesuffix("/v1")
    assert {url for url in page.requested if not url.startswith(root)} <= {"about:blank"}
    assert page.complaints == []


def test_a_site_is_one_line_of_cells_and_fits_a_small_laptop(page: Browser) -> None:
    page.size(1280, 800)
    assert page.run(WRAPPED_ROWS) == 0
    overflow = "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)"
    assert page.run(f"{overflow}(document.querySelector('#sites .scroll'))") <= 0


def test_a_long_name_of_a_site_is_read_whole_on_a_small_laptop(page: Browser) -> None:
    page.size(1280, 800)
    page.until("document.querySelectorAll('#site-table .name span').length", "a site")
    name = "document.querySelector('#site-table .name span')"
    page.run(f"{name}.dataset.was = {name}.textContent")
    try:
        for long in ("gcp-europe-west4-training-and-inference-h100-a", "x" * 63):
            page.run(f"{name}.textContent = '{long}'")
            assert page.run(f"{name}.scrollWidth <= {name}.clientWidth"), long
    finally:
        page.run(f"{name}.textContent = {name}.dataset.was")


def test_all_of_it_can_be_done_by_keyboard(page: Browser, federation: LocalFederation) -> None:
    page.run("document.activeElement.blur()")
    reached = []
    for _ in range(60):
        page.key("Tab", 9)
        if page.run("document.activeElement !== document.body"):  # else it is at the browser's own buttons
            seen, name = page.run(FOCUSED)
            assert seen, f"the focus is not seen on {name}"
            reached.append(name)
    assert "Skip to the sites" in reached
    for name in ("15 min", "24 h", "Pause", "Sign out", "Token load", "Drain", "⋯", "request-id", "Explain"):
        assert name in reached, name
    page.run(f"{heading('Token load')}.focus()")
    page.key("Enter", 13)
    assert page.run(f"{heading('Token load')}.closest('th').getAttribute('aria-sort')") == "descending"
    page.run("document.querySelector('#site-table .acts button').focus()")
    page.key("Enter", 13)
    page.until("document.querySelector('#act').open", "the dialog")
    page.key("Escape", 27)
    page.until("!document.querySelector('#act').open", "it is closed")
    assert page.run("document.activeElement.closest('.acts') !== null"), "the focus is back where it was"
    assert page.complaints == []


def test_a_newcomer_finds_the_hot_cloud_since_when_why_and_takes_the_site_out(
    page: Browser, federation: LocalFederation
) -> None:
    """Nothing but the page: what is said there and what can be pressed there. The load is the only help."""
    hot = federation.running.sites[0].name
    others = [site.name for site in federation.running.sites[1:]]
    flags = ("--base-url", federation.base_url, "--api-key", federation.api_key)
    for name in others:  # so that all the load is in one cloud
        order = ("sites", "weight", name, "0", "--reason", "a lesson", "--yes")
        mico_here(federation.folder.path, *order, *flags)
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(ask, federation, 200) for _ in range(12)]
        # 1. which cloud is hot: sorted by "Token load", the first row names the site and its cloud
        page.run(f"{heading('Token load')}.click()")
        first = "document.querySelector('#site-table tbody tr')"
        loaded = f"{first}.querySelector('progress').value > 0.01"
        page.until(f"{loaded} && {row(hot)} === {first}", "the hot site comes first")
        cloud = federation.sites()[hot]["cloud"]
        assert page.run(f"{first}.querySelector('.name small').textContent").startswith(cloud)
        # 2. since when: arrow keys move through the plot of token load, back to where the site was idle
        page.run("document.querySelector('#load svg').focus()")
        page.until(f"{tip(hot)} > 0", "the plot says how loaded it is now", press=("ArrowRight", 39))
        now = page.text("#load .tip b")
        page.until(f"!({tip(hot)} > 0)", "and since when", press=("ArrowLeft", 37))
        assert page.text("#load .tip b") < now
        # the same as a table of times
        page.run("document.querySelector('#load details').open = true")
        told = f"document.querySelector('#load table').innerText.includes({json.dumps(hot)})"
        page.until(told, "the load over time, by site")
        times = "document.querySelectorAll('#load table tbody th, #load table tbody td:first-child').length"
        assert page.run(times) > 1
        request_ids = [each.result() for each in asked]
    # 3. why a query went where it went: its id into the field "Request id"
    federation.recorded_once(request_ids[:1])
    page.type("#request-id", request_ids[0])
    page.key("Enter", 13)
    page.until("document.querySelector('#decision tr.chosen') !== null", "the chosen site and its estimate")
    assert hot in page.text("#decision tr.chosen")
    # 4. out safely: Drain says first what it costs, and warns that nobody else takes the queries now
    page.run(f"{row(hot)}.querySelector('.acts button').click()")
    page.until("document.querySelector('#preview .risk') !== null", "the warning")
    assert "No other site can serve" in page.text("#preview")
    page.click("#no")
    # so first others are given their weight back, from their own rows
    for name in others:
        page.run(f"{row(name)}.querySelector('.acts button:last-child').click()")
        page.run("document.querySelector('#verbs input[value=weight]').click()")
        page.run("document.querySelector('#weight').value = 100")
        page.type("#reason", "they shall take the load")
        page.key("Enter", 13)
        page.until(f"!document.querySelector('#act').open && {weight(name)} === '100'", "its weight is back")
    page.run(f"{row(hot)}.querySelector('.acts button').click()")
    page.until("document.querySelector('#preview p') !== null", "what it would do")
    page.until("document.querySelector('#preview .risk') === null", "no warning is left")
    page.type("#reason", "too hot")
    page.key("Enter", 13)
    # 5. proof: the badge, and the banner that says how many queries are left
    page.until(f"{row(hot)}.className === 'draining'", "the badge")
    page.until(f"document.querySelector('#banner').innerText.includes('{hot} draining')", "the banner")
    assert ask(federation, 4)
    page.run(f"{row(hot)}.querySelector('.acts button').click()")
    page.type("#reason", "the lesson is over")
    page.key("Enter", 13)
    page.until(f"{row(hot)}.className === 'ready'", "it is back")


def heading(title: str) -> str:
    """An expression for the button that sorts by a column."""
    buttons = "[...document.querySelectorAll('#site-table thead button')]"
    return f"{buttons}.find((b) => b.innerText === {json.dumps(title)})"


def tip(site: str) -> str:
    """An expression for the percentage that the plot of token load says of a site where one points."""
    return f"Number(document.querySelector('#load .tip').innerText.match(/{site}: (\\d+)/)?.[1])"


def weight(site: str) -> str:
    return f"{row(site)}.querySelector('[data-label^=Weight]').textContent.split(' ')[0]"


def test_a_batch_is_on_the_page(page: Browser, federation: LocalFederation, tmp_path: Path) -> None:
    body = {"model": federation.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    flags = ("--base-url", federation.base_url, "--api-key", federation.api_key)
    told = mico_here(federation.folder.path, "batch", "run", str(tmp_path / "in.jsonl"), *flags, "--json")
    batch_id = json.loads(told)["id"]
    page.open(federation.base_url.removesuffix("/v1") + "/admin")
    page.until(f"document.querySelector('#batches').innerText.includes({json.dumps(batch_id)})", "the batch")
    assert "1 of 1" in page.text("#batches")
    assert page.complaints == []


def test_a_job_of_fine_tuning_is_on_the_page_with_its_loss(
    page: Browser, federation: LocalFederation
) -> None:
    assert page.run("document.querySelector('#training-section').hidden")
    with federation.sdk() as sdk:
        file = sdk.files.create(
            file=("rows.jsonl", b'{"prompt": "a", "completion": "b"}'), purpose="fine-tune"
        )
    job_id, ended = new_job_id(), {"status": JobStatus.SUCCEEDED, "site": "<b>school</b>"}

    async def write() -> None:
        engine, limits = open_engine(federation.running.database_url), TuningLimits()
        events = Events(engine, time.time, limits.events)
        async with engine.connect() as connection:
            tenant = await connection.scalar(select(files.c.tenant).where(files.c.id == file.id))
        job = Job(job_id, tenant, "a key", federation.model, file.id, time.time(), Plan(), **ended)
        await Ledger(engine, "a test", time.time, limits).create(replace(job, step=4, total_steps=4))
        for step in range(1, 5):
            async with engine.begin() as connection:
                figures = StepFigures(step, 4.0 / step, 0.5, 1.25 if step == 4 else None)
                await events.add_step(connection, job_id, 4, figures)
        await engine.dispose()

    asyncio.run(write())
    page.open(federation.base_url.removesuffix("/v1") + "/admin")
    page.until(f"document.querySelector('#training').innerText.includes({json.dumps(job_id)})", "the job")
    shown = page.text("#training")
    for words in ("succeeded", "<b>school</b>", "4 of 4", "4 → 1, 1.25 held out"):
        assert words in shown, shown
    drawn = page.run("document.querySelector('#training .spark').getAttribute('d')")
    heights = [float(point.split()[1]) for point in re.split("[ML]", drawn)[1:]]
    assert len(heights) == 4 and heights == sorted(heights)  # a loss that falls
    assert page.complaints == [] and page.run(NAMELESS) == []


def test_quotas_are_on_the_page_the_fullest_first(page: Browser, federation: LocalFederation) -> None:
    """Where nothing may be used, nothing is left."""
    folder, why = federation.folder.path, ("--reason", "a trial")
    flags = ("quotas", "set", "--tenant", "default", *why)
    mico_here(folder, *flags, "--tokens-per-month", "123000000", "--usd-per-month", "12.34")
    mico_here(folder, "tenants", "set", "shut", *why)
    mico_here(folder, "quotas", "set", "--tenant", "shut", *why, "--requests-per-min", "0")
    try:
        page.open(federation.base_url.removesuffix("/v1") + "/admin")
        page.until("document.querySelector('#quotas').innerText.includes('of 123.0 M')", "the quota")
        assert "of $12.34" in page.text("#quotas")
        assert "tenant default" in page.text("#quotas")
        assert "tenant shut" in page.text("#quotas tbody tr")
    finally:
        mico_here(folder, *flags, "--tokens-per-month", "none", "--usd-per-month", "none")
        mico_here(folder, "quotas", "set", "--tenant", "shut", *why, "--requests-per-min", "none")


def test_signing_out_ends_the_feed(page: Browser) -> None:
    page.click("#leave")
    page.until("document.querySelector('#site-table tbody tr') === null", "the page is new")
    page.until("document.querySelector('#sign-in')?.open", "it asks for a key again")
    assert page.run("fetch('/admin/api/overview').then((answer) => answer.status)") == 401
    assert page.text("#feed") == "connecting"


def test_what_only_screen_readers_are_told_is_never_seen(page: Browser) -> None:
    """However long it is: a banner of two lines once stood in the picture twice."""
    page.run("document.querySelector('#status').textContent = 'much is wrong, '.repeat(99)")
    seen = "(() => { const { right, width } = document.querySelector('#status').getBoundingClientRect();"
    assert page.run(seen + " return right <= 0 || width <= 1; })()")
