"""Convert between protobuf and the gateway's values. Input from sites is validated here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import isfinite
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from gateway.blocks import Block, BlockKind
from gateway.domain import (
    Delta,
    Finish,
    Model,
    ModelState,
    Query,
    Sampling,
    SiteIdentity,
    TokenLogprob,
    ToolCall,
)
from gateway.failure import AttemptFailure, FailureCause, Resume
from gateway.federation.answer_limits import AnswerLimits
from gateway.prompt import MAX_VECTOR_BYTES, Chat, Pooled, Pooling
from gateway.routing.prefixes import HASH_BYTES
from predictor.forecast import Forecast
from wire import federation_pb2 as pb

LOWEST_PROTOCOL, HIGHEST_PROTOCOL = 1, 3
"""The protocol versions that this gateway supports, always including that of the previous build."""
SHOWS_LIFE = 3
"""The protocol version from which on a site sends a message every second, so that pings may be less frequent.
"""
MAX_NAME = 200
MAX_MODELS = 10_000
"""The limit of models of one site, variants included."""
MAX_BLOCKS = 1_000
"""The limit of blocks of one model."""
MAX_CALLS = 1000
MAX_FEATURES = 64
MAX_CONTEXT_TOKENS = 100_000_000
LAST_UNIX_S = 253_402_300_799  # of the year 9999, after which there are no dates
MAX_REASON_CHARS = 1_000
"""The limit of a message text from a site, some of which clients see."""
MAX_DELTAS = 50_000
"""The limit of deltas of one Step; sites limit a Step to 1 MiB."""
MAX_TURN_DELTAS = 256
"""The deltas of a Step that are handled in one turn of the event loop, in a few milliseconds."""
MAX_PREFIXES_BYTES = 1024
MAX_ABANDONED = 100_000
MAX_AMOUNT = 1e12
"""The limit of seconds, tokens or dollars: far beyond real values, and its sums and products stay finite."""


class ProtocolError(Exception):
    """A message that no correct site sends. The link is closed with this reason."""


# ---- from a site ----------------------------------------------------------------------------------


def identity(hello: pb.Hello) -> SiteIdentity:
    _check_protocol(hello)
    if not 0 < len(hello.site) <= MAX_NAME or not hello.site.isprintable():
        raise ProtocolError(f"a site's name has 1 to {MAX_NAME} printable characters")
    if len(hello.attempts) > MAX_ABANDONED:
        raise ProtocolError(f"a site names at most {MAX_ABANDONED} attempts, not {len(hello.attempts)}")
    if hello.slots == 0 or hello.kv_capacity_tokens == 0:
        raise ProtocolError("a site has at least one slot and one KV token")
    return SiteIdentity(
        name=hello.site,
        boot_id=hello.boot_id[:MAX_NAME],
        cloud=clean_name(hello.cloud) or "unknown",
        region=clean_name(hello.region) or "unknown",
        models=models(hello.models),
        slots=hello.slots,
        kv_capacity_tokens=hello.kv_capacity_tokens,
        input_usd_per_mtok=amount(hello.input_usd_per_mtok, "price"),
        output_usd_per_mtok=amount(hello.output_usd_per_mtok, "price"),
        cached_usd_per_mtok=amount(hello.cached_usd_per_mtok, "price")
        if hello.HasField("cached_usd_per_mtok")
        else None,
        usd_per_hour=amount(hello.usd_per_hour, "price"),
        engine=clean_name(hello.engine) or "native",
        version=clean_name(hello.version),
        takes_orders=hello.takes_orders,
        pool=clean_name(hello.pool),
    )


def models(served: Sequence[pb.Model]) -> Mapping[str, Model]:
    if not 0 < len(served) <= MAX_MODELS:
        raise ProtocolError(f"a site serves 1 to {MAX_MODELS} models, not {len(served)}")
    return MappingProxyType({each.id: _model(each) for each in served})


def _check_protocol(hello: pb.Hello) -> None:
    """Raise ProtocolError if no protocol version is common. Older sites send one version, not a range."""
    lowest, highest = hello.protocol, max(hello.protocol, hello.highest_protocol)
    if lowest > HIGHEST_PROTOCOL or highest < LOWEST_PROTOCOL:
        raise ProtocolError(
            f"the site speaks protocols {lowest} to {highest}, this gateway {LOWEST_PROTOCOL} to "
            f"{HIGHEST_PROTOCOL}: upgrade the older of the two"
        )


def shows_life(hello: pb.Hello) -> bool:
    """Return whether the site sends a message every second, even while its engine is busy."""
    return max(hello.protocol, hello.highest_protocol) >= SHOWS_LIFE


_CAUSES: Mapping[int, FailureCause] = MappingProxyType(
    {
        pb.Rejected.FULL: FailureCause.FULL,
        pb.Rejected.DRAINING: FailureCause.DRAINING,
        pb.Rejected.MODEL_UNKNOWN: FailureCause.MODEL_UNKNOWN,
        pb.Rejected.UNSUPPORTED: FailureCause.UNSUPPORTED,
        pb.Rejected.CONTEXT_LENGTH: FailureCause.CONTEXT_LENGTH,
        pb.Rejected.INVALID: FailureCause.INVALID,
    }
)


def rejected(message: pb.Rejected, site: str) -> AttemptFailure:
    """Return the failure of an attempt that a site rejected. For MODEL_UNKNOWN the message is the gateway's
    own, as the site's may name models of other tenants.
    """
    cause = _CAUSES.get(message.reason, FailureCause.FAILED)
    if cause is FailureCause.MODEL_UNKNOWN:
        return AttemptFailure(site, cause, f"{site} does not serve the model now")
    text = reason(message.message) or f"{site} rejected the query"
    return AttemptFailure(site, cause, text, message.param[:MAX_NAME] or None)


def reason(text: str) -> str:
    """Return a message text of a site, truncated to MAX_REASON_CHARS."""
    return text if len(text) <= MAX_REASON_CHARS else f"{text[:MAX_REASON_CHARS]}…"


def clean_name(text: str) -> str:
    text = text[:MAX_NAME]
    return text if text.isprintable() else "".join(filter(str.isprintable, text))


def deltas(message: pb.Step) -> Sequence[pb.Delta]:
    if len(message.deltas) > MAX_DELTAS:
        raise ProtocolError(f"a step of {len(message.deltas)} deltas; there are at most {MAX_DELTAS}")
    found: Sequence[pb.Delta] = message.deltas
    return found


_FINISHES: Mapping[int, Finish | None] = MappingProxyType(
    {
        pb.Delta.NOT_FINISHED: None,
        pb.Delta.STOP: Finish.STOP,
        pb.Delta.LENGTH: Finish.LENGTH,
        pb.Delta.TOOL_CALLS: Finish.TOOL_CALLS,
        pb.Delta.CONTENT_FILTER: Finish.CONTENT_FILTER,
    }
)


def prefix_hashes(message: pb.Prefixes) -> bytes:
    if len(message.hashes) > MAX_PREFIXES_BYTES or len(message.hashes) % HASH_BYTES:
        raise ProtocolError(f"{len(message.hashes)} bytes of hashes")
    return message.hashes


def delta(message: pb.Delta, limits: AnswerLimits) -> Delta:
    """Convert a delta, without the parts that were not requested. Raises ProtocolError. Must not be called
    with finish CANCELLED or FAILED, which end an attempt.
    """
    ids, thought, most = message.token_ids, message.reasoning_tokens, limits.completion_tokens
    text = Delta(
        message.index,
        message.text,
        min(message.completion_tokens, most),
        tuple(ids[:]),  # by way of a list: iterating over the field takes twice as long
        reasoning=message.reasoning,
        refusal=message.refusal,
        reasoning_tokens=thought and min(thought, most),
    )
    if not message.finish and limits.text_alone:
        return text
    return replace(
        text,
        **_ending(message, limits) if message.finish else {},
        logprobs=_logprobs(message.logprobs, limits.alternatives),
        prompt_logprobs=_logprobs(message.prompt_logprobs, limits.alternatives if limits.echo else None),
        tool_calls=_calls(message) if limits.tools and len(message.tool_calls) else (),
        pooled=tuple(_pooled(each, limits) for each in message.pooled) if limits.inputs else (),
    )


def _ending(message: pb.Delta, limits: AnswerLimits) -> dict[str, Any]:
    """Return the fields that the last delta of a choice sets. An unknown finish of a newer site is STOP."""
    timings, stop = message.timings, message.stop_sequence
    known = _FINISHES.get(message.finish, Finish.STOP)
    return {
        "finish": Finish.STOP if known is Finish.TOOL_CALLS and not limits.tools else known,
        "cached_tokens": min(timings.cached_prompt_tokens, limits.prompt_tokens),
        "cached_unknown": timings.cached_unknown,
        "stop_sequence": stop if limits.stops and stop in limits.stops else "",
    }


def _pooled(message: pb.Pooled, limits: AnswerLimits) -> Pooled:
    if message.index >= limits.inputs:
        raise ProtocolError(f"a result of input {message.index}; there are {limits.inputs}")
    if len(message.vector) > MAX_VECTOR_BYTES or len(message.vector) % 4 or not isfinite(message.score):
        raise ProtocolError(f"a result of input {message.index} that is neither vector nor score")
    return Pooled(message.index, message.vector, message.score)


def _calls(message: pb.Delta) -> tuple[ToolCall, ...]:
    """Return the tool calls below MAX_CALLS. Further ones are dropped and are no error, as a model may repeat
    calls endlessly at any site.
    """
    return tuple(
        ToolCall(each.index, each.id, each.name, each.arguments)
        for each in message.tool_calls
        if each.index < MAX_CALLS
    )


@lru_cache(maxsize=256)
def _features(names: tuple[str, ...]) -> frozenset[str]:
    """Return the set of features. Cached, as most models of a site share one set."""
    return frozenset(map(clean_name, names))


def _model(message: pb.Model) -> Model:
    if not 0 < len(message.id) <= MAX_NAME or not message.id.isprintable():
        raise ProtocolError(f"a model's id has 1 to {MAX_NAME} printable characters")
    if message.context_tokens > MAX_CONTEXT_TOKENS:
        raise ProtocolError(f"a context of {message.context_tokens} tokens; {MAX_CONTEXT_TOKENS} at most")
    return Model(
        id=message.id,
        revision=clean_name(message.revision),
        context_tokens=message.context_tokens,
        created_s=min(max(0, message.created_s), LAST_UNIX_S),
        owned_by=clean_name(message.owned_by) or "mico",
        features=_features(tuple(message.features[:MAX_FEATURES])),
        max_prompt_chars=message.context_tokens * message.max_token_chars,
        parent=clean_name(message.parent),
        own_bytes=max(0, message.own_bytes),
        state=_STATES.get(message.state, ModelState.READY),
        wake_s=amount(message.wake_s, "wake_s"),
        tenant=clean_name(message.tenant),
        blocks=tuple(map(_block, message.blocks[:MAX_BLOCKS])),
    )


def _block(message: pb.Block) -> Block:
    kind = _KINDS.get(message.kind, BlockKind.OTHER)
    return Block(message.id[:8], kind, message.first, message.last, max(0, message.bytes), message.in_host)


_KINDS = {pb.Block.Kind.Value(kind.name): kind for kind in BlockKind}
_STATES = {pb.Model.SLEEPING: ModelState.SLEEPING, pb.Model.WAKING: ModelState.WAKING}


def _logprobs(messages: Sequence[pb.TokenLogprob], alternatives: int | None) -> tuple[TokenLogprob, ...]:
    return () if alternatives is None else tuple(_logprob(each, each.top[:alternatives]) for each in messages)


def _logprob(message: pb.TokenLogprob, top: Sequence[pb.TokenLogprob] = ()) -> TokenLogprob:
    logprob = None if message.absent else message.logprob
    return TokenLogprob(message.token, message.raw, logprob, tuple(map(_logprob, top)))


def amount(value: float, name: str) -> float:
    if not 0 <= value <= MAX_AMOUNT:  # false for NaN, too
        raise ProtocolError(f"{name} is {value}, not an amount from 0 to {MAX_AMOUNT:g}")
    return value


def messages_of(message: pb.SiteMessage) -> Sequence[pb.SiteMessage]:
    """Return the messages of a bunch, or the message itself if it is not a bunch."""
    return message.bunch.messages if message.HasField("bunch") else (message,)


def turns_of(message: pb.SiteMessage) -> Sequence[pb.SiteMessage]:
    """Split a message to be handled in several turns of the event loop. Return the message itself, or its
    parts in order if one of its steps has more than MAX_TURN_DELTAS deltas.
    """
    messages = messages_of(message)
    if all(len(each.step.deltas) <= MAX_TURN_DELTAS for each in messages):
        return (message,)
    parts: list[pb.SiteMessage] = []
    for each in messages:
        found = deltas(each.step)
        begins = range(0, len(found), MAX_TURN_DELTAS)
        steps = (pb.Step(deltas=found[begin : begin + MAX_TURN_DELTAS]) for begin in begins)
        parts += [pb.SiteMessage(step=step) for step in steps] or [each]
    return parts


# ---- to a site ------------------------------------------------------------------------------------


def assign(
    query: Query, attempt_id: str, forecast: Forecast, resume: Resume | None, deadline_s: float
) -> pb.GatewayMessage:
    """Build an Assign message. Parts are filled in place, as protobuf would copy separately built ones."""
    message = pb.GatewayMessage()
    part = message.assign
    _prompt(query, attempt_id, part)
    part.lane = query.lane
    part.any_order = query.any_order
    part.prefill_heavy = query.prefill_heavy
    part.priority = query.priority
    part.deadline_s = deadline_s
    part.traceparent = query.traceparent
    _sampling(query.sampling, part.sampling)
    _forecast(forecast, part.forecast)
    if resume is not None:
        _resume(resume, part.resume)
    return message


def count(query: Query, count_id: str) -> pb.GatewayMessage:
    message = pb.GatewayMessage()
    _prompt(query, count_id, message.count.assign)
    _sampling(query.sampling, message.count.assign.sampling)
    return message


def bunch(messages: Iterable[bytes]) -> bytes:
    """Return serialized messages as one serialized bunch, without parsing them."""
    part, whole = pb.GatewayBunch.MESSAGES_FIELD_NUMBER, pb.GatewayMessage.BUNCH_FIELD_NUMBER
    return _field(whole, b"".join([_field(part, each) for each in messages]))


def _field(number: int, content: bytes) -> bytes:
    """Return the encoding of a protobuf field of message type: number and wire type, length, content."""
    size, head = len(content), [number << 3 | 2]
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*head, size)) + content


def _prompt(query: Query, attempt_id: str, part: pb.Assign) -> None:
    part.attempt_id = attempt_id
    part.query_id = query.id
    part.model = query.model
    part.tenant = query.caller.tenant
    part.request_id = query.request_id
    if isinstance(query.prompt, Chat):
        _chat(query.prompt, part.chat)
        if images := query.prompt.images:
            part.image_tokens = sum(each.tokens for each in images)
    elif isinstance(query.prompt, str):
        part.text = query.prompt
    elif isinstance(query.prompt, Pooling):
        pooling = query.prompt
        part.pooling.task, part.pooling.body_json = pooling.task, pooling.body_json
        part.pooling.inputs, part.pooling.tokens = pooling.inputs, pooling.tokens
    else:
        part.token_ids.ids.extend(query.prompt)


def _chat(chat: Chat, part: pb.Chat) -> None:
    for m in chat.messages:
        part.messages.add(
            role=m.role,
            content=m.content,
            name=m.name,
            tool_calls_json=m.tool_calls_json,
            tool_call_id=m.tool_call_id,
            reasoning=m.reasoning,
            content_json=m.images.content_json if m.images else "",
        )
    part.tools_json = chat.tools_json
    part.tool_choice = chat.tool_choice
    part.tool_name = chat.tool_name
    part.single_tool_call = chat.single_tool_call
    part.template_kwargs_json = chat.template_kwargs_json
    part.reasoning_effort = chat.reasoning_effort


def _sampling(s: Sampling, part: pb.Sampling) -> None:
    if s.max_tokens is not None:
        part.max_tokens = s.max_tokens
    part.n = s.n
    part.temperature = s.temperature
    part.top_p = s.top_p
    part.top_k = s.top_k
    part.min_p = s.min_p
    part.presence_penalty = s.presence_penalty
    part.frequency_penalty = s.frequency_penalty
    part.repetition_penalty = s.repetition_penalty
    if s.seed is not None:
        part.seed = s.seed
    part.stop.extend(s.stop)
    part.stop_token_ids.extend(s.stop_token_ids)
    part.min_tokens = s.min_tokens
    part.ignore_eos = s.ignore_eos
    part.logit_bias.update(s.logit_bias)
    if s.logprobs is not None:
        part.logprobs = s.logprobs
    part.echo = s.echo
    part.guided_json = s.guided_json
    part.left_out.extend(s.left_out)


def _forecast(forecast: Forecast, part: pb.Forecast) -> None:
    generated, expected, p90 = forecast.remaining_columns()
    part.generated.extend(generated)
    part.expected_remaining.extend(expected)
    part.p90_remaining.extend(p90)


def _resume(resume: Resume, part: pb.ResumeFrom) -> None:
    part.token_ids.extend(resume.token_ids)
    part.text_chars = len(resume.text)
    part.text = resume.text
    part.tokens = resume.tokens
    part.tool_calls = resume.tool_calls
    part.argument_chars = resume.argument_chars
    part.reasoning_chars = resume.reasoning_chars
