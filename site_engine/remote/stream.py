"""Parse a server's event stream into outputs of the choices of one attempt. Does no I/O.

The finish of every choice waits for the end of the stream, where servers send their counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from site_engine.core.request import Finish, Output, TokenLogprob, ToolCall

MAX_EVENT_BYTES = 8 << 20
MAX_COUNT = 2**31 - 1
"""A larger count of a server is none, like one below 0: it would not fit a message of the link."""
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes of a server that are no JSON of the type asked for, or nest too deeply."""


class MalformedStream(Exception):
    """The server broke the OpenAI API's format, or reported its failure in the stream."""


class FailedStream(MalformedStream):
    """The server reported `error`, in JSON, in the stream."""

    def __init__(self, error: bytes) -> None:
        super().__init__(f"the server failed: {error[:300].decode(errors='replace')}")
        self.error = error


class _TopLogprob(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]] | None = None


class _ChatLogprob(_TopLogprob):
    top_logprobs: list[_TopLogprob] | None = None


class _Logprobs(msgspec.Struct):
    """`content` of chats; the other three of completions."""

    content: list[_ChatLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)] | None = None
    id: str | None = None
    function: _Function | None = None


class _Part(msgspec.Struct):
    """A chunk of a content that is a list, as of Mistral's models that reason: text, or thinking, which is
    text in chunks itself. Others, such as references, have no place in an answer here.
    """

    type: str = ""
    text: str | None = None
    thinking: list[_Part] | None = None


class _Message(msgspec.Struct):
    """`reasoning` of vLLM from 0.16 on and OpenRouter, `reasoning_content` of everyone else."""

    content: str | list[_Part] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int | None = None  # of the only one
    delta: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: object = None  # of vLLM and its relatives: the stop string or token
    matched_stop: object = None  # the same of SGLang
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_Chunk)

_FINISHES: Mapping[str, Finish] = {
    "length": Finish.LENGTH,
    "model_length": Finish.LENGTH,  # of Mistral: the context is full
    "tool_calls": Finish.TOOL_CALLS,
    "content_filter": Finish.CONTENT_FILTER,
    "abort": Finish.FAILED,
    "error": Finish.FAILED,
    "insufficient_system_resource": Finish.FAILED,  # of DeepSeek
}
"""Any other reason is a stop: eos_token, stop_sequence … are the same to our clients."""


@dataclass(slots=True)
class _Progress:
    tokens: int = 0
    reasoning_tokens: int = 0
    answers: bool = False  # more than reasoning has come
    finish: Finish | None = None
    stop_sequence: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)  # the last begun, by the server's index
    calls_begun: int = 0

    def call(self, found: _Call) -> ToolCall:
        """Return a part of a call: id and name where it begins, alone.

        Calls are numbered here: some servers, as Ollama, give all of them one index, but ids of their own.
        """
        function, index = found.function or _Function(), found.index or 0
        known, arguments = self.calls.get(index), function.arguments or ""
        if known is not None and not (found.id and function.name and found.id != known.id):
            return ToolCall(known.index, arguments=arguments)
        call_id = found.id or f"call_{secrets.token_hex(12)}"
        known = self.calls[index] = ToolCall(self.calls_begun, call_id, function.name or "")
        self.calls_begun += 1
        return replace(known, arguments=arguments)


