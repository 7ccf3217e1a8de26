"""From what a gateway sends (chat, text or ids) to the token ids that the model reads.

Tokenizing a long prompt takes milliseconds, so it happens on a thread of its own, in the order of arrival.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from site_engine.core.tools import Tools
from site_engine.engine_client import Prepared
from site_engine.errors import NotServed, Reason
from site_engine.messages import Assign, ChatMessage, ChatPrompt, Prompt, TextPrompt
from site_engine.text.fair_executor import FairExecutor
from site_engine.text.tool_call_parser import ToolCallStyle
from site_engine.text.tool_format import LLAMA, format_of, guided_source, hidden

if TYPE_CHECKING:
    from site_engine.text.grammar import Grammar, Grammars

log = logging.getLogger(__name__)

T = TypeVar("T")
_AS_GENERATED = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
NO_TOOLS = "this model's chat template takes no tools, or teaches calls in a form that is not read here"


class PromptTokenizer:
    """One tokenizer of transformers and the vocabulary that ids must stay within.

    `post` carries a call to the event loop (`loop.call_soon_threadsafe`). Without `grammars` nothing is
    guided; to compile one may take long, so that has a thread of its own, and tenants take turns on it.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        post: Callable[[Callable[[], None]], object],
        grammars: Grammars | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._post = post
        self._waiting: dict[Future[Any], str] = {}  # with the tenant
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts")
        self._compiling = FairExecutor("grammars")
        self._grammars = grammars
        self._form = format_of(_template(tokenizer))
        self._shown = {} if self._form is None else hidden(self._form, tokenizer)

    @property
    def waiting(self) -> int:
        """PromptTokenizer not tokenized yet, those that nobody wants any more included."""
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        return list(self._waiting.values()).count(tenant)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def features(self) -> tuple[str, ...]:
        """What the model can do here, as Hello names it."""
        has = {
            "chat": self.chats,
            "logprobs": True,
            "resume": True,
            "resume_text": True,
            "resume_chat": self.chats,
            "tools": self._form is not None,
            "guided": self._grammars is not None,
        }
        return tuple(name for name, is_there in has.items() if is_there)

    def prepare(self, assign: Assign, reply: Callable[[Prepared | NotServed], None]) -> None:
        """Calls `reply` on the event loop."""
        if _wants_grammar(assign):
            work = partial(self._compile, assign, reply)
            self._count(assign.tenant, self._compiling.submit(assign.tenant, work))
        else:
            self._tokenize(assign, None, reply)

    def prepare_now(self, assign: Assign) -> Prepared:
        """Raises NotServed with the reason and the field."""
        return self._prepared(assign, self._grammar(assign) if _wants_grammar(assign) else None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._compiling.close()

    def _tokenize(
        self, assign: Assign, grammar: Grammar | None, reply: Callable[[Prepared | NotServed], None]
    ) -> None:
        work = partial(self._finish, assign, grammar, reply)
        self._count(assign.tenant, self._thread.submit(work))

    def _count(self, tenant: str, future: Future[Any]) -> None:
        self._waiting[future] = tenant
        future.add_done_callback(self._waiting.pop)

    def _compile(self, assign: Assign, reply: Callable[[Prepared | NotServed], None]) -> None:
        answer = _told(assign, lambda: self._grammar(assign))
        if isinstance(answer, NotServed):
            self._post(partial(reply, answer))
        else:
            self._tokenize(assign, answer, reply)

    def _finish(
        self, assign: Assign, grammar: Grammar | None, reply: Callable[[Prepared | NotServed], None]
    ) -> None:
        self._post(partial(reply, _told(assign, lambda: self._prepared(assign, grammar))))

    def _grammar(self, assign: Assign) -> Grammar:
        tools = assign.tools
        forced = tools is not None and tools.forced
        param = "response_format" if assign.guided_json and not forced else "tools"
        if self._grammars is None:
            raise NotServed(Reason.UNSUPPORTED, "this site can't hold an answer to a grammar", param)
        if tools is not None and assign.guided_json and not forced and self._form is LLAMA:
            message = "this model writes calls as plain JSON, which can't be told from an answer in JSON"
            raise NotServed(Reason.UNSUPPORTED, message, param)
        schema = json.loads(assign.guided_json) if assign.guided_json else None
        return self._grammars.compile(guided_source(schema, tools, self._form, self._grammars.written), param)

    def _prepared(self, assign: Assign, grammar: Grammar | None) -> Prepared:
        ids = self._ids(assign.prompt)
        self._check("prompt", ids)
        resumed = self._resumed(assign)
        self._check("resume", resumed)
        self._check("stop_token_ids", assign.sampling.stop_token_ids)
        self._check("logit_bias", assign.sampling.logit_bias)
        echo = self._echo(assign.prompt, ids) if assign.echo else ""
        return Prepared(
            tuple(ids), echo, grammar=grammar, tool_calling=self._calling(assign.tools), resumed=resumed
        )

    def _resumed(self, assign: Assign) -> tuple[int, ...]:
        """Of a text whose tokens are unknown, tokens that say it exactly, if not those generated."""
        if not assign.by_text:
            return assign.resumed
        ids = self._encode(assign.resumed_text, special=False)
        if self._tokenizer.decode(ids, **_AS_GENERATED) != assign.resumed_text:
            message = "this model's tokenizer does not say the delivered text as it was: it cannot go on here"
            raise NotServed(Reason.UNSUPPORTED, message)
        return tuple(ids)

    def _calling(self, tools: Tools | None) -> ToolCallStyle | None:
        if tools is None or self._form is None:
            return None
        return ToolCallStyle(self._form, tools, self._shown)

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
        if prompt.tools is not None and self._form is None:
            raise NotServed(Reason.UNSUPPORTED, NO_TOOLS, "tools")
        tools = {} if prompt.tools is None else {"tools": list(prompt.tools.offered)}
        messages = [
            _as_template_sees(place, each, is_read=self._form is not None)
            for place, each in enumerate(prompt.messages)
        ]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **tools
                )
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


