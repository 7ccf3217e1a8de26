"""Measure the page with many sites and a day of history: first paint, redraw, memory, cost of open pages.

`python -m bench.dashboard --minutes 10`; needs Chromium. One process is a gateway without queries: its
directory is fed by hand, and everything that the page talks to is the gateway's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
from litestar import get

from gateway.admin.access import Access
from gateway.admin.dashboard.pages import page_routes
from gateway.admin.reads import read_routes
from gateway.admin.session import session_routes
from gateway.admin.stream import stream_routes
from gateway.domain import Caller, Credit, IterationCost, LoadReport, Model, SiteIdentity
from gateway.federation.directory import Directory
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness
from gateway.http.server import http_server
from gateway.telemetry.history import Sample
from gateway.telemetry.publisher import SnapshotPublisher
from mico.local.plan import free_port
from tests.support.browser import Browser, find_chromium

KEY = "bench-key"
CLOUDS = ("aws", "gcp", "azure", "on-prem")
PAGES = 20
CPU_S = 60.0
REDRAWS_S = 30.0
CPU = {
    "ScriptDuration": "script",
    "LayoutDuration": "layout",
    "RecalcStyleDuration": "style",
    "TaskDuration": "all",
}
INJECTED = """
(() => {
  const add = EventSource.prototype.addEventListener;
  window.draws = [];
  EventSource.prototype.addEventListener = function (kind, listener, ...rest) {
    const timed = (event) => {
      const began = performance.now();
      listener(event);
      document.body.offsetHeight;
      window.draws.push(performance.now() - began);
      window.firstDrawn ??= performance.now();
    };
    return add.call(this, kind, kind === "snapshot" ? timed : listener, ...rest);
  };
})();
"""


class DayOfHistory:
    """A history store that has a whole day of every site."""

    def __init__(self, sites: int) -> None:
        self.sites = sites

    async def save(self, minute: int, sample: dict[str, object]) -> None: ...

    async def since(self, minute: int) -> list[tuple[int, dict[str, object]]]:
        return [(m, asdict(sample_at(m * 60.0, self.sites))) for m in range(minute, minute + 24 * 60)]


def sample_at(at: float, sites: int) -> Sample:
    return Sample(
        at=at,
        output_per_s=900 + 300 * math.sin(at / 3600),
        in_flight=200,
        ttft_p95_s=0.4,
        headroom=0.5,
        clouds={cloud: 200 + 80 * math.sin(at / 900 + i) for i, cloud in enumerate(CLOUDS)},
        load={f"site-{i:03}": round(0.5 + 0.4 * math.sin(at / 600 + i), 4) for i in range(sites)},
    )


def fill(directory: Directory, sites: int) -> None:
    model = Model("m", "1", 8192, 0, "bench")
    for i in range(sites):
        name = f"site-{i:03}"
        identity = SiteIdentity(name, "boot", CLOUDS[i % 4], f"region-{i % 9}", {"m": model}, 8, 100_000)
        directory.join(identity, time.monotonic())


def report(directory: Directory, seq: int) -> None:
    for i, site in enumerate(directory.sites):
        part = 0.5 + 0.4 * math.sin(seq / 20 + i)
        figures = LoadReport(
            seq=seq,
            received_s=time.monotonic(),
            running=round(8 * part),
            pending=round(4 * part),
            token_load=4000 * part,
            kv_free_tokens=round(100_000 * (1 - part)),
            tokens_per_s=400.0,
            iteration=IterationCost(0.02),
            tokens_total=seq * round(300 * part),
            prompt_tokens_total=seq * 100,
        )
        directory.report(site.identity.name, figures, Credit())


async def serve(port: int, sites: int) -> None:
    """Serve the gateway's page without its queries, until the process is killed."""
    directory = Directory()
    fill(directory, sites)
    publisher = SnapshotPublisher(directory, "bench", history_store=DayOfHistory(sites))
    now = time.time()
    for second in range(900, 0, -1):
        publisher.history.add(sample_at(now - second, sites))
    caller = Caller("key", "ops", admin=True)
    backend = Backend(
        answer=lambda _: (_ for _ in ()).throw(NotImplementedError),
        models=list,
        authenticate={KEY: caller}.get,
        ready=lambda: Readiness(True, ""),
        version="0",
    )
    access = Access(backend, lambda _: caller, b"k" * 32)
    nothing_stored: Any = None
    reads = read_routes(access, publisher, nothing_stored)

    @get("/admin/api/batches")
    async def batches() -> dict[str, list[str]]:
        return {"data": []}

    @get("/admin/api/quotas")
    async def quotas() -> dict[str, list[str]]:
        return {"quotas": []}

    page = [*page_routes(), *session_routes(access), *reads, *stream_routes(access, publisher)]
    app = create_http(backend, [*page, batches, quotas])
    server = http_server(app, host="127.0.0.1", port=port, end_within_s=1)
    await publisher.start()
    serving = asyncio.create_task(server.serve())
    seq = 0
    while not serving.done():
        report(directory, seq := seq + 1)
        await asyncio.sleep(1.0)


@contextmanager
def gateway(sites: int) -> Iterator[tuple[str, psutil.Process]]:
    port = free_port()
    command = [sys.executable, "-m", "bench.dashboard", "--serve", str(port), "--sites", str(sites)]
    started = subprocess.Popen(command)
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(started.pid)
    finally:
        started.kill()
        started.wait()


