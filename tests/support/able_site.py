"""A stand-in site whose model does what a request asks for: several choices, log probabilities, calls."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.support.stand_in_site import StandInSite
from wire import federation_pb2 as pb

FEATURES = (
    *("chat", "resume", "guided", "tools", "logprobs", "reasoning", "vision", "embed", "rerank", "count"),
)
TOKEN = "word "


class AbleSite(StandInSite):
    """Calls a function where it must, else answers a text."""

    def __init__(self, address: str) -> None:
        super().__init__(address, 7, 1, name="able", features=FEATURES)

    def _answer(self, out: asyncio.Queue[pb.SiteMessage], assign: Any) -> None:
        deltas = [_choice(assign, index) for index in range(assign.sampling.n)]
        out.put_nowait(pb.SiteMessage(step=pb.Step(deltas=deltas)))


def _choice(assign: Any, index: int) -> pb.Delta:
    delta = pb.Delta(attempt_id=assign.attempt_id, index=index, token_ids=[1], completion_tokens=1)
    if assign.sampling.HasField("logprobs"):
        top = [pb.TokenLogprob(token=TOKEN, raw=TOKEN.encode(), logprob=-0.5)] * assign.sampling.logprobs
        delta.logprobs.append(pb.TokenLogprob(token=TOKEN, raw=TOKEN.encode(), logprob=-0.5, top=top))
    if assign.chat.tool_choice in ("required", "named"):
        name = assign.chat.tool_name or json.loads(assign.chat.tools_json)[0]["function"]["name"]
        delta.tool_calls.append(pb.ToolCall(id="call_1", name=name, arguments='{"input":"x"}'))
        delta.finish = pb.Delta.TOOL_CALLS
    else:
        delta.text = TOKEN
        delta.reasoning = "hm" if assign.chat.reasoning_effort else ""
        delta.finish = pb.Delta.LENGTH if assign.sampling.max_tokens == 1 else pb.Delta.STOP
    return delta
