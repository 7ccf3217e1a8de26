"""SDKs of OpenAI and Anthropic at a federation: whole turns with tools, and streams whose site is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from tests.support.agent_server import AgentServer, agent_server
from tests.support.event_streams import message_events, named_events, response_events, text_of
from tests.support.local_federation import LocalFederation
from tests.support.patience import patient

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SAID = "Say-something."
ANSWER = (SAID * 10)[:80]
"""What the server of letters answers; at half of what it begins it waits for ever."""


# ---- a site that is killed


class Letters:
    """Two sites before one server of letters."""

    def __init__(self, sites: dict[str, subprocess.Popen[bytes]]) -> None:
        self._sites = sites

    def kill(self, name: str) -> None:
        os.kill(self._sites[name].pid, signal.SIGKILL)


@pytest.fixture
def letters(federation: LocalFederation, tmp_path: Path) -> Iterator[Letters]:
    command = [sys.executable, "-m", "tests.support.openai_server"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server,
        ExitStack() as sites,
    ):
        assert server.stdout is not None
        sites.callback(server.kill)
        url = server.stdout.readline().strip()
        names = ("killed-first", "killed-second")
        yield Letters(
            {name: sites.enter_context(federation.site_before(url, name, tmp_path / name)) for name in names}
        )


@dataclass(frozen=True, slots=True)
class Format:
    path: str
    body: dict[str, Any]
    read: Callable[[bytes], list[dict[str, Any]]]
    end: str


RESPONSES = Format(
    "/v1/responses", {"input": SAID, "max_output_tokens": len(ANSWER)}, response_events, "response.incomplete"
)
MESSAGES = Format(
    "/v1/messages",
    {"messages": [{"role": "user", "content": SAID}], "max_tokens": len(ANSWER)},
    message_events,
    "message_stop",
)


@pytest.mark.parametrize("form", [RESPONSES, MESSAGES], ids=lambda form: form.path)
def test_a_site_killed_in_mid_stream_costs_no_event(
    form: Format, federation: LocalFederation, letters: Letters
) -> None:
    """The stream stands still at its half until its site is killed: what follows comes from the other one."""
    body = {"model": "letters", "stream": True, "temperature": 0, **form.body}
    frames, begun_by = [b""], ""
    with federation.http() as http, http.stream("POST", form.path, json=body) as response:
        begun_by = response.headers["x-mico-site"]
        for line in response.iter_lines():
            frames.append(f"{line}\n".encode())
            whole = b"".join(frames)
            if begun_by and not line and text_of(named_events(whole)) == ANSWER[: len(ANSWER) // 2]:
                letters.kill(begun_by)
                begun_by = ""
    assert not begun_by, "no site was killed"
    events = form.read(b"".join(frames))
    assert text_of(events) == ANSWER
    assert events[-1]["type"] == form.end
    counted = next(event for event in reversed(events) if "usage" in (event.get("response") or event))
    assert (counted.get("response") or counted)["usage"]["output_tokens"] == len(ANSWER)


# ---- whole turns


@pytest.fixture(scope="module")
def agent(federation: LocalFederation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentServer]:
    with (
        agent_server() as server,
        federation.site_before(server.url, "agents", tmp_path_factory.mktemp("agent") / "site"),
    ):
        yield server


@pytest.fixture
def claude(federation: LocalFederation) -> Iterator[anthropic.Anthropic]:
    url = federation.base_url.removesuffix("/v1")
    http = patient(anthropic.DefaultHttpxClient())
    with anthropic.Anthropic(
        base_url=url, api_key=federation.api_key, max_retries=0, http_client=http
    ) as sdk:
        yield sdk


class Sum(BaseModel):
    sum: int


ADD = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"to": {"type": "integer"}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
QUESTION: Any = {"role": "user", "content": "Call add to 40."}


@pytest.mark.parametrize("stream", [False, True])
def test_openais_sdk_takes_a_turn_with_a_tool(
    stream: bool, federation: LocalFederation, agent: AgentServer
) -> None:
    with federation.sdk() as sdk:

        def ask(conversation: list[Any]) -> Any:
            asked: dict[str, Any] = {"model": "agent", "input": conversation, "tools": [ADD], "store": False}
            if not stream:
                return sdk.responses.create(**asked)
            with sdk.responses.stream(**asked) as events:
                return events.get_final_response()

        conversation = [QUESTION]
        (call,) = ask(conversation).output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "add", {"to": 40})
        conversation += [
            call.to_dict(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "42"},
        ]
        assert ask(conversation).output_text == "The tool said: 42"


def test_openais_sdk_parses_answers(federation: LocalFederation, agent: AgentServer) -> None:
    with federation.sdk() as sdk:
        parsed = sdk.responses.parse(model="agent", input="It is 42.", text_format=Sum)
        assert parsed.output_parsed == Sum(sum=42)
        chat = sdk.chat.completions.parse(
            model="agent", messages=[{"role": "user", "content": "It is 42."}], response_format=Sum
        )
        assert chat.choices[0].message.parsed == Sum(sum=42)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_sdk_takes_a_turn_with_a_tool(
    stream: bool, claude: anthropic.Anthropic, agent: AgentServer
) -> None:
    tool: Any = {"name": "add", "input_schema": ADD["parameters"]}

    def ask(messages: list[Any]) -> Any:
        asked: dict[str, Any] = {"model": "agent", "max_tokens": 99, "messages": messages, "tools": [tool]}
        if not stream:
            return claude.messages.create(**asked)
        with claude.messages.stream(**asked) as events:
            return events.get_final_message()

    asked = ask([QUESTION])
    (call,) = asked.content
    assert (asked.stop_reason, call.name, call.input) == ("tool_use", "add", {"to": 40})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
    turns = [QUESTION, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    assert ask(turns).content[0].text == "The tool said: 42"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_ends_by_itself(
    stream: bool, claude: anthropic.Anthropic, agent: AgentServer
) -> None:
    @beta_tool
    def add(to: int) -> str:
        """Add 2.

        Args:
            to: what to add it to
        """
        return str(to + 2)

    asked: Any = {"model": "agent", "max_tokens": 99, "messages": [QUESTION], "tools": [add]}
    runner: Any = claude.beta.messages.tool_runner(**asked, stream=stream)
    turns = [turn.get_final_message() if stream else turn for turn in runner]
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[-1].content[0].text == "The tool said: 42"


def test_anthropics_sdk_parses_answers(claude: anthropic.Anthropic, agent: AgentServer) -> None:
    asked: Any = {"model": "agent", "max_tokens": 99, "messages": [{"role": "user", "content": "It is 42."}]}
    assert claude.messages.parse(**asked, output_format=Sum).parsed_output == Sum(sum=42)
