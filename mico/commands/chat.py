"""`mico chat`: talk to a model. One shot with -q or piped input, a conversation otherwise."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.wording import several
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, with_option_groups
from mico.session import Session, session
from mico.terminal import seconds

if TYPE_CHECKING:
    from mico.client import Client

Message = dict[str, str]
HELP = "Ctrl-C ends an answer, Ctrl-D leaves, /new forgets the conversation."


@dataclass(frozen=True, slots=True)
class Answer:
    """`first_token_s` is None when the answer has no text."""

    text: str
    site: str
    completion_tokens: int
    first_token_s: float | None
    total_s: float

    def stats(self) -> str:
        decoding_s = self.total_s - (self.first_token_s or self.total_s)
        further = self.completion_tokens - 1
        rate = f"{further / decoding_s:.0f} tok/s" if further > 0 and decoding_s > 0 else "- tok/s"
        return (
            f"first token {seconds(self.first_token_s)}, {rate}, {several(self.completion_tokens, 'token')}, "
            f"total {seconds(self.total_s)}, site {self.site}"
        )


@with_option_groups
def chat(
    context: typer.Context,
    *,
    question: Annotated[str | None, typer.Option("--question", "-q", help="Ask this and leave.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="[default: the first there is]")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="0: always the likeliest.")
    ] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", exists=True, dir_okay=False, help="The answer must satisfy this file."),
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show times, speed and site.")] = False,
    gateway: GatewayOptions,
) -> None:
    """Talk to a model; piped input is one question."""
    here = session(context)
    client = here.client(*gateway)
    chosen = here.settings.value("model", model) or first_model(client)
    limits = {
        "max_completion_tokens": max_tokens,
        "temperature": temperature,
        "response_format": None if json_schema is None else response_format(json_schema),
    }
    options = {name: value for name, value in limits.items() if value is not None}

    def ask(messages: list[Message]) -> Answer:
        answer = relay(client, chosen, messages, options, lambda text: here.terminal.data(text, end=""))
        here.terminal.data("")
        if stats:
            here.terminal.say(answer.stats())
        return answer

    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    if question is None:
        converse(here, chosen, ask)
    elif question:
        ask([{"role": "user", "content": question.encode("utf-8", "replace").decode()}])
    else:
        raise CommandFailed(
            "there is no question", tip="-q TEXT, or pipe one in", exit_code=ExitCode.WRONG_USAGE
        )


def response_format(file: Path) -> dict[str, object]:
    try:
        schema = json.loads(file.read_text())
    except ValueError as error:
        raise CommandFailed(
            f"{file} holds no JSON", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def first_model(client: Client) -> str:
    models = client.get("/v1/models")["data"]
    if not models:
        raise CommandFailed("no model is served now", tip="mico sites list shows which sites are there")
    return str(models[0]["id"])


def converse(here: Session, model: str, ask: Callable[[list[Message]], Answer]) -> None:
    """Reads questions until Ctrl-D. A question that failed or was interrupted is forgotten."""
    import readline  # noqa: F401  gives input() its line editing and history

    here.terminal.say(f"{model}. {HELP}")
    messages: list[Message] = []
    while (question := read_question()) is not None:
        if question == "/new":
            messages.clear()
        elif question:
            question = question.encode("utf-8", "replace").decode()
            asked = {"role": "user", "content": question}
            try:
                answer = ask([*messages, asked])
            except KeyboardInterrupt:
                here.terminal.data("")
            except CommandFailed as failure:
                here.terminal.say("\n".join(failure.lines()))
            else:
                messages += [asked, {"role": "assistant", "content": answer.text}]


def read_question() -> str | None:
    """None at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""


def relay(
    client: Client,
    model: str,
    messages: list[Message],
    options: Mapping[str, object],
    write: Callable[[str], object],
) -> Answer:
    """Write the answer as it comes; return it with its figures."""
    began_s = time.monotonic()
    first_token_s: float | None = None
    parts: list[str] = []
    site, tokens = "-", 0
    with closing(client.chat(model, messages, **options)) as events:
        for event in events:
            site = event.headers.get("x-mico-site", site)
            tokens = (event.chunk.get("usage") or {}).get("completion_tokens", tokens)
            text = "".join(choice["delta"].get("content") or "" for choice in event.chunk["choices"])
            if text:
                first_token_s = first_token_s or time.monotonic() - began_s
                parts.append(text)
                write(text)
    return Answer("".join(parts), site, tokens, first_token_s, time.monotonic() - began_s)
