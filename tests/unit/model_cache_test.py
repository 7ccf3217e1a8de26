"""An entry of the cache of models is whole or not there, whatever happens while it is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from site_engine.model.cache import STAGING, entries, make_once, models_folder, note_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return models_folder()


def write(text: str, folder: Path) -> None:
    (folder / "weights").write_text(text)


def test_an_entry_is_made_once_and_again_when_its_source_changes(cache: Path) -> None:
    made: list[str] = []

    def make(text: str) -> Path:
        def fill(folder: Path) -> None:
            made.append(text)
            write(text, folder)

        return make_once(cache / "key" / "name", {"source": text}, fill)

    assert make("a") == make("a") == cache / "key" / "name"
    assert (make("b") / "weights").read_text() == "b"
    assert made == ["a", "b"]
    assert list(entries()) == [(cache / "key" / "name", {"source": "b"})]


def test_nothing_is_left_of_what_fails(cache: Path) -> None:
    def fail(folder: Path) -> None:
        write("half", folder)
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        make_once(cache / "key" / "name", {}, fail)
    assert list(cache.iterdir()) == []


def test_a_failure_keeps_the_entry_that_was_there(cache: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError("no room")

    folder = make_once(cache / "key" / "name", {"source": "a"}, lambda folder: write("a", folder))
    with pytest.raises(OSError, match="no room"):
        make_once(folder, {"source": "b"}, fail)
    assert (note_of(folder), (folder / "weights").read_text()) == ({"source": "a"}, "a")


def test_what_a_killed_process_left_is_removed(cache: Path) -> None:
    left = cache / "key" / STAGING
    left.mkdir(parents=True)
    write("half", left)
    folder = make_once(cache / "key" / "name", {"source": "a"}, lambda folder: None)
    assert sorted(path.name for path in folder.iterdir()) == ["mico.json"]
    assert list(folder.parent.iterdir()) == [folder]


def test_processes_that_want_the_same_entry_make_it_once(cache: Path) -> None:
    made: list[Path] = []
    together = Barrier(4)

    def want(_: int) -> Path:
        together.wait()
        return make_once(cache / "key" / "name", {"source": "a"}, made.append)

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(want, range(4))) == {cache / "key" / "name"}
    assert len(made) == 1
