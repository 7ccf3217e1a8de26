"""Refuses the endpoints of OpenAI's API that this gateway lacks, by name and whatever is sent."""

from __future__ import annotations

from litestar import route
from litestar.handlers import HTTPRouteHandler

from gateway.errors import NotFound

SERVED = (
    "This gateway serves /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,"
    " /v1/embeddings, /v1/rerank, /v1/models, /v1/files, /v1/batches and /v1/fine_tuning/jobs"
)
_UNSUPPORTED = {
    "scoring": ("/v1/score", "/score"),
    "images": ("/v1/images/generations", "/v1/images/edits", "/v1/images/variations"),
    "audio": ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
    "moderation": ("/v1/moderations",),
    "assistants": ("/v1/assistants", "/v1/threads"),
    "compaction of responses": ("/v1/responses/compact",),
    "count of input tokens but /v1/messages/count_tokens": ("/v1/responses/input_tokens",),
    "stored responses": (
        "/v1/responses/{id:str}",
        "/v1/responses/{id:str}/input_items",
        "/v1/responses/{id:str}/cancel",
    ),
    "conversations (send all of one as 'input')": ("/v1/conversations", "/v1/conversations/{id:str}"),
    "uploads in parts (/v1/files takes 200 MB at once)": ("/v1/uploads",),
    "tokenizing (models and their tokenizers live at the sites)": ("/tokenize", "/detokenize"),
}


def unsupported_routes() -> list[HTTPRouteHandler]:
    return [_refusing_route(what, paths) for what, paths in _UNSUPPORTED.items()]


def _refusing_route(what: str, paths: tuple[str, ...]) -> HTTPRouteHandler:
    @route(list(paths), http_method=["GET", "POST", "DELETE"], status_code=200)
    async def refuse() -> None:
        raise NotFound(f"{SERVED}; it has no {what}.")

    return refuse
