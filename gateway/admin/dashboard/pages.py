"""Serve `/admin` and its files, read once at start, under a policy without inline or foreign content."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from litestar import Response, get
from litestar.exceptions import NotFoundException
from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import AnyRequest

FOLDER: Final = Path(__file__).parent / "static"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS: Final = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class File(NamedTuple):
    """A static file in memory."""

    body: bytes
    media_type: str
    etag: str


def read_files(folder: Path = FOLDER) -> dict[str, File]:
    """Read all static files of known types, by name."""
    return {path.name: _file(path) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}


def _file(path: Path) -> File:
    body = path.read_bytes()
    return File(body, _TYPES[path.suffix], f'"{blake2b(body, digest_size=8).hexdigest()}"')


def page_routes() -> list[HTTPRouteHandler]:
    files = read_files()

    @get("/admin")
    async def page(request: AnyRequest) -> Response[bytes]:
        return _answer(request, files["index.html"])

    @get("/admin/static/{name:str}")
    async def static(request: AnyRequest) -> Response[bytes]:
        name = request.path_params["name"]
        if name not in files:
            raise NotFoundException
        return _answer(request, files[name])

    return [page, static]


def _answer(request: AnyRequest, file: File) -> Response[bytes]:
    headers = {**SECURITY_HEADERS, "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(b"", status_code=304, headers=headers, media_type=file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)