def signed_in(browser: Browser, root: str, sites: int) -> None:
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=INJECTED)
    browser.size(1440, 1000)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:  # until the gateway listens
        browser.call("Page.navigate", url=f"{root}/admin")
        if browser.run("document.querySelector('#sign-in') !== null"):
            break
        time.sleep(0.5)
    browser.until("document.querySelector('#sign-in').open", "the page asks for a key")
    browser.type("#key", KEY)
    browser.key("Enter", 13)
    drawn(browser, sites)


def drawn(browser: Browser, sites: int) -> None:
    rows = f"document.querySelectorAll('#site-table tbody tr').length === {sites}"
    browser.until(rows, "every site has a row")


def first_paint(browser: Browser, root: str, sites: int) -> dict[str, list[int]]:
    """Return milliseconds from the start of the navigation, of several loads with an empty cache."""
    found: dict[str, list[int]] = {"first_paint_ms": [], "all_drawn_ms": []}
    browser.call("Network.setCacheDisabled", cacheDisabled=True)
    for _ in range(5):
        browser.open(f"{root}/admin")
        drawn(browser, sites)
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        found["first_paint_ms"].append(round(browser.until(paint, "it is painted")))
        found["all_drawn_ms"].append(round(browser.run("window.firstDrawn")))
    return found


def redraws(browser: Browser, minutes: int) -> dict[str, float]:
    """Milliseconds of one snapshot: `cpu_` of the page's thread, `wall_` beside all else that runs here.

    Script, style and layout; `cpu_all` is with reading the snapshot and painting.
    """
    browser.click(f"#windows [data-minutes='{minutes}']")
    wait(5.0)
    browser.run("window.draws.length = 0")
    before = metrics(browser)
    wait(REDRAWS_S)
    after = metrics(browser)
    taken = sorted(browser.run("window.draws"))
    cost = {name: 1000 * (after[name] - before[name]) / len(taken) for name in CPU}
    return {
        "redraws": len(taken),
        "wall_p50_ms": round(taken[len(taken) // 2], 2),
        "wall_p95_ms": round(taken[int(0.95 * len(taken))], 2),
        **{f"cpu_{CPU[name]}_ms": round(cost[name], 2) for name in CPU},
    }


def metrics(browser: Browser) -> dict[str, float]:
    return {each["name"]: each["value"] for each in browser.call("Performance.getMetrics")["metrics"]}


def memory(browser: Browser, process: psutil.Process) -> dict[str, float]:
    """Measure the page's heap and nodes after a forced collection, and the gateway's memory."""
    for _ in range(2):
        browser.call("HeapProfiler.collectGarbage")
    now = metrics(browser)
    return {
        "heap_mib": round(now["JSHeapUsedSize"] / 2**20, 2),
        "nodes": now["Nodes"],
        "listeners": now["JSEventListeners"],
        "gateway_rss_mib": round(process.memory_info().rss / 2**20, 1),
    }


def soak(browser: Browser, process: psutil.Process, minutes: int) -> list[dict[str, float]]:
    """Alternate between the short window and the long one, a minute each."""
    found = [memory(browser, process)]
    for minute in range(minutes):
        browser.click(f"#windows [data-minutes='{(15, 1440)[minute % 2]}']")
        wait(60.0)
        browser.run("window.draws.length = 0")
        found.append(memory(browser, process))
        print(json.dumps(found[-1]), flush=True)
    return found


def cores(process: psutil.Process, seconds: float) -> float:
    before = process.cpu_times()
    began = time.perf_counter()
    wait(seconds)
    after = process.cpu_times()
    used_s: float = after.user + after.system - before.user - before.system
    return used_s / (time.perf_counter() - began)


@contextmanager
def listeners(root: str, number: int) -> Iterator[None]:
    """Open `number` connections that listen and read all that is sent to them."""
    import httpx

    def listen() -> None:
        with httpx.stream("GET", f"{root}/admin/stream", headers=headers, timeout=30) as answered:
            for piece in answered.iter_raw():
                received.append(piece.count(b"event: snapshot"))
                if over.is_set():
                    return

    over, received = threading.Event(), list[int]()
    headers = {"authorization": f"Bearer {KEY}"}
    threads = [threading.Thread(target=listen) for _ in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        assert sum(received) > 0.8 * number * CPU_S, "not everybody was told every second"


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


def measure(sites: int, minutes: int) -> dict[str, Any]:
    program = find_chromium()
    assert program is not None, "needs Chromium: apt-get install chromium"
    found: dict[str, Any] = {"sites": sites, "load_average": os.getloadavg()}
    with ExitStack() as stack:
        root, process = stack.enter_context(gateway(sites))
        profile = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with Browser(program, profile) as browser:
            browser.call("Performance.enable", timeDomain="threadTicks")
            signed_in(browser, root, sites)
            found |= first_paint(browser, root, sites)
            found["redraw_15_min"] = redraws(browser, 15)
            found["redraw_24_h"] = redraws(browser, 1440)
            print(json.dumps(found), flush=True)
            found["memory"] = soak(browser, process, minutes)
            found["redraw_15_min_after"] = redraws(browser, 15)
            assert browser.complaints == [], browser.complaints
        alone = cores(process, CPU_S)
        with listeners(root, PAGES):
            wait(5.0)  # the first snapshots are not counted
            open_pages = cores(process, CPU_S)
    found["cores_alone"], found["cores_with_pages"] = round(alone, 4), round(open_pages, 4)
    found["core_percent_of_pages"] = round(100 * (open_pages - alone), 2)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--minutes", type=int, default=10, help="of the soak")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        asyncio.run(serve(options.serve, options.sites))
        return
    print(json.dumps(measure(options.sites, options.minutes)))


if __name__ == "__main__":
    main()
