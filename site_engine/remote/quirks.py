"""Learn from a provider's refusals which fields its models take. Does no I/O.

OpenAI's fields are not taken by every provider, nor all by OpenAI's own newer models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeAlias

from site_engine.remote.request import HttpRequest

Change: TypeAlias = Callable[[HttpRequest], HttpRequest]


class Quirks:
    """The changes that requests to each model of a server need, as its refusals have told."""

    def __init__(self) -> None:
        self._needed: dict[object, set[Change]] = {}

    def apply(self, request: HttpRequest) -> HttpRequest:
        """Return the request as its model is known to take it."""
        for change in self._needed.get(request.body.get("model"), ()):
            request = change(request)
        return request

    def learn(self, request: HttpRequest, changes: Collection[Change]) -> None:
        """Make changes with which a request was answered to those that follow, except one whose words the
        refusal may have from the client: where several servers answer behind one address, the second try
        proves nothing.
        """
        if changes:
            said = json.dumps(request.body)
            wished = {change for words, change in _CHANGES.items() if not re.search(words, said)}
            self._needed.setdefault(request.body.get("model"), set()).update(wished.intersection(changes))


def change_for(request: HttpRequest, refusal: str) -> Change | None:
    """Return how a server wants to be asked, by the message of its refusal, None if it does not say."""
    wanted = (change for words, change in _CHANGES.items() if re.search(words, refusal))
    return next((change for change in wanted if change(request) != request), None)


def rename_max_tokens(request: HttpRequest) -> HttpRequest:
    names = {"max_tokens": "max_completion_tokens"}
    return request._replace(body={names.get(name, name): each for name, each in request.body.items()})


def drop_stream_options(request: HttpRequest) -> HttpRequest:
    return request._replace(body={name: each for name, each in request.body.items() if name != _OPTIONS})


def drop_reasoning_content(request: HttpRequest) -> HttpRequest:
    if "messages" not in request.body:
        return request
    told = [
        {name: each for name, each in message.items() if name != "reasoning_content"}
        for message in request.body["messages"]
    ]
    return request._replace(body={**request.body, "messages": told})


_OPTIONS: Final = "stream_options"
_CHANGES: Final[Mapping[str, Change]] = {
    "Use 'max_completion_tokens' instead": rename_max_tokens,  # OpenAI's models that reason
    # Mistral, which tells the usage by itself; but not what repeats the whole request, as vLLM does
    _OPTIONS + r"(?!['\"]: ?\{)": drop_stream_options,
    "property 'reasoning_content' is unsupported": drop_reasoning_content,  # Groq, in earlier turns
}
"""By words of a refusal, as regular expressions."""
