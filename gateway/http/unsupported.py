"""Names the endpoints of OpenAI's API that this gateway lacks, in the error for an unknown path.

They are not registered as routes: they would be half of all routes, and take half of the time to build the
application.
"""

from __future__ import annotations

import re

from litestar.utils import normalize_path

from gateway.errors import NotFound

SERVED = (
    "This gateway serves /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages,"
    " /v1/embeddings, /v1/rerank, /v1/models, /v1/files, /v1/batches and /v1/fine_tuning/jobs"
)


def _tree(*names: str) -> tuple[str, ...]:
    """Return regular expressions for the paths of these endpoints and all paths below them."""
    return tuple(path for name in names for path in (f"/v1/{name}", f"/v1/{name}/.+"))


_UNSUPPORTED = {  # regular expressions of paths
    "scoring": ("/v1/score", "/score"),
    "generation of images": _tree("images"),
    "audio": _tree("audio"),
    "videos": _tree("videos"),
    "sessions in real time": _tree("realtime", "live"),
    "moderation": ("/v1/moderations",),
    "assistants": _tree("assistants", "threads", "agents", "chatkit"),
    "stored chats": ("/v1/chat/completions/[^/]+", "/v1/chat/completions/[^/]+/messages"),
    "compaction of responses": ("/v1/responses/compact",),
    "count of input tokens but /v1/messages/count_tokens": ("/v1/responses/input_tokens",),
    "stored responses": (
        "/v1/responses/[^/]+",
        "/v1/responses/[^/]+/input_items",
        "/v1/responses/[^/]+/cancel",
    ),
    "conversations (send all of one as 'input')": _tree("conversations"),
    "uploads in parts (/v1/files takes 200 MB at once)": _tree("uploads"),
    "vector stores": _tree("vector_stores"),
    "containers": _tree("containers"),
    "skills": _tree("skills"),
    "evaluations and graders": (*_tree("evals"), "/v1/fine_tuning/alpha/.+"),
    "permissions of checkpoints": ("/v1/fine_tuning/checkpoints/.+",),
    "organizations and projects (/admin/api has tenants, keys and usage)": _tree("organization", "projects"),
    "webhooks": _tree("webhook_endpoints", "webhook_event_types"),
    "tokenizing (models and their tokenizers live at the sites)": ("/tokenize", "/detokenize"),
}


_NAMES = tuple(_UNSUPPORTED)
_PATTERN = re.compile("|".join(f"({'|'.join(paths)})" for paths in _UNSUPPORTED.values()), re.DOTALL)
"""Has one group for each of `_NAMES`."""


def unsupported_endpoint(path: str) -> NotFound | None:
    """Return the error that names the endpoint of `path`, or None if OpenAI's API has no such endpoint."""
    match = _PATTERN.fullmatch(normalize_path(path))
    if match is None or match.lastindex is None:
        return None
    return NotFound(f"{SERVED}; it has no {_NAMES[match.lastindex - 1]}.")
