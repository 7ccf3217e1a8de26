"""From what a gateway sends (chat, text or ids) to the token ids that the model reads.

Tokenizing a long prompt takes milliseconds, so it happens on a thread of its own, in the order of arrival.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from site_engine.errors import NotServed, Reason
from site_engine.messages import Assign, ChatMessage, ChatPrompt, Prompt, TextPrompt

log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A prompt ready for the engine, and the text that an echoing answer begins with."""

    token_ids: tuple[int, ...]
    echo: str
    uncounted: int = 0  # tokens, by a guess, of a prompt that only the engine can tokenize

    @property
    def tokens(self) -> int:
        return len(self.token_ids) or self.uncounted


class Prompts:
    """One tokenizer of transformers and the vocabulary that ids must stay within.

    `post` carries a call to the event loop (`loop.call_soon_threadsafe`).
    """

    def __init__(self, tokenizer: Any, vocab_size: int, post: Callable[[Callable[[], None]], object]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._post = post
        self._waiting: set[Future[object]] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    @property
    def waiting(self) -> int:
        """Prompts not tokenized yet, those that nobody wants any more included."""
        return len(self._waiting)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def prepare(self, assign: Assign, reply: Callable[[Prepared | NotServed], None]) -> None:
        """Calls `reply` on the event loop."""
        future = self._thread.submit(lambda: self._post(partial(reply, self._answer(assign))))
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)

    def _answer(self, assign: Assign) -> Prepared | NotServed:
        try:
            return self.prepare_now(assign)
        except NotServed as refusal:
            return refusal
        except Exception as exc:
            log.exception("the tokenizer failed on attempt %s", assign.attempt_id)
            return NotServed(Reason.INTERNAL, f"the tokenizer failed: {type(exc).__name__}: {exc}", "prompt")

    def prepare_now(self, assign: Assign) -> Prepared:
        """Raises NotServed with the reason and the field."""
        ids = self._ids(assign.prompt)
        self._check("prompt", ids)
        self._check("resume", assign.resumed)
        self._check("stop_token_ids", assign.sampling.stop_token_ids)
        self._check("logit_bias", assign.sampling.logit_bias)
        return Prepared(tuple(ids), self._echo(assign.prompt, ids) if assign.echo else "")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, ChatPrompt):
            return self._encode(self._rendered(prompt), special=False)  # the template wrote them
        if isinstance(prompt, TextPrompt):
            return self._encode(prompt.text, special=True) or self._start()
        return prompt.token_ids

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special, verbose=False))

    def _start(self) -> list[int]:
        """An empty prompt is the beginning of a text, where the tokenizer has a token for it."""
        start = self._tokenizer.bos_token_id
        if start is None:
            raise NotServed(
                Reason.INVALID,
                "the prompt has no tokens, and this model has no token to begin with",
                "prompt",
            )
        return [start]

    def _rendered(self, prompt: ChatPrompt) -> str:
        from jinja2 import TemplateError

        if not self.chats:
            raise NotServed(
                Reason.UNSUPPORTED, "this model has no chat template; use /v1/completions", "messages"
            )
        messages = [_as_template_sees(each) for each in prompt.messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except (TemplateError, TypeError, ValueError, KeyError) as exc:
            raise NotServed(
                Reason.INVALID, f"the model's chat template refuses these messages: {exc}", "messages"
            ) from exc

    def _check(self, param: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                message = f"token id {token} is not in the vocabulary of {self._vocab_size} tokens"
                raise NotServed(Reason.INVALID, message, param)

    def _echo(self, prompt: Prompt, ids: Sequence[int]) -> str:
        return prompt.text if isinstance(prompt, TextPrompt) else str(self._tokenizer.decode(ids))


def _as_template_sees(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: absent fields are left out."""
    seen: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        seen["name"] = message.name
    if message.tool_calls_json:
        seen["tool_calls"] = json.loads(message.tool_calls_json)
    if message.tool_call_id:
        seen["tool_call_id"] = message.tool_call_id
    return seen
