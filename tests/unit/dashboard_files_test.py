"""The page's files: small, nothing inline, nothing from elsewhere, every label where it belongs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import Any

import pytest

from gateway.admin.dashboard.pages import FOLDER, POLICY, read_files

LIMIT_BYTES = 73_600
"""With each part that the page has so far, and 0.5 kB."""


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []
        self._in: str = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in = tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in in ("script", "style") and data.strip():
            self.inline.append(data)


def page() -> Page:
    parsed = Page()
    parsed.feed((FOLDER / "index.html").read_text())
    return parsed


def test_everything_together_is_small() -> None:
    files = read_files()
    assert sum(len(file.body) for file in files.values()) < LIMIT_BYTES
    assert set(files) == {path.name for path in FOLDER.iterdir()}


def test_nothing_is_inline_and_the_policy_forbids_it() -> None:
    parsed = page()
    assert parsed.inline == []
    handlers = [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    styles = [tag for tag, attributes in parsed.elements if "style" in attributes]
    assert handlers + styles == []
    assert "default-src 'none'" in POLICY
    assert "unsafe" not in POLICY


def test_no_file_points_away_from_the_gateway() -> None:
    for path in FOLDER.iterdir():
        found = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", path.read_text()))
        assert found <= {"http://www.w3.org/2000/svg"}, path.name


def test_text_is_never_parsed_as_html() -> None:
    assert len(list(FOLDER.glob("*.js"))) > 3
    for path in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", path.read_text()
        )


def test_every_field_has_a_label_and_every_id_is_there_once() -> None:
    parsed = page()
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    labelled = {attributes.get("for") for tag, attributes in parsed.elements if tag == "label"}
    for tag, attributes in parsed.elements:
        if tag in ("input", "select") and attributes.get("type") != "checkbox":
            assert attributes["id"] in labelled or "aria-label" in attributes, attributes
    wanted = set(re.findall(r"\$\(\"([\w-]+)\"\)", "".join(p.read_text() for p in FOLDER.glob("*.js"))))
    assert wanted <= set(ids)
    for attribute in ("aria-labelledby",):
        assert {a[attribute] for _, a in parsed.elements if attribute in a} <= set(ids)


def test_files_import_what_others_export_and_every_file_is_used() -> None:
    texts = {path.name: path.read_text() for path in FOLDER.glob("*.js")}
    exported = {
        name: set(re.findall(r"^export (?:async )?(?:function|class) (\w+)", text, re.MULTILINE))
        for name, text in texts.items()
    }
    imported: dict[str, set[str]] = {name: set() for name in texts}
    for text in texts.values():
        for names, source in re.findall(r'^import \{ ([\w, ]+) \} from "\./([\w.]+)";$', text, re.MULTILINE):
            imported[source] |= set(names.split(", "))
    assert imported == exported
    linked = {attributes.get("src") or attributes.get("href") or "" for _, attributes in page().elements}
    files = {link.removeprefix("/admin/static/") for link in linked if link.startswith("/admin/static/")}
    assert files <= set(read_files())
    assert {name for name, used in imported.items() if not used} <= files


ODD_NAMES = """
import { append, asColumns, ownColumns } from "%s";
const names = ["constructor", "__proto__", "toString", "a"];
const clouds = JSON.parse('{"__proto__": 1, "valueOf": 2}');
const snapshot = (at, names) => ({ at, totals: { queued: at }, clouds,
  sites: names.map((name) => ({ name, load: at })) });
const columns = ownColumns(JSON.parse('{"at": [0], "queued": [0], "clouds": {}, "load": {"a": [0]}}'));
for (const [at, seen] of [[1, names], [2, ["a"]]]) append(columns, asColumns(snapshot(at, seen)), ["queued"]);
console.log(JSON.stringify([columns.queued, Object.entries(columns.load), Object.entries(columns.clouds)]));
"""


SET_BACK = """
import { append, ownColumns } from "%s";
const clouds = { a: [1, 2, 7], b: [null, null, 7] };
const columns = ownColumns({ at: [1, 2, 7], queued: [1, 2, 7], clouds, load: {} });
append(columns, { at: [3], queued: [3], clouds: { a: [3] }, load: {} }, ["queued"]);
console.log(JSON.stringify(columns));
"""


def test_samples_of_a_clock_that_was_set_back_since_leave_the_page() -> None:
    shown = run_script(SET_BACK, "columns.js")
    assert (shown["at"], shown["queued"]) == ([1, 2, 3], [1, 2, 3])
    assert shown["clouds"] == {"a": [1, 2, 3], "b": [None, None, None]}


MOMENTS = """
import { moment } from "%s";
const noon = Date.UTC(2026, 10, 30, 12) / 1000, hours = 3600;
Date.now = () => noon * 1000;
const later = [0, -12 * hours, -12 * hours - 1, 36 * hours];
console.log(JSON.stringify(later.map((seconds) => moment(noon + seconds))));
"""


def run_script(script: str, file: str) -> Any:
    """Return what a script prints of a file of the page."""
    node = shutil.which("node")
    if node is None:
        pytest.skip(f"node is not on the PATH: {file} is not checked here")
    done = subprocess.run(
        [node, "--input-type=module", "--eval", script % (FOLDER / file).as_uri()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TZ": "UTC"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_time_of_another_day_has_its_day() -> None:
    shown = ["12:00:00", "00:00:00", "29 Nov, 23:59:59", "2 Dec, 00:00:00"]
    assert run_script(MOMENTS, "render.js") == shown


def test_a_site_may_have_a_name_that_objects_of_javascript_have_too() -> None:
    queued, load, clouds = run_script(ODD_NAMES, "columns.js")
    assert queued == [0, 1, 2]
    gone = [None, 1, None]
    assert dict(load) == {"a": [0, 1, 2], "constructor": gone, "__proto__": gone, "toString": gone}
    assert dict(clouds) == {"__proto__": [None, 1, 1], "valueOf": [None, 2, 2]}
