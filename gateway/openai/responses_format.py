"""The format of POST /v1/responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.openai.error_body import ErrorResponse
from gateway.openai.fields import Fields
from gateway.openai.frames import named_frame
from gateway.openai.generation_format import StreamEncoder
from gateway.openai.logprobs import TextLogprobs
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import ResponseHead
from gateway.openai.responses_body import response_body
from gateway.openai.responses_request import FIELD_NAMES, read_response
from gateway.openai.responses_stream import ResponseEncoder
from gateway.openai.unary_response import UnaryResponse


@dataclass(frozen=True, slots=True)
class ResponsesFormat:
    """A stream ends with its terminal event: there is no [DONE]."""

    id_prefix: str = "resp_"
    end_frames: bytes = b""

    def read(self, fields: Fields) -> GenerationRequest:
        return read_response(fields)

    def logprobs(self) -> TextLogprobs:
        return TextLogprobs()

    def body(self, request: GenerationRequest, head: ResponseHead, answer: UnaryResponse) -> bytes:
        return response_body(request, head, answer)

    def encoder(self, request: GenerationRequest, head: ResponseHead, prompt_tokens: int) -> StreamEncoder:
        return ResponseEncoder(request, head)

    def error_response(self, error: ErrorResponse, request_id: str) -> tuple[int, bytes]:
        return error.status, _in_own_fields(error).body()

    def error_frames(self, error: ErrorResponse, request_id: str) -> bytes:
        error = _in_own_fields(error)
        payload = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
        flat = {"code": error.code, "message": error.message, "param": error.param}
        body = {"type": "error", "sequence_number": 0, **flat, "error": payload}
        return named_frame("error", msgspec.json.encode(body))


def _in_own_fields(error: ErrorResponse) -> ErrorResponse:
    return error._replace(param=FIELD_NAMES.get(error.param or "", error.param))


RESPONSES: Final = ResponsesFormat()
