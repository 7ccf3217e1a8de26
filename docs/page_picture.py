"""Make docs/page.png: the page of a federation under load, of which a site has just been killed.

`python -m docs.page_picture` in a checkout, with Chromium on the PATH. It starts a federation of its own,
keeps streams going at all sites, kills one site as a power failure would, and takes the picture once they go
on elsewhere.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import threading
from pathlib import Path

import httpx

from mico.demo_model import FOLDER
from mico.local.folder import Folder
from tests.support.browser import Browser, find_chromium
from tests.support.local_federation import LocalFederation, mico

PICTURE = Path(__file__).with_name("page.png")
VICTIM = "gcp-europe-west4"
STREAMS = 10
WIDTH = 1280
BEFORE_S, AFTER_S = 60, 20
"""Seconds of load that the plots show before and after the loss."""
PROMPTS = ("Why is the sky blue?", "Name three rivers.", "Tell me a story about a dog.", "How do planes fly?")


def keep_asking(federation: LocalFederation, number: int, stop: threading.Event, lost: list[str]) -> None:
    """Stream one answer after the other; note those that did not end as they should."""
    with httpx.Client(timeout=120) as client:
        while not stop.is_set():
            body = {
                "model": federation.model,
                "messages": [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}],
                "stream": True,
                "max_tokens": 300,
            }
            headers = {"authorization": f"Bearer {federation.api_key}"}
            with client.stream(
                "POST", f"{federation.base_url}/chat/completions", json=body, headers=headers
            ) as answer:
                text = "".join(answer.iter_text())
            if not text.rstrip().endswith("data: [DONE]"):
                lost.append(text[-300:])


def start(path: Path) -> LocalFederation:
    facts = json.loads(mico(path, "up", "--detach", "--json", "--port", "0"))
    return LocalFederation(Folder(path), facts["base_url"], facts["api_key"], facts["model"], FOLDER)


def open_page(browser: Browser, federation: LocalFederation) -> None:
    browser.size(WIDTH, 1120)
    browser.open(federation.base_url.removesuffix("/v1") + "/admin")
    browser.until("document.querySelector('#sign-in').open", "the page asks for a key")
    browser.type("#key", federation.api_key)
    browser.key("Enter", 13)
    browser.until("document.querySelectorAll('#site-table tbody tr').length === 3", "every site is shown")


def watch_a_loss(browser: Browser, federation: LocalFederation) -> None:
    pause = threading.Event()
    pause.wait(BEFORE_S)
    federation.kill(VICTIM)
    rows = "[...document.querySelectorAll('#site-table tbody tr')].map((r) => r.innerText)"
    browser.until(f"{rows}.some((t) => t.includes('{VICTIM}') && t.includes('down'))", "the loss is shown")
    pause.wait(AFTER_S)


def take(browser: Browser) -> None:
    """Write the picture, down to the events and decisions."""
    bottom = browser.run("document.querySelector('#events').parentElement.getBoundingClientRect().bottom")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": bottom + 12, "scale": 1}
    shot = browser.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    PICTURE.write_bytes(base64.b64decode(shot["data"]))


def main() -> int:
    program = find_chromium()
    if program is None:
        sys.stderr.write("error: no Chromium on the PATH\ntip: apt install chromium\n")
        return 1
    stop, lost = threading.Event(), list[str]()
    with tempfile.TemporaryDirectory() as folder, Browser(program, Path(folder) / "profile") as browser:
        federation = start(Path(folder) / "mico")
        threads = [
            threading.Thread(target=keep_asking, args=(federation, number, stop, lost))
            for number in range(STREAMS)
        ]
        try:
            open_page(browser, federation)
            for thread in threads:
                thread.start()
            watch_a_loss(browser, federation)
            take(browser)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            federation.end()
    sys.stdout.write(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KB; streams that broke: {len(lost)}\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
