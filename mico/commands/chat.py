"""`mico chat`: talk to a model, once with -q or piped input, in a conversation otherwise."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from gateway.wording import several
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, with_option_groups
from mico.session import Session, session_of
from mico.terminal import format_seconds

if TYPE_CHECKING:
    from mico.client import Client

Message = dict[str, str]
KEYS_HELP = "Ctrl-C ends an answer, Ctrl-D leaves, /new forgets the conversation."


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and its figures; `first_token_s` is None when it has neither text nor reasoning."""

    text: str
    site: str
    completion_tokens: int
    first_token_s: float | None
    total_s: float
    reasoning: str = ""
    request_id: str = "-"

    def stats(self) -> str:
        decoding_s = self.total_s - (self.first_token_s or self.total_s)
        further = self.completion_tokens - 1
        rate = f"{further / decoding_s:.0f} tok/s" if further > 0 and decoding_s > 0 else "- tok/s"
        first_token, total = format_seconds(self.first_token_s), format_seconds(self.total_s)
        tokens = several(self.completion_tokens, "token")
        where = f"site {self.site}, request {self.request_id}"
        return f"first token {first_token}, {rate}, {tokens}, total {total}, {where}"


class SamplingOptions(NamedTuple):
    """Options of a chat completion."""

    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum length of an answer, in tokens.")] = (
        None
    )
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 is greedy.")
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(
            "--json-schema",
            exists=True,
            dir_okay=False,
            help="The answer must satisfy the JSON schema in this file.",
        ),
    ] = None

    def request_fields(self) -> dict[str, object]:
        """Return the request fields that are set. Raises CommandFailed for a schema that is no JSON."""
        fields = {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "response_format": None if self.json_schema is None else response_format(self.json_schema),
        }
        return {name: value for name, value in fields.items() if value is not None}


@with_option_groups
def chat(
    context: typer.Context,
    *,
    question: Annotated[
        str | None, typer.Option("--question", "-q", help="Ask one question and exit.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A model's name. [default: the first one served]")
    ] = None,
    sampling: SamplingOptions,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show times, speed, site and request id of each answer.")
    ] = False,
    gateway: GatewayOptions,
) -> None:
    """Talk to a model; piped input is one question. A terminal shows reasoning dimmed, unless --quiet."""
    session = session_of(context)
    client = session.client(*gateway)
    chosen = session.settings.value("model", model) or first_model(client)
    options = sampling.request_fields()

    def ask(messages: list[Message]) -> Answer:
        answer = stream_answer(
            client,
            chosen,
            messages,
            options,
            lambda text: session.terminal.data(text, end=""),
            write_reasoning=session.terminal.aside,
        )
        session.terminal.data("")
        if stats:
            session.terminal.info(answer.stats())
        return answer

    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
    if question is None:
        converse(session, chosen, ask)
    elif question:
        ask([{"role": "user", "content": question.encode("utf-8", "replace").decode()}])
    else:
        raise CommandFailed(
            "there is no question", tip="-q TEXT, or pipe one in", exit_code=ExitCode.WRONG_USAGE
        )


def response_format(file: Path) -> dict[str, object]:
    try:
        schema = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise CommandFailed(
            f"{file} holds no JSON", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def first_model(client: Client) -> str:
    models = client.get("/v1/models").objects("data")
    if not models:
        raise CommandFailed("no model is served now", tip="mico sites list shows which sites are there")
    return str(models[0]["id"])


def converse(session: Session, model: str, ask: Callable[[list[Message]], Answer]) -> None:
    """Read and answer questions until Ctrl-D. A question that failed or was interrupted is dropped."""
    import readline  # noqa: F401  gives input() its line editing and history

    session.terminal.info(f"{model}. {KEYS_HELP}")
    messages: list[Message] = []
    while (question := read_question()) is not None:
        if question == "/new":
            messages.clear()
        elif question:
            question = question.encode("utf-8", "replace").decode()
            message = {"role": "user", "content": question}
            try:
                answer = ask([*messages, message])
            except KeyboardInterrupt:
                session.terminal.data("")
            except CommandFailed as failure:
                session.terminal.info("\n".join(failure.lines()))
            else:
                answered = {"role": "assistant", "content": answer.text}
                messages += [
                    message,
                    answered | ({"reasoning": answer.reasoning} if answer.reasoning else {}),
                ]


def read_question() -> str | None:
    """Return a line of input, or None at its end."""
    try:
        return input("> ").strip()
    except EOFError:
        sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""


def stream_answer(
    client: Client,
    model: str,
    messages: list[Message],
    options: Mapping[str, object],
    write: Callable[[str], object],
    *,
    write_reasoning: Callable[[str], object] = lambda _: None,
) -> Answer:
    """Write the answer as it streams, and the reasoning before it; return both with their figures."""
    began_s = time.monotonic()
    first_token_s: float | None = None
    parts: list[str] = []
    thoughts: list[str] = []
    site, request_id, tokens = "-", "-", 0
    with closing(client.chat(model, messages, **options)) as events:
        for event in events:
            site = event.headers.get("x-mico-site", site)
            request_id = event.headers.get("x-request-id", request_id)
            tokens = (event.chunk.get("usage") or {}).get("completion_tokens", tokens)
            deltas = [choice["delta"] for choice in event.chunk["choices"]]
            text = "".join(delta.get("content") or "" for delta in deltas)
            thought = "".join(delta.get("reasoning") or "" for delta in deltas)
            if text or thought:
                first_token_s = first_token_s or time.monotonic() - began_s
            if thought:
                thoughts.append(thought)
                write_reasoning(thought)
            if text:
                if thoughts and not parts:
                    write_reasoning("\n\n")
                parts.append(text)
                write(text)
    total_s = time.monotonic() - began_s
    return Answer("".join(parts), site, tokens, first_token_s, total_s, "".join(thoughts), request_id)
