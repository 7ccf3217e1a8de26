"""Refuses the endpoints of OpenAI's API that this gateway lacks, by name and whatever is sent."""

from __future__ import annotations

from litestar import route
from litestar.handlers import HTTPRouteHandler

from gateway.errors import NotFound

SERVED = (
    "This gateway serves /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,"
    " /v1/embeddings, /v1/rerank, /v1/models, /v1/files, /v1/batches and /v1/fine_tuning/jobs"
)


def _tree(*names: str) -> tuple[str, ...]:
    """Return the paths of these endpoints and of all below them."""
    return tuple(path for name in names for path in (f"/v1/{name}", f"/v1/{name}/{{rest:path}}"))


_UNSUPPORTED = {
    "scoring": ("/v1/score", "/score"),
    "generation of images": _tree("images"),
    "audio": _tree("audio"),
    "videos": _tree("videos"),
    "sessions in real time": _tree("realtime", "live"),
    "moderation": ("/v1/moderations",),
    "assistants": _tree("assistants", "threads", "agents", "chatkit"),
    "stored chats": ("/v1/chat/completions/{id:str}", "/v1/chat/completions/{id:str}/messages"),
    "compaction of responses": ("/v1/responses/compact",),
    "count of input tokens but /v1/messages/count_tokens": ("/v1/responses/input_tokens",),
    "stored responses": (
        "/v1/responses/{id:str}",
        "/v1/responses/{id:str}/input_items",
        "/v1/responses/{id:str}/cancel",
    ),
    "conversations (send all of one as 'input')": _tree("conversations"),
    "uploads in parts (/v1/files takes 200 MB at once)": _tree("uploads"),
    "vector stores": _tree("vector_stores"),
    "containers": _tree("containers"),
    "skills": _tree("skills"),
    "evaluations and graders": (*_tree("evals"), "/v1/fine_tuning/alpha/{rest:path}"),
    "permissions of checkpoints": ("/v1/fine_tuning/checkpoints/{rest:path}",),
    "organizations and projects (/admin/api has tenants, keys and usage)": _tree("organization", "projects"),
    "webhooks": _tree("webhook_endpoints", "webhook_event_types"),
    "tokenizing (models and their tokenizers live at the sites)": ("/tokenize", "/detokenize"),
}


def unsupported_routes() -> list[HTTPRouteHandler]:
    return [_refusing_route(what, paths) for what, paths in _UNSUPPORTED.items()]


def _refusing_route(what: str, paths: tuple[str, ...]) -> HTTPRouteHandler:
    @route(list(paths), http_method=["GET", "POST", "DELETE"], status_code=200)
    async def refuse() -> None:
        raise NotFound(f"{SERVED}; it has no {what}.")

    return refuse