class ResponseStream:
    """`request_ids` of the choices, in order. `delivered` tokens of a resumed answer count as its own, not
    as the prompt's, which the server takes them for.
    """

    def __init__(self, request_ids: Sequence[str], delivered: int = 0) -> None:
        self.delivered = delivered
        self._request_ids = request_ids
        self._choices = [_Progress(delivered) for _ in request_ids]
        self._buffer = b""
        self._total: int | None = None
        self.prompt_tokens = 0
        self.cached_tokens: int | None = None  # of the prompt; None: the server does not tell
        self.done = False
        self.started = False
        self._fault: MalformedStream | None = None  # that came behind outputs

    @property
    def tokens(self) -> int:
        return sum(each.tokens for each in self._choices)

    @property
    def is_ended(self) -> bool:
        """Return whether every choice has its finish, which only counts follow."""
        return self._fault is None and all(each.finish is not None for each in self._choices)

    def tokens_of(self, index: int) -> int:
        return self._choices[index].tokens

    def feed(self, received: bytes) -> list[Output]:
        """Return the outputs of one read from the network. Raises MalformedStream; where outputs came before
        the fault, `end` raises it.
        """
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise MalformedStream(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
        outputs: list[Output] = []
        for line in lines:
            name, _, data = line.partition(b":")
            if name in (b"data", b"error"):
                try:
                    self._event(data.strip(), outputs, failed=name == b"error")
                except MalformedStream as fault:
                    if not outputs:
                        raise
                    self._fault, self.done = fault, True
        return outputs

    def end(self) -> list[Output]:
        """Return the finishes, once the stream is over, after the outputs of a last line without an end.
        Raises MalformedStream if a choice has none.
        """
        outputs = self._last_line()
        if self._fault is not None:
            raise self._fault
        if not self.is_ended:
            raise MalformedStream("the stream broke off in the middle of an answer")
        if self._total is not None:  # of all choices: what is beyond their chunks goes to the last
            self._choices[-1].tokens += max(0, self._total - self.tokens)
        return outputs + [
            Output(
                request_id,
                finish=each.finish,
                error="the server gave the answer up" if each.finish is Finish.FAILED else "",
                completion_tokens=each.tokens,
                prompt_tokens=self.prompt_tokens,
                reasoning_tokens=min(each.reasoning_tokens, each.tokens),
                stop_sequence=each.stop_sequence,
            )
            for request_id, each in zip(self._request_ids, self._choices, strict=True)
        ]

    def _last_line(self) -> list[Output]:
        """Read what follows the last line break, as OpenAI's own clients do.

        Raises FailedStream for an answer that has not ended.
        """
        had_ended = self.is_ended
        try:
            return self.feed(b"\n") if self._buffer else []
        except FailedStream:
            if had_ended:
                return []
            raise
        except MalformedStream:  # it was cut, and `end` knows whether anything is missing
            return []

    def _event(self, data: bytes, outputs: list[Output], *, failed: bool) -> None:
        """Take one event in. `failed`: it is named an error, as llama.cpp did, instead of data."""
        self.done = self.done or data == b"[DONE]"
        if self.done or not data:
            return
        if failed:
            raise FailedStream(data)
        try:
            chunk = _decoder.decode(data)
        except DECODE_ERRORS as exc:
            raise MalformedStream(f"an event that is no chunk of an answer: {exc}") from exc
        if bytes(chunk.error) != b"null":
            raise FailedStream(bytes(chunk.error))
        before = self._choices[0].tokens
        for choice in chunk.choices or ():
            self._choice(choice, outputs)
        if chunk.usage is not None:
            self._count(chunk.usage, before)
            if len(self._choices) == 1 and outputs:
                tokens, of_them = self._choices[0].tokens, self._choices[0].reasoning_tokens
                outputs[-1] = outputs[-1]._replace(completion_tokens=tokens, reasoning_tokens=of_them)

    def _count(self, usage: Usage, before: int) -> None:
        """Take the server's own counts, the last ones of which hold. `before`: tokens up to this chunk.

        Counts never fall. SGLang sends several chunks of one token, each with the same count.
        """
        if prompt_tokens := possible_count(usage.prompt_tokens):
            self.prompt_tokens = max(1, prompt_tokens - self.delivered)
        if (completion_tokens := generated_tokens(usage)) is not None:
            self._total = completion_tokens + self.delivered
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = possible_count(usage.prompt_tokens_details.cached_tokens)
        if len(self._choices) > 1:
            return
        (choice,) = self._choices
        if completion_tokens:
            choice.tokens = max(before, completion_tokens + self.delivered)
        details = usage.completion_tokens_details or _Details()
        if (reasoning_tokens := possible_count(details.reasoning_tokens)) is not None:
            choice.reasoning_tokens = reasoning_tokens
        elif choice.reasoning_tokens and not choice.answers:
            choice.reasoning_tokens = choice.tokens  # all so far

    def _choice(self, choice: _Choice, outputs: list[Output]) -> None:
        index = choice.index or 0
        if not 0 <= index < len(self._choices):
            raise MalformedStream(f"choice {index} was not asked for")
        progress = self._choices[index]
        message = choice.delta or _Message()
        content = message.content
        told, thoughts = (content, "") if isinstance(content, str) else _joined(content)
        text = choice.text or told
        reasoning = message.reasoning or message.reasoning_content or thoughts
        refusal = message.refusal or ""
        calls = tuple(map(progress.call, message.tool_calls or ()))
        if choice.finish_reason:
            progress.finish = _FINISHES.get(choice.finish_reason, Finish.STOP)
            found = choice.stop_reason or choice.matched_stop
            progress.stop_sequence = found if isinstance(found, str) else ""
        logprobs = () if choice.logprobs is None else parse_logprobs(choice.logprobs)
        if not (text or calls or reasoning or refusal or logprobs):
            return
        progress.tokens += max(1, len(logprobs))
        progress.answers = progress.answers or bool(text or calls or refusal)
        if reasoning and not text:
            progress.reasoning_tokens += max(1, len(logprobs))
        self.started = True
        outputs.append(
            Output(
                self._request_ids[index],
                text,
                logprobs=logprobs,
                completion_tokens=progress.tokens,
                tool_calls=calls,
                reasoning=reasoning,
                refusal=refusal,
                reasoning_tokens=progress.reasoning_tokens,
            )
        )


def _joined(parts: Sequence[_Part] | None) -> tuple[str, str]:
    """Return the text and the reasoning of a content in chunks."""
    text = "".join(each.text or "" for each in parts or () if each.type == "text")
    return text, "".join(_joined(each.thinking)[0] for each in parts or () if each.type == "thinking")


def generated_tokens(usage: Usage) -> int | None:
    """Return the server's count, with the thoughts that xAI and Gemini count in the sum of all alone."""
    counted, prompt, total = map(
        possible_count, (usage.completion_tokens, usage.prompt_tokens, usage.total_tokens)
    )
    if counted is None or prompt is None or total is None:
        return counted
    return max(counted, total - prompt)


def possible_count(tokens: int | None) -> int | None:
    """Return a count of tokens that a server gave, None for one that cannot be."""
    return tokens if tokens is not None and 0 <= tokens <= MAX_COUNT else None


def parse_logprobs(found: _Logprobs) -> tuple[TokenLogprob, ...]:
    if found.content is not None:
        return tuple(
            TokenLogprob(
                each.token,
                _raw(each),
                each.logprob,
                tuple(TokenLogprob(top.token, _raw(top), top.logprob) for top in each.top_logprobs or ()),
            )
            for each in found.content
        )
    tokens, logprobs = found.tokens or [], found.token_logprobs or []
    tops = found.top_logprobs or [None] * len(tokens)
    return tuple(
        TokenLogprob(
            token,
            token.encode(),
            logprob,
            tuple(TokenLogprob(name, name.encode(), value) for name, value in (top or {}).items()),
        )
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False)
    )


def _raw(each: _TopLogprob) -> bytes:
    return bytes(each.bytes) if each.bytes is not None else each.token.encode()
