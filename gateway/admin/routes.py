"""Compose the routes below /admin: the page, its reads, its stream and the operators' acts."""

from __future__ import annotations

from dataclasses import dataclass

from litestar.handlers import HTTPRouteHandler

from gateway.admin.access import Access
from gateway.admin.dashboard.pages import page_routes
from gateway.admin.model_routes import model_route_routes
from gateway.admin.models import SiteModels, site_model_routes
from gateway.admin.order_service import OrderService
from gateway.admin.reads import read_routes
from gateway.admin.session import session_routes
from gateway.admin.sites import site_routes
from gateway.admin.stream import stream_routes
from gateway.admin.tenancy import tenancy_routes
from gateway.federation.directory import Directory
from gateway.http.backend import Backend
from gateway.store.model_routes import RouteTable
from gateway.store.queries import OperatorReads
from gateway.store.store import Store
from gateway.telemetry.publisher import SnapshotPublisher


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminContext:
    """The parts of the gateway that the operator's API uses."""

    directory: Directory
    publisher: SnapshotPublisher
    order_service: OrderService
    reads: OperatorReads
    store: Store
    routes: RouteTable
    models: SiteModels


def admin_routes(backend: Backend, access: Access, context: AdminContext) -> list[HTTPRouteHandler]:
    return [
        *page_routes(),
        *session_routes(access),
        *site_routes(access, backend, context.directory, context.order_service),
        *read_routes(access, context.publisher, context.reads),
        *stream_routes(access, context.publisher),
        *site_model_routes(access, context.models),
        *tenancy_routes(access, context.store),
        *model_route_routes(access, context.routes, context.directory, context.publisher),
    ]
