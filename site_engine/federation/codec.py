"""Convert protobuf to frozen values and back: only `bulk.py` and codecs beside this one touch messages, too.

Checks everything that comes in; an invalid Assign becomes a Rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

from site_engine import messages as m
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Finish, Lane, Sampling, TokenLogprob
from site_engine.core.training import Training
from site_engine.errors import NotServed, Reason, WrongMessage
from site_engine.federation import training_codec
from site_engine.federation.client_json import decode_json
from site_engine.federation.model_codec import encode_models
from wire import federation_pb2 as pb

LOWEST_PROTOCOL, HIGHEST_PROTOCOL = 1, 3
"""The protocols that this site speaks: each build also speaks that of the build before."""
MAX_STEP_BYTES = 1 << 20
"""A Step is cut into several messages near this size, well below gRPC's limit of 4 MiB."""

MAX_CHOICES = 128
MAX_CURVE_POINTS = 256
MAX_ID_CHARS = 256
MAX_PREFIX_BYTES = 16
"""Of one prompt: two hashes."""
_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (1e-6, 1e6),
}


def unbundle(message: pb.GatewayMessage) -> Sequence[pb.GatewayMessage]:
    """Return the messages of a bunch, or the message itself if it is none."""
    return message.bunch.messages if message.HasField("bunch") else (message,)


def bundle(messages: Sequence[pb.SiteMessage]) -> Iterator[pb.SiteMessage]:
    """Put messages into few bunches, each of MAX_STEP_BYTES at most or of one message."""
    bunch, size = pb.SiteBunch(), 0
    for message in messages:
        size += message.ByteSize()
        if bunch.messages and size > MAX_STEP_BYTES:
            yield pb.SiteMessage(bunch=bunch)
            bunch, size = pb.SiteBunch(), message.ByteSize()
        bunch.messages.append(message)
    if len(messages) == 1:
        yield messages[0]
    elif bunch.messages:
        yield pb.SiteMessage(bunch=bunch)


def decode(message: pb.GatewayMessage) -> m.FromGateway | None:
    """Decode a message; return None for a kind that only a newer gateway knows. Raises WrongMessage."""
    kind = message.WhichOneof("body")
    if kind not in _DECODERS:
        return None
    return _DECODERS[kind](getattr(message, kind))


def decode_welcome(body: pb.Welcome) -> m.Welcome:
    if not body.gateway:
        raise WrongMessage("Welcome names no gateway")
    for name in ("heartbeat_s", "grace_s"):
        if not (math.isfinite(getattr(body, name)) and getattr(body, name) >= 0):
            raise WrongMessage(f"Welcome.{name} is {getattr(body, name)}; it must be finite, 0 or more")
    return m.Welcome(
        body.gateway,
        tuple(body.peers),
        body.heartbeat_s,
        body.grace_s,
        tuple(body.cancel),
        body.reads_bunches,
        agreed_protocol(body),
        body.reads_prefixes,
        body.reads_models,
        tuple(body.worker_ports),
        body.reads_held,
        body.tunes,
    )


def agreed_protocol(body: pb.Welcome) -> int:
    """Return the highest protocol that both ends speak. Raises WrongMessage where there is none."""
    lowest = body.protocol or 1  # a gateway of before ranges names none
    highest = max(lowest, body.highest_protocol)
    if lowest > HIGHEST_PROTOCOL or highest < LOWEST_PROTOCOL:
        raise WrongMessage(
            f"the gateway speaks protocols {lowest} to {highest}, this site {LOWEST_PROTOCOL} to "
            f"{HIGHEST_PROTOCOL}: upgrade the older of the two"
        )
    return min(highest, HIGHEST_PROTOCOL)


def decode_assign(body: pb.Assign) -> m.Assign | m.Rejected:
    try:
        return checked_assign(body)
    except NotServed as refusal:
        return m.Rejected(body.attempt_id, refusal.reason, refusal.message, refusal.param)


def decode_count(body: pb.Count) -> m.Count | m.Rejected:
    assign = decode_assign(body.assign)
    return m.Count(assign) if isinstance(assign, m.Assign) else assign


