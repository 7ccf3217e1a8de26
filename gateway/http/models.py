"""Serves GET /v1/models: the models that sites serve now and the caller may use, and the routes to them.

Clients that send the header `anthropic-version` get model objects in Anthropic's format.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

from gateway.batches.files import Page
from gateway.domain import Model
from gateway.errors import ModelNotFound
from gateway.http.auth import authenticate
from gateway.http.backend import Backend
from gateway.http.body import json_response
from gateway.http.error_handler import database_errors
from gateway.http.exchange import AnyRequest, from_anthropics, path_after
from gateway.http.pagination import cursor_page, read_cursor_page
from gateway.routing.model_routes import may_name

LIFECYCLE: Final = "active"
"""Stage of every served model, in Anthropic's terms."""


def model_routes(backend: Backend) -> list[HTTPRouteHandler]:
    async def usable(request: AnyRequest) -> dict[str, Model]:
        caller, routes = await authenticate(request.scope, backend), backend.routes()

        def may_name_it(model: Model) -> bool:
            route = routes.get(model.id)
            return caller.may_ask(model) if route is None else may_name(caller.may_use, route)

        shown = (model for model in backend.models() if model.tenant in ("", caller.tenant))
        return {model.id: model for model in shown if may_name_it(model)}

    @get("/v1/models")
    async def list_models(request: AnyRequest) -> Response[bytes]:
        models = list((await usable(request)).values())
        if from_anthropics(request.scope):
            page = read_cursor_page(request)
            if LIFECYCLE not in request.query_params.getall("lifecycle[]", [LIFECYCLE]):
                models = []
            with database_errors(page):
                models = _page_of(models, page)
            return json_response(cursor_page([_anthropic_card(model) for model in models], page))
        return json_response({"object": "list", "data": [_model_card(model) for model in models]})

    @get("/v1/models/{model_id:path}")
    async def retrieve_model(request: AnyRequest) -> Response[bytes]:
        model_id = path_after(request, "/v1/models/")
        model = (await usable(request)).get(model_id)
        if model is None:
            raise ModelNotFound(f"The model '{model_id[:200]}' is not served here.")
        return json_response(_anthropic_card(model) if from_anthropics(request.scope) else _model_card(model))

    return [list_models, retrieve_model]


def _model_card(model: Model) -> dict[str, object]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": model.owned_by,
        "root": model.id,
        "parent": model.parent or None,
        "state": model.state.value,
        "max_model_len": model.context_tokens,
        "features": sorted(model.features),
    }


def _anthropic_card(model: Model) -> dict[str, object]:
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created_s, UTC),
        "lifecycle": LIFECYCLE,
        "max_input_tokens": model.context_tokens,
        "max_tokens": model.context_tokens,
    }


def _page_of(models: list[Model], page: Page) -> list[Model]:
    """Return the models of one page, sorted by id in the order of reading, and one extra if more follow.

    They are sorted because each process lists models in the order of its own sites, and another process may
    serve the next page. Raises LookupError if no model has the id `page.after`.
    """
    models = sorted(models, key=lambda model: model.id, reverse=not page.newest_first)
    places = {model.id: place for place, model in enumerate(models, 1)}
    begin = 0 if page.after is None else places[page.after]
    return models[begin : begin + page.limit + 1]
