"""Everything below /admin: the page, what it reads, what it is streamed, what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access
from gateway.admin.dashboard.pages import page_routes
from gateway.admin.order_service import Desk
from gateway.admin.reads import read_routes
from gateway.admin.session import session_routes
from gateway.admin.sites import site_routes
from gateway.admin.stream import stream_routes
from gateway.admin.tenancy import tenancy_routes
from gateway.domain import Caller
from gateway.federation.directory import Directory
from gateway.http.backend import Backend
from gateway.store.queries import Reads
from gateway.store.store import Store
from gateway.telemetry.publisher import Watch


@dataclass(frozen=True, slots=True, kw_only=True)
class Office:
    """What the operator's API needs of the rest. `still_valid` looks a key up by its id, without I/O."""

    directory: Directory
    watch: Watch
    desk: Desk | None
    reads: Reads | None
    still_valid: Callable[[str], Caller | None]
    session_key: bytes
    store: Store | None = None


def admin_routes(backend: Backend, office: Office) -> list[HTTPRouteHandler]:
    access = Access(backend, office.still_valid, office.session_key)
    return [
        *page_routes(),
        *session_routes(access),
        *site_routes(access, backend, office.directory, office.desk),
        *read_routes(access, office.watch, office.reads),
        *stream_routes(access, office.watch),
        *(tenancy_routes(access, office.store) if office.store else ()),
    ]
