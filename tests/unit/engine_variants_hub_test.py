"""Variants from the Hub, by a server on loopback that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from site_engine.core.chain import Variant
from site_engine.errors import VariantRefused
from site_engine.variants.hub import local_folder
from tests.support.engine_models import drain, engine_for, greedy
from tests.support.variants import lora, served

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = f"hf:acme/support@{COMMIT}"


class FakeHub(ThreadingHTTPServer):
    """Serves the files of one folder as the repository acme/support; `got` are those that were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.got: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self.do_GET(with_body=False)

    def do_GET(self, *, with_body: bool = True) -> None:
        path = self.path.partition("?")[0]
        files = f"/acme/support/resolve/{COMMIT}/"
        if path == f"/api/models/acme/support/tree/{COMMIT}":
            self._answer(json.dumps(self._tree()).encode(), with_body)
        elif path.startswith(files) and (file := self.server.folder / path.removeprefix(files)).is_file():
            if with_body:
                self.server.got.append(file.name)
            self._answer(file.read_bytes(), with_body)
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _tree(self) -> list[dict[str, object]]:
        root = self.server.folder
        files = [each for each in root.rglob("*") if each.is_file()]
        return [
            {
                "type": "file",
                "path": str(each.relative_to(root)),
                "size": each.stat().st_size,
                "oid": hashlib.sha1(each.read_bytes()).hexdigest(),
            }
            for each in files
        ]

    def _answer(self, body: bytes, with_body: bool) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base
        pass


@contextmanager
def hub(folder: Path) -> Iterator[FakeHub]:
    with FakeHub(folder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_adapter_of_the_hub_is_fetched_once_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = served()
    made = lora(tmp_path / "there", plain, rank=4, seed=1)
    (tmp_path / "there" / "adapter_model.bin").write_bytes(b"a pickle")
    (tmp_path / "there" / "run.py").write_text("raise SystemExit")
    (tmp_path / "there" / "checkpoint-1").mkdir()
    (tmp_path / "there" / "checkpoint-1" / "optimizer.safetensors").write_bytes(b"of training")
    engine = engine_for(model)
    variant = Variant("shop", adapter=SOURCE)
    with hub(tmp_path / "there") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        fingerprint = engine.add_variant(variant).fingerprint
        assert sorted(server.got) == ["adapter_config.json", "adapter_model.safetensors"]
    engine.remove_variant("shop")
    engine.add_variant(variant._replace(fingerprint=fingerprint))  # the Hub is away
    request = greedy("r", [3, 1, 4], 8)
    request.chain = "shop"
    engine.submit(request)
    assert drain(engine)["r"].token_ids == made.answer([3, 1, 4], 8)


@pytest.mark.parametrize("source", ["hf:acme/support", "hf:acme/support@main", f"hf:support@{COMMIT}", "hf:"])
def test_what_names_no_commit_is_refused(source: str) -> None:
    with pytest.raises(VariantRefused, match="names no commit of the Hub: hf:organization/name@"):
        local_folder(source)


def test_what_cannot_be_fetched_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "adapter_model.safetensors").write_bytes(b"x" * 1000)
    with hub(tmp_path / "there") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(VariantRefused, match=r"acme/other@.* cannot be fetched: RepositoryNotFoundError"):
            local_folder(f"hf:acme/other@{COMMIT}")
        with pytest.raises(VariantRefused, match=r"has 1,000 bytes, and there is room for 999"):
            local_folder(SOURCE, room_bytes=999)
        assert not server.got
        assert (local_folder(SOURCE, room_bytes=1000) / "adapter_model.safetensors").stat().st_size == 1000
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(VariantRefused, match=r"acme/third@.* cannot be fetched: LocalEntryNotFoundError"):
        local_folder(f"hf:acme/third@{COMMIT}")
