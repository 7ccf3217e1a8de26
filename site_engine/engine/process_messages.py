"""The messages between a site's process and the process of its engine.

A frame is a message's length (4 bytes, little endian) and the message in MessagePack. Tokens are sent as ids
in columns, one row per request; text stays in the site's process. Requests are numbered, so a row is two
small integers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

from site_engine.core.chain import Chain, Variant
from site_engine.core.inbox import InboxAddress, InboxPlace
from site_engine.core.load import LoadFigures
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Moved, Sampling, Timings
from site_engine.core.startup import Part
from site_engine.core.training import Failed, Recipe, StepDone
from site_engine.engine_client import Facts

_LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Base of all messages, tagged with the class name."""


# ---- to the engine


class Start(Message, frozen=True):
    """The settings of SiteConfig by name, without secrets and paths.

    `with_others`: there are engines on other devices, to and from which requests move.
    """

    settings: dict[str, Any]
    with_others: bool = False


class Submit(Message, frozen=True):
    """The choices of one attempt, which differ only in number, id and choice.

    With `moved` there is one request, which another engine has begun; `resumed` holds all its output tokens.
    """

    call: int
    numbers: list[int]
    ids: list[str]
    choices: list[int]
    prompt: bytes  # token ids of 32 bits each, as in `resumed`
    resumed: bytes
    sampling: Sampling
    remaining: RemainingCurve
    lane: Lane
    priority: int
    tenant: str
    deadline_s: float | None
    grammar: str  # source text, empty if there is none
    chain: str = ""
    any_order: bool = False
    prefill_heavy: bool = False
    moved: Moved | None = None


class Cancel(Message, frozen=True):
    numbers: list[int]


class EndByText(Message, frozen=True):
    """A stop string, found by the site in an answer's text, has ended the answer after `generated` tokens."""

    number: int
    generated: int


class Release(Message, frozen=True):
    call: int
    groups: list[list[int]]


class Export(Message, frozen=True):
    """Remove a request to continue it in another engine. `to`: the place for its keys and values, if any."""

    number: int
    to: InboxPlace | None = None


class Expect(Message, frozen=True):
    """A request that another engine has begun will arrive soon. `grammar`: its source, to compile ahead."""

    grammar: str
    chain: str


class Meet(Message, frozen=True):
    """Inboxes of other engines, to which requests may move."""

    inboxes: list[InboxAddress]


class WantLoad(Message, frozen=True):
    """Report the load soon."""


class AddVariant(Message, frozen=True):
    call: int
    variant: Variant


class RemoveVariant(Message, frozen=True):
    call: int
    id: str


class Train(Message, frozen=True):
    """Start a training job. `contents`: paths of the training file, validation file and snapshot."""

    call: int
    job_id: str
    tenant: str
    recipe: Recipe
    contents: list[str]


class StopTraining(Message, frozen=True):
    call: int
    job_id: str


class Taken(Message, frozen=True):
    """The site has read the shared contents with this number."""

    number: int


class Turn(Message, frozen=True):
    """Sleep, which frees memory while nothing runs, or wake."""

    call: int
    asleep: bool


class Hold(Message, frozen=True):
    """Give the KV cache `extra_bytes` bytes beyond the engine's own memory, or as many as are available."""

    call: int
    extra_bytes: int


class Stop(Message, frozen=True):
    """End the process after the current iteration."""


# ---- from the engine


class Described(Message, frozen=True):
    """What the site's tokenizer needs to know of the model. Sent before the engine is built."""

    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Ready(Message, frozen=True):
    """The engine can serve. `parts`: the parts of its start. `inbox`: receives requests from other engines.
    `shares`: as in `Turns`.
    """

    facts: Facts
    parts: list[Part] = []
    inbox: InboxAddress | None = None
    shares: str = ""


class Refused(Message, frozen=True):
    """The model cannot be served. The process ends."""

    message: str


class Admitted(Message, frozen=True):
    """The answer to a Submit. `reason` names a `Reason`, empty if the group was admitted."""

    call: int
    reason: str = ""
    message: str = ""
    param: str = ""


class Released(Message, frozen=True):
    call: int
    decisions: list[bool]


class Exported(Message, frozen=True):
    """The answer to an Export, after the request's last row. `moved` is None if the request was not removed
    or has ended.
    """

    number: int
    moved: Moved | None


class VariantAdded(Message, frozen=True):
    """The answer to an AddVariant: the chain, or None and the reason in `message`."""

    call: int
    chain: Chain | None
    message: str = ""


class VariantRemoved(Message, frozen=True):
    """The answer to a RemoveVariant. `message`: why the variant is not removed, else empty."""

    call: int
    message: str = ""


class Turned(Message, frozen=True):
    """The answer to Turn and Hold. `refusal`: why nothing has changed, else empty. `size_bytes`: the bytes
    that sleep has freed, or that are held.
    """

    call: int
    refusal: str = ""
    size_bytes: int = 0


class SavedContent(msgspec.Struct, array_like=True, frozen=True):
    """A snapshot in a file at `path`, which the site reads and acknowledges with Taken."""

    number: int
    step: int
    last: bool
    path: str


class TrainAnswered(Message, frozen=True):
    """The answer to a Train. `refusal` is empty if the job has begun."""

    call: int
    refusal: str = ""
    elsewhere: bool = False


class TrainingStopped(Message, frozen=True):
    """The answer to a StopTraining. Both fields are None if the job is unknown."""

    call: int
    saved: SavedContent | None
    failed: Failed | None = None


class StepTrained(Message, frozen=True):
    job_id: str
    step: StepDone


class JobFailed(Message, frozen=True):
    job_id: str
    failed: Failed


class JobSaved(Message, frozen=True):
    job_id: str
    saved: SavedContent


class RankedToken(msgspec.Struct, array_like=True, frozen=True):
    token_id: int
    logprob: float | None
    top: list[tuple[int, float | None]]


class Detail(msgspec.Struct, array_like=True, frozen=True):
    """What a row holds besides its token; few rows have details. `has_token`: the row's token id is valid."""

    row: int
    has_token: bool
    finish: Finish | None
    error: str
    timings: Timings | None
    logprobs: list[RankedToken]
    prompt_logprobs: list[RankedToken]


class Step(Message, frozen=True):
    """The outputs of one iteration: request number and token id of each row, and details of some rows."""

    numbers: list[int]
    token_ids: list[int]
    details: list[Detail]


class Load(Message, frozen=True):
    figures: LoadFigures
    at_s: float


class Broken(Message, frozen=True):
    reason: str


class Alive(Message, frozen=True):
    """Sent a few times per second. `stalled_s`: seconds that a stalled iteration has taken, else 0."""

    stalled_s: float


ToTraining: TypeAlias = Train | StopTraining | Taken
FromTraining: TypeAlias = TrainAnswered | TrainingStopped | StepTrained | JobFailed | JobSaved
ToEngine: TypeAlias = (
    Start
    | Submit
    | Cancel
    | EndByText
    | Release
    | Export
    | Expect
    | Meet
    | WantLoad
    | AddVariant
    | RemoveVariant
    | ToTraining
    | Turn
    | Hold
    | Stop
)
FromEngine: TypeAlias = (
    Described
    | Ready
    | Refused
    | Admitted
    | Released
    | Exported
    | Step
    | Load
    | Broken
    | Alive
    | VariantAdded
    | VariantRemoved
    | Turned
    | FromTraining
)

_encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: Message) -> bytes:
    """Return the message encoded, preceded by its length."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Append `data` and yield the complete messages."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            yield bytes(buffer[at + _LENGTH.size : end])
            at = end
        del buffer[:at]
