"""Turn the prompt of an attempt (chat, text or ids) into the token ids that the model reads.

Tokenizing a long prompt takes milliseconds, so it happens on a thread of its own, in the order of arrival.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from site_engine.engine_client import Prepared
from site_engine.errors import NotServed, Reason
from site_engine.messages import Assign, ChatMessage, ChatPrompt, TextPrompt
from site_engine.text.fair_executor import FairExecutor
from site_engine.text.tool_call_parser import ToolCallStyle
from site_engine.text.tool_format import LLAMA, chat_template, format_of, guided_source, hidden_marks

if TYPE_CHECKING:
    from site_engine.text.grammar import Grammar, Grammars

log = logging.getLogger(__name__)

T = TypeVar("T")
_AS_GENERATED = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
NO_TOOLS = "this model's chat template takes no tools, or teaches calls in a form that is not read here"


class PromptTokenizer:
    """A tokenizer of transformers, and the size of the vocabulary that ids must stay within.

    `post` carries a call to the event loop (`loop.call_soon_threadsafe`). Without `grammars` no answer can be
    guided; compiling one may take long, so that has a thread of its own, on which tenants take turns.
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
        self._compiler = FairExecutor("grammars")
        self._grammars = grammars
        self._form = format_of(chat_template(tokenizer))
        self._shown = {} if self._form is None else hidden_marks(self._form, tokenizer)

    @property
    def waiting(self) -> int:
        """Number of prompts not tokenized yet, those of attempts already given up included."""
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        return list(self._waiting.values()).count(tenant)

    @property
    def chats(self) -> bool:
        """True if the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def features(self) -> tuple[str, ...]:
        """Features of the model at this site, as Hello names them."""
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
        """Prepare a prompt on the threads, then call `reply` on the event loop."""
        if not _wants_grammar(assign):
            self._tokenize(assign, None, reply)
            return

        def compile_first() -> None:
            grammar = _or_refusal(assign, lambda: self._grammar(assign))
            if isinstance(grammar, NotServed):
                self._post(partial(reply, grammar))
            else:
                self._tokenize(assign, grammar, reply)

        self._count(assign.tenant, self._compiler.submit(assign.tenant, compile_first))

    def prepare_now(self, assign: Assign) -> Prepared:
        """Prepare a prompt on the caller's thread. Raises NotServed with the reason and the field."""
        return self._prepared(assign, self._grammar(assign) if _wants_grammar(assign) else None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()

    def _tokenize(
        self, assign: Assign, grammar: Grammar | None, reply: Callable[[Prepared | NotServed], None]
    ) -> None:
        def work() -> None:
            self._post(partial(reply, _or_refusal(assign, lambda: self._prepared(assign, grammar))))

        self._count(assign.tenant, self._thread.submit(work))

    def _count(self, tenant: str, future: Future[Any]) -> None:
        self._waiting[future] = tenant
        future.add_done_callback(self._waiting.pop)

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
        return self._grammars.compile(guided_source(schema, tools, self._form, self._grammars.literal), param)

    def _prepared(self, assign: Assign, grammar: Grammar | None) -> Prepared:
        prompt, tools = assign.prompt, assign.tools
        ids = self._prompt_ids(assign)
        self._check("prompt", ids)
        resumed = self._resumed_ids(assign) if assign.by_text else assign.resumed
        self._check("resume", resumed)
        self._check("stop_token_ids", assign.sampling.stop_token_ids)
        self._check("logit_bias", assign.sampling.logit_bias)
        echo = ""
        if assign.echo:
            echo = prompt.text if isinstance(prompt, TextPrompt) else str(self._tokenizer.decode(ids))
        calling = None
        if tools is not None and self._form is not None:
            calling = ToolCallStyle(self._form, tools.names, tools.single, self._shown)
        return Prepared(tuple(ids), echo, grammar=grammar, tool_calling=calling, resumed=resumed)

    def _prompt_ids(self, assign: Assign) -> Sequence[int]:
        prompt = assign.prompt
        if isinstance(prompt, ChatPrompt):
            return self._encode(self._render(prompt), special=False)  # the template wrote them
        if not isinstance(prompt, TextPrompt):
            return prompt.token_ids
        if ids := self._encode(prompt.text, special=True):
            return ids
        start = self._tokenizer.bos_token_id  # an empty prompt is the beginning of a text
        if start is None:
            message = "the prompt has no tokens, and this model has no token to begin with"
            raise NotServed(Reason.INVALID, message, "prompt")
        return [start]

    def _resumed_ids(self, assign: Assign) -> tuple[int, ...]:
        """Tokenize a delivered text: tokens that decode to it exactly, though maybe not those generated."""
        ids = self._encode(assign.resumed_text, special=False)
        if self._tokenizer.decode(ids, **_AS_GENERATED) != assign.resumed_text:
            message = "this model's tokenizer does not say the delivered text as it was: it cannot go on here"
            raise NotServed(Reason.UNSUPPORTED, message)
        return tuple(ids)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special, verbose=False))

    def _render(self, prompt: ChatPrompt) -> str:
        """Apply the chat template."""
        from jinja2 import TemplateError

        if not self.chats:
            message = "this model has no chat template; use /v1/completions"
            raise NotServed(Reason.UNSUPPORTED, message, "messages")
        if prompt.tools is not None and self._form is None:
            raise NotServed(Reason.UNSUPPORTED, NO_TOOLS, "tools")
        tools = {} if prompt.tools is None else {"tools": list(prompt.tools.offered)}
        reads_calls = self._form is not None
        messages = [template_message(place, each, reads_calls) for place, each in enumerate(prompt.messages)]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **tools
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError) as exc:
            message = f"the model's chat template refuses these messages: {exc}"
            raise NotServed(Reason.INVALID, message, "messages") from exc

    def _check(self, param: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self._vocab_size:
                message = f"token id {token} is not in the vocabulary of {self._vocab_size} tokens"
                raise NotServed(Reason.INVALID, message, param)


def _or_refusal(assign: Assign, work: Callable[[], T]) -> T | NotServed:
    """Return the result of `work`, or the refusal that its exception amounts to."""
    try:
        return work()
    except NotServed as refusal:
        return refusal
    except RecursionError:
        return NotServed(Reason.INVALID, "a schema, or the arguments of a call, are nested too deeply")
    except Exception as exc:
        extra = {"request_id": assign.request_id}
        log.exception("the tokenizer failed on attempt %s", assign.attempt_id, extra=extra)
        return NotServed(Reason.INTERNAL, f"the tokenizer failed: {type(exc).__name__}: {exc}", "prompt")


def _wants_grammar(assign: Assign) -> bool:
    tools = assign.tools
    return bool(assign.guided_json) or (tools is not None and (tools.forced or tools.strict))


def template_message(place: int, message: ChatMessage, reads_calls: bool) -> dict[str, Any]:
    """Return a message as templates expect it, without absent fields.

    `reads_calls`: the template reads calls, and their arguments as an object instead of its JSON text.
    """
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_calls_json:
        calls = json.loads(message.tool_calls_json)
        fields["tool_calls"] = [call_with_object(place, each) for each in calls] if reads_calls else calls
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def call_with_object(place: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError) as exc:
        message = f"the arguments of {function.get('name')} are not JSON: {exc}"
        raise NotServed(Reason.INVALID, message, f"messages.{place}.tool_calls") from exc
    return {**call, "function": {**function, "arguments": arguments}}
