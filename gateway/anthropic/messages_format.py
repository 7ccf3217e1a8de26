"""The format of POST /v1/messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.anthropic.message_body import error_fields, error_status, message_body
from gateway.anthropic.message_stream import MessageEncoder
from gateway.anthropic.messages_request import read_message_request
from gateway.openai.error_body import ErrorResponse
from gateway.openai.fields import Fields
from gateway.openai.frames import named_frame
from gateway.openai.generation_format import StreamEncoder
from gateway.openai.logprobs import LogprobLists
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.unary_response import UnaryResponse


@dataclass(frozen=True, slots=True)
class MessagesFormat:
    """A stream ends with `message_stop`: there is no [DONE]."""

    id_prefix: str = "msg_"
    end_frames: bytes = b""

    def read(self, fields: Fields) -> GenerationRequest:
        return read_message_request(fields)

    def logprobs(self) -> LogprobLists:
        return LogprobLists()

    def body(self, request: GenerationRequest, head: ResponseHead, answer: UnaryResponse) -> bytes:
        return message_body(head, answer)

    def encoder(self, request: GenerationRequest, head: ResponseHead, prompt_tokens: int) -> StreamEncoder:
        return MessageEncoder(head)

    def error_response(self, error: ErrorResponse, request_id: str) -> tuple[int, bytes]:
        return error_status(error), msgspec.json.encode(error_fields(error, request_id))

    def error_frames(self, error: ErrorResponse, request_id: str) -> bytes:
        return named_frame("error", msgspec.json.encode(error_fields(error, request_id)))


MESSAGES: Final = MessagesFormat()