def _told(assign: Assign, work: Callable[[], T]) -> T | NotServed:
    try:
        return work()
    except NotServed as refusal:
        return refusal
    except RecursionError:
        return NotServed(Reason.INVALID, "a schema, or the arguments of a call, are nested too deeply")
    except Exception as exc:
        told = {"request_id": assign.request_id}
        log.exception("the tokenizer failed on attempt %s", assign.attempt_id, extra=told)
        return NotServed(Reason.INTERNAL, f"the tokenizer failed: {type(exc).__name__}: {exc}", "prompt")


def _wants_grammar(assign: Assign) -> bool:
    tools = assign.tools
    return bool(assign.guided_json) or (tools is not None and (tools.forced or tools.strict))


def _template(tokenizer: Any) -> str:
    """The chat template; of several, the one for tools."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("tool_use") or found.get("default")
    return found or ""


def _as_template_sees(place: int, message: ChatMessage, *, is_read: bool) -> dict[str, Any]:
    """A message as templates expect it: absent fields are left out.

    `is_read`: the template reads calls, and their arguments as an object.
    """
    seen: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        seen["name"] = message.name
    if message.tool_calls_json:
        calls = json.loads(message.tool_calls_json)
        seen["tool_calls"] = [_with_object(place, each) for each in calls] if is_read else calls
    if message.tool_call_id:
        seen["tool_call_id"] = message.tool_call_id
    return seen


def _with_object(place: int, call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object instead of its JSON text."""
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError) as exc:
        message = f"the arguments of {function.get('name')} are not JSON: {exc}"
        raise NotServed(Reason.INVALID, message, f"messages.{place}.tool_calls") from exc
    return {**call, "function": {**function, "arguments": arguments}}