def checked_assign(body: pb.Assign) -> m.Assign:
    """Decode an Assign. Raises NotServed with the field that makes no sense."""
    if not 0 < len(body.attempt_id) <= MAX_ID_CHARS:
        raise _invalid(f"an attempt id has 1 to {MAX_ID_CHARS} characters", "attempt_id")
    assign = m.Assign(
        attempt_id=body.attempt_id,
        query_id=body.query_id,
        model=body.model,
        prompt=decode_prompt(body),
        sampling=decode_sampling(body.sampling),
        choices=_in_range("n", body.sampling.n or 1, 1, MAX_CHOICES),
        echo=body.sampling.echo,
        remaining=decode_curve(body.forecast),
        lane=decode_lane(body.lane),
        priority=body.priority,
        deadline_s=_in_range("deadline_s", body.deadline_s, 0.0, 1e9) or None,
        tenant=body.tenant,
        resumed=tuple(body.resume.token_ids),
        resumed_chars=body.resume.text_chars,
        resumed_text=body.resume.text,
        resumed_tokens=body.resume.tokens,
        resumed_calls=body.resume.tool_calls,
        resumed_argument_chars=body.resume.argument_chars,
        resumed_reasoning_chars=body.resume.reasoning_chars
        if body.resume.HasField("reasoning_chars")
        else None,
        guided_json=body.sampling.guided_json,
        request_id=body.request_id[:MAX_ID_CHARS],
        traceparent=body.traceparent,
        image_tokens=body.image_tokens,
        prefix_hashes=body.prefix_hashes[:MAX_PREFIX_BYTES],
        any_order=body.any_order,
        prefill_heavy=body.any_order and body.prefill_heavy,
    )
    if assign.guided_json:
        decode_json(assign.guided_json, dict, "response_format")
    check_resumed(assign)
    return assign


def check_resumed(assign: m.Assign) -> None:
    """Raise NotServed if the answer cannot go on from the part that was delivered."""
    exact_only = assign.choices > 1 or assign.echo or assign.sampling.logprobs is not None
    if (assign.resumed or assign.resumed_text) and exact_only:
        raise NotServed(
            Reason.UNSUPPORTED, "an answer with several choices, echo or logprobs cannot be resumed"
        )
    if assign.resumed:
        return
    if assign.resumed_calls:
        raise _invalid("calls were delivered but no tokens are named to resume from", "resume")
    if assign.resumed_chars != len(assign.resumed_text):
        raise _invalid("text was delivered but neither it nor its tokens are named to resume from", "resume")


def decode_prompt(body: pb.Assign) -> m.Prompt:
    kind = body.WhichOneof("prompt")
    if kind == "chat":
        if not body.chat.messages:
            raise _invalid("a chat needs at least one message", "messages")
        messages = tuple(decode_chat_message(i, each) for i, each in enumerate(body.chat.messages))
        written = body.chat.template_kwargs_json
        kwargs = decode_json(written, dict, "chat_template_kwargs") if written else {}
        return m.ChatPrompt(messages, decode_tools(body.chat), kwargs, body.chat.reasoning_effort)
    if kind == "text":
        return m.TextPrompt(body.text)
    if kind == "token_ids":
        if not body.token_ids.ids:
            raise _invalid("a prompt of token ids needs at least one", "prompt")
        return m.TokenPrompt(tuple(body.token_ids.ids))
    if kind == "pooling":
        pooling = body.pooling
        if not pooling.inputs:
            raise _invalid("there is no input", "input")
        found = decode_json(pooling.body_json, dict, "input")
        return m.PoolingPrompt(pooling.task, found, pooling.inputs, pooling.tokens)
    message = "there is no prompt, or one of a kind that only newer sites know"
    raise NotServed(Reason.UNSUPPORTED, message, "prompt")


def decode_chat_message(place: int, body: pb.ChatMessage) -> m.ChatMessage:
    if not body.role:
        raise _invalid("every message has a role", f"messages.{place}.role")
    if body.tool_calls_json:
        decode_json(body.tool_calls_json, list, f"messages.{place}.tool_calls")
    return m.ChatMessage(
        body.role,
        body.content,
        body.name,
        body.tool_calls_json,
        body.tool_call_id,
        reasoning=body.reasoning,
        parts=decode_json(body.content_json, list, f"messages.{place}.content") if body.content_json else (),
    )


