"""The messages between a site's process and the process of its engine: all that crosses is defined here.

A frame is the length of a message, four bytes, and the message in MessagePack. Tokens cross as ids in
columns, one row for each; text stays with the site. Requests have numbers, so a row is two small integers.
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
    """Base of all messages; the class's name says which it is."""


# ---- to the engine


class Start(Message, frozen=True):
    """The settings of SiteConfig, without secrets and paths, by name."""

    settings: dict[str, Any]
    with_others: bool = False  # on other devices, to and from which requests move


class Submit(Message, frozen=True):
    """The choices of one attempt. They differ in number, id and choice; all else they share.

    `moved`: the one request here has been begun by another engine, and `resumed` has all of its tokens.
    """

    call: int
    numbers: list[int]
    ids: list[str]
    choices: list[int]
    prompt: bytes  # of 32 bits each
    resumed: bytes
    sampling: Sampling
    remaining: RemainingCurve
    lane: Lane
    priority: int
    tenant: str
    deadline_s: float | None
    grammar: str  # its source, empty if there is none
    chain: str = ""
    any_order: bool = False
    prefill_heavy: bool = False
    moved: Moved | None = None


class Cancel(Message, frozen=True):
    numbers: list[int]


class EndByText(Message, frozen=True):
    """The site has read the end of an answer in its text, after so many tokens."""

    number: int
    generated: int


class Release(Message, frozen=True):
    call: int
    groups: list[list[int]]


class Export(Message, frozen=True):
    """A request is to go on in another engine, which has a place for its keys and values, or not."""

    number: int
    to: InboxPlace | None = None


class Expect(Message, frozen=True):
    """A request is about to come that another engine has begun. `grammar`: its source."""

    grammar: str
    chain: str


class Meet(Message, frozen=True):
    """Inboxes of other engines, to which requests may move from here."""

    inboxes: list[InboxAddress]


class WantLoad(Message, frozen=True):
    """The load is to be reported with the next pass."""


class AddVariant(Message, frozen=True):
    call: int
    variant: Variant


class RemoveVariant(Message, frozen=True):
    call: int
    id: str


class Train(Message, frozen=True):
    """A job. `contents`: the paths of the training file, the validation file and the snapshot."""

    call: int
    job_id: str
    tenant: str
    recipe: Recipe
    contents: list[str]


class StopTraining(Message, frozen=True):
    call: int
    job_id: str


class Taken(Message, frozen=True):
    """The site has read what was shared as a number."""

    number: int


class Turn(Message, frozen=True):
    """Sleep, which gives up memory while nothing runs, or wake."""

    call: int
    asleep: bool


class Hold(Message, frozen=True):
    """Let keys and values have so many bytes beyond the engine's own, or as many of them as there are."""

    call: int
    extra_bytes: int


class Stop(Message, frozen=True):
    """The process is to end after the current iteration."""


# ---- from the engine


class Described(Message, frozen=True):
    """The model is loaded, and its engine not built yet: what the site's tokenizer needs to know of it."""

    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Ready(Message, frozen=True):
    """The engine can serve. `parts`: of its start. `inbox`: for requests that others have begun. `shares`: as
    `Turns` has it.
    """

    facts: Facts
    parts: list[Part] = []
    inbox: InboxAddress | None = None
    shares: str = ""


class Refused(Message, frozen=True):
    """The model can't be served; the process ends."""

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
    """The answer to an Export, after the request's last row. No `moved`: it is still here, or has ended."""

    number: int
    moved: Moved | None


class VariantAdded(Message, frozen=True):
    """The answer to an AddVariant: the chain, or why there is none."""

    call: int
    chain: Chain | None
    message: str = ""


class VariantRemoved(Message, frozen=True):
    """The answer to a RemoveVariant. `message`: why the variant is not removed, else empty."""

    call: int
    message: str = ""


class Turned(Message, frozen=True):
    """The answer to Turn and Hold. `refusal`: why nothing has changed, else empty. `size_bytes`: what sleep
    has freed, or what is held.
    """

    call: int
    refusal: str = ""
    size_bytes: int = 0


class SavedContent(msgspec.Struct, array_like=True, frozen=True):
    """A snapshot, at a path that the site reads and then answers with Taken."""

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
    """The answer to a StopTraining: neither, if the job is not there."""

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
    """The rest of a row beside its token, which few rows have. `has_token`: the row's token id counts."""

    row: int
    has_token: bool
    finish: Finish | None
    error: str
    timings: Timings | None
    logprobs: list[RankedToken]
    prompt_logprobs: list[RankedToken]


class Step(Message, frozen=True):
    """The outputs of one iteration: the request and the token of each row, and the details of some."""

    numbers: list[int]
    token_ids: list[int]
    details: list[Detail]


class Load(Message, frozen=True):
    figures: LoadFigures
    at_s: float


class Broken(Message, frozen=True):
    reason: str


class Alive(Message, frozen=True):
    """Sent a few times a second. `stalled_s`: how long an iteration has taken too long, 0 if it has not."""

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
    """Return the message as bytes, with its length before it."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the messages that are complete with `data`."""
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
