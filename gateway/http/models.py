"""GET /v1/models: what the caller may use of what sites serve now."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get
from litestar.datastructures import State
from litestar.handlers import HTTPRouteHandler

from gateway.domain import Model
from gateway.errors import ModelNotFound
from gateway.http.auth import caller_of
from gateway.http.backend import Backend

Asking = Request[Any, Any, State]


def model_routes(backend: Backend) -> list[HTTPRouteHandler]:
    async def usable(request: Asking) -> dict[str, Model]:
        caller = await caller_of(request.scope, backend)
        return {model.id: model for model in backend.models() if caller.may_use(model.id)}

    @get("/v1/models")
    async def list_models(request: Asking) -> Response[object]:
        return Response(
            {"object": "list", "data": [_card(model) for model in (await usable(request)).values()]}
        )

    @get("/v1/models/{model_id:path}")
    async def retrieve_model(request: Asking) -> Response[object]:
        model_id = str(request.path_params["model_id"]).removeprefix("/")
        model = (await usable(request)).get(model_id)
        if model is None:
            raise ModelNotFound(f"The model '{model_id[:200]}' is not served here.")
        return Response(_card(model))

    return [list_models, retrieve_model]


def _card(model: Model) -> dict[str, object]:
    return {
        "id": model.id,
        "object": "model",
        "created": model.created_s,
        "owned_by": model.owned_by,
        "root": model.id,
        "max_model_len": model.context_tokens,
        "features": sorted(model.features),
    }