def decode_tools(body: pb.Chat) -> m.Tools | None:
    if not body.tools_json:
        return None
    offered = decode_json(body.tools_json, list, "tools")
    if not all(is_function(each) for each in offered):
        raise _invalid("every tool is a function with a name", "tools")
    choice = body.tool_choice or m.ToolChoice.AUTO
    if choice not in set(m.ToolChoice):
        raise _invalid(f"there is no tool_choice {choice!r}", "tool_choice")
    name = body.tool_name if choice == m.ToolChoice.NAMED else ""
    tools = m.Tools(tuple(offered), m.ToolChoice(choice), name, body.single_tool_call)
    if not offered or (choice == m.ToolChoice.NAMED and name not in tools.functions):
        raise _invalid(f"the function {name!r} is not among the tools", "tool_choice")
    return tools


def is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters") or {}, dict)
    )


def decode_sampling(body: pb.Sampling) -> Sampling:
    floats = {name: getattr(body, name) for name in _RANGES}
    floats["repetition_penalty"] = floats["repetition_penalty"] or 1.0  # absent means off
    for name, value in floats.items():
        _in_range(name, value, *_RANGES[name])
    for value in body.logit_bias.values():
        _in_range("logit_bias", value, -1e6, 1e6)
    if any(not stop for stop in body.stop):
        raise _invalid("a stop string is empty", "stop")
    logprobs = body.logprobs if body.HasField("logprobs") else None
    return Sampling(
        max_tokens=body.max_tokens if body.HasField("max_tokens") else None,
        **floats,
        top_k=body.top_k,
        seed=body.seed if body.HasField("seed") else None,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        min_tokens=body.min_tokens,
        ignore_eos=body.ignore_eos,
        logit_bias=dict(body.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=body.echo and logprobs is not None,
        left_out=frozenset(body.left_out),
    )


def decode_curve(body: pb.Forecast) -> RemainingCurve:
    columns = (body.generated, body.expected_remaining, body.p90_remaining)
    lengths = {len(column) for column in columns}
    if lengths == {0}:
        return RemainingCurve()
    if len(lengths) > 1 or len(body.generated) > MAX_CURVE_POINTS:
        raise _invalid(f"a forecast has three columns of one length, at most {MAX_CURVE_POINTS}", "forecast")
    if any(b <= a for a, b in zip(body.generated, body.generated[1:], strict=False)):
        raise _invalid("a forecast's points ascend", "forecast")
    if any(not (math.isfinite(value) and value >= 0) for value in body.expected_remaining):
        raise _invalid("a forecast's expectations are finite and not negative", "forecast")
    return RemainingCurve(tuple(RemainingPoint(*point) for point in zip(*columns, strict=True)))


def decode_lane(value: int) -> Lane:
    """Return the lane; one that only newer gateways know is the last."""
    return Lane(min(value, max(Lane)))


def _in_range(param: str, value: Any, low: float, high: float) -> Any:
    if not low <= value <= high:  # a NaN is in no range
        raise _invalid(f"{param} is {value}; it must be between {low:g} and {high:g}", param)
    return value


def _invalid(message: str, param: str) -> NotServed:
    return NotServed(Reason.INVALID, message, param)


_DECODERS: dict[str, Callable[[Any], m.FromGateway]] = {
    "welcome": decode_welcome,
    "assign": decode_assign,
    "count": decode_count,
    "cancel": lambda body: m.Cancel(body.attempt_id),
    "release": lambda body: m.Release(body.release_id, tuple(dict.fromkeys(body.attempt_ids))),
    **training_codec.DECODERS,
    "ping": lambda body: m.Ping(body.nonce),
    "report_pace": lambda body: m.ReportPace(body.times_off, body.every_s, body.heartbeat_s),
}


def encode(message: m.FromSite) -> Iterator[pb.SiteMessage]:
    """Encode a message; a Step may become several."""
    if isinstance(message, m.Step):
        for part in encode_step(message.deltas):
            yield pb.SiteMessage(step=part)
    else:
        kind, convert = _ENCODERS[type(message)]
        yield pb.SiteMessage(**{kind: convert(message)})


def encode_step(deltas: Sequence[m.Delta]) -> Iterator[pb.Step]:
    part, size = pb.Step(), 0
    for encoded in chain.from_iterable(map(encode_deltas, deltas)):
        size += encoded.ByteSize()
        if part.deltas and size > MAX_STEP_BYTES:
            yield part
            part, size = pb.Step(), encoded.ByteSize()
        part.deltas.append(encoded)
    yield part


_FINISHES = {
    None: pb.Delta.NOT_FINISHED,
    Finish.STOP: pb.Delta.STOP,
    Finish.LENGTH: pb.Delta.LENGTH,
    Finish.TOOL_CALLS: pb.Delta.TOOL_CALLS,
    Finish.CONTENT_FILTER: pb.Delta.CONTENT_FILTER,
    Finish.CANCELLED: pb.Delta.CANCELLED,
    Finish.FAILED: pb.Delta.FAILED,
}


def encode_deltas(delta: m.Delta) -> Iterator[pb.Delta]:
    """Encode a delta. If its vectors are many, several come before the last one, which has all else."""
    if not delta.pooled:
        yield encode_delta(delta)
        return
    part, size = pb.Delta(attempt_id=delta.attempt_id, index=delta.choice), 0
    for each in delta.pooled:
        size += len(each.vector)
        if part.pooled and size > MAX_STEP_BYTES:
            yield part
            part, size = pb.Delta(attempt_id=delta.attempt_id, index=delta.choice), len(each.vector)
        part.pooled.add(index=each.index, vector=each.vector, score=each.score)
    last = encode_delta(delta)
    last.pooled.extend(part.pooled)
    yield last


def encode_delta(delta: m.Delta) -> pb.Delta:
    encoded = pb.Delta(
        attempt_id=delta.attempt_id,
        index=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids,
        finish=_FINISHES[delta.finish],
        error=delta.error,
        completion_tokens=delta.completion_tokens,
        reasoning=delta.reasoning,
        refusal=delta.refusal,
        reasoning_tokens=delta.reasoning_tokens,
        stop_sequence=delta.stop_sequence,
    )
    if delta.logprobs or delta.prompt_logprobs:
        encoded.logprobs.extend(map(encode_logprob, delta.logprobs))
        encoded.prompt_logprobs.extend(map(encode_logprob, delta.prompt_logprobs))
    if delta.tool_calls:
        encoded.tool_calls.extend(pb.ToolCall(**_fields(each)) for each in delta.tool_calls)
    if delta.timings is not None:
        encoded.timings.cached_prompt_tokens = delta.timings.cached_prompt_tokens
        encoded.timings.cached_unknown = delta.timings.cached_unknown
    return encoded


def encode_logprob(value: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token=value.token,
        raw=value.raw,
        logprob=value.logprob or 0.0,
        absent=value.logprob is None,
        top=[encode_logprob(each) for each in value.top],
    )


def encode_hello(hello: m.Hello) -> pb.Hello:
    own = _fields(hello)
    own |= {"models": encode_models(hello.models), "trains": training_codec.encode_trains(hello.trains)}
    own |= {"protocol": LOWEST_PROTOCOL, "highest_protocol": HIGHEST_PROTOCOL}
    return pb.Hello(reads_bunches=True, paces_reports=True, **own)


def encode_load(load: m.Load) -> pb.Load:
    own = load.figures._asdict()
    own["iteration"] = pb.IterationCost(**load.figures.iteration._asdict())
    del own["resident"]  # which `Group` puts into the models
    own["devices"] = [pb.DeviceLoad(**each._asdict()) for each in load.figures.devices]
    return pb.Load(
        seq=load.seq,
        stalled_s=load.stalled_s,
        unknown_messages=load.unknown_messages,
        **own,
    )


def encode_rejected(rejected: m.Rejected) -> pb.Rejected:
    return pb.Rejected(
        attempt_id=rejected.attempt_id,
        reason=pb.Rejected.Reason.Value(rejected.reason.value),
        message=rejected.message,
        param=rejected.param,
    )


def _fields(value: Any) -> dict[str, Any]:
    """Return the value's fields by name; the names are those of federation.proto."""
    return {each.name: getattr(value, each.name) for each in fields(value)}


def _as(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda value: kind(**_fields(value))


_PLAIN = "Ordered Held Accepted Counted Bid Released Pong Draining Bye Prefixes"
_ENCODERS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    m.Hello: ("hello", encode_hello),
    m.Models: ("models", lambda value: pb.Models(models=encode_models(value.models))),
    m.Load: ("load", encode_load),
    m.Rejected: ("rejected", encode_rejected),
    Training: ("training", training_codec.encode_training),
    **{getattr(m, name): (name.lower(), _as(getattr(pb, name))) for name in _PLAIN.split()},
}
