"""Convert the prompt of an attempt (chat, text or token ids) to the model's input token ids.

Tokenization takes from microseconds to seconds, so it runs on threads, in steps of a few milliseconds.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from site_engine.core.request import Thinking
from site_engine.engine_client import Prepared
from site_engine.errors import NotServed, Reason
from site_engine.messages import Assign, ChatMessage, ChatPrompt, PoolingPrompt, TextPrompt, Tools
from site_engine.text.fair_executor import FairExecutor
from site_engine.text.prompt_encoder import PIECE_CHARS, PromptEncoder
from site_engine.text.template_arguments import effort_arguments, shielded
from site_engine.text.thinking import after_thought, marks_of, thinking_after
from site_engine.text.tool_call_parser import ToolCallStyle
from site_engine.text.tool_format import HARMONY, Format, chat_template, hidden_marks, recognize
from site_engine.text.tool_grammar import guided_source

if TYPE_CHECKING:
    from site_engine.text.grammar import Grammar, Grammars

log = logging.getLogger(__name__)

T = TypeVar("T")
Turns = Generator[None, None, T]
"""A generator that returns a result and yields between the steps of its computation."""
_AS_GENERATED = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
NO_POOLING = "this site's engine generates text: it makes no embeddings and ranks no documents"
NO_IMAGES = "this site's engine reads text alone, and the messages have images"


class PromptTokenizer:
    """Tokenize prompts with a transformers tokenizer. Token ids must be below `vocab_size`.

    `post` schedules a call on the event loop (`loop.call_soon_threadsafe`). Guided decoding requires
    `grammars`. A text longer than `context_tokens` is rejected at the first piece beyond that limit.
    Unless `allow_special_tokens` is set, names of control tokens in chat messages are encoded as plain text.

    Short prompts, long prompts and grammars have one thread each, scheduled fairly between tenants. Work that
    can't be split into short steps therefore delays only work of the same kind.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        post: Callable[[Callable[[], None]], object],
        grammars: Grammars | None = None,
        *,
        context_tokens: int | None = None,
        allow_special_tokens: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        self._vocab_size = vocab_size
        self._context_tokens = context_tokens
        self._allow_special_tokens = allow_special_tokens
        self._post = post
        self._waiting: dict[Future[None], str] = {}  # maps futures to tenants
        self._short, self._long = FairExecutor("prompts"), FairExecutor("long-prompts")
        self._compiler = FairExecutor("grammars")
        self._grammars = grammars
        template = chat_template(tokenizer)
        self._roles = {} if "developer" in template else {"developer": "system"}
        self._form, self._no_tools = recognize(template)
        self._call_marks = {} if self._form is None else hidden_marks(self._form.marks, tokenizer)
        self._thought = marks_of(template)
        self._thought_marks = {} if self._thought is None else hidden_marks(self._thought, tokenizer)

    @property
    def waiting(self) -> int:
        """The number of unfinished prompts, including cancelled prompts that are not dropped yet."""
        return len(self._waiting)

    def waiting_of(self, tenant: str) -> int:
        return list(self._waiting.values()).count(tenant)

    @property
    def max_token_chars(self) -> int | None:
        """The maximum number of characters of text in one token, or None if unknown."""
        return self._encoder.max_token_chars

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the features that the model supports at this site, as sent in `Hello`."""
        has = {
            "chat": self.chats,
            "count": True,
            "logprobs": True,
            "resume": True,
            "resume_text": True,
            "resume_chat": self.chats and self._form is not HARMONY,  # its text omits generated tokens
            "tools": self._form is not None,
            "guided": self._grammars is not None,
            "template_kwargs": self.chats,
            "reasoning": self._thought is not None or self._form is HARMONY,
        }
        return tuple(name for name, is_there in has.items() if is_there)

    def prepare(
        self,
        assign: Assign,
        reply: Callable[[Prepared | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare a prompt on the worker threads, then call `reply` on the event loop.

        `is_wanted` is called on those threads. Once it returns False, the prompt is dropped without a reply.
        """
        executor = self._short if prompt_chars(assign) <= PIECE_CHARS else self._long

        def tokenize(grammar: Grammar | None) -> Turns[None]:
            answer = yield from _or_refusal(assign, self._prepared(assign, grammar))
            self._post(partial(reply, answer))

        def compile_first() -> Iterator[None]:
            yield from ()
            grammar = yield from _or_refusal(assign, self._grammar(assign))
            if isinstance(grammar, NotServed):
                self._post(partial(reply, grammar))
            else:
                self._submit(executor, assign.tenant, tokenize(grammar), is_wanted)

        if _wants_grammar(assign):
            self._submit(self._compiler, assign.tenant, compile_first(), is_wanted)
        else:
            self._submit(executor, assign.tenant, tokenize(None), is_wanted)

    def count(
        self,
        assign: Assign,
        reply: Callable[[int | NotServed], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Count the tokens of a prompt on the worker threads, then call `reply` on the event loop."""

        def tokenize() -> Turns[None]:
            prepared = yield from _or_refusal(assign, self._prepared(assign, None))
            self._post(partial(reply, prepared if isinstance(prepared, NotServed) else prepared.tokens))

        executor = self._short if prompt_chars(assign) <= PIECE_CHARS else self._long
        self._submit(executor, assign.tenant, tokenize(), is_wanted)

    def prepare_now(self, assign: Assign) -> Prepared:
        """Prepare a prompt on the calling thread. Raises NotServed with the reason and the field."""
        grammar = _finish(self._grammar(assign)) if _wants_grammar(assign) else None
        return _finish(self._prepared(assign, grammar))

    def close(self) -> None:
        for executor in (self._short, self._long, self._compiler):
            executor.close()

    def _submit(
        self, executor: FairExecutor, tenant: str, work: Iterator[None], is_wanted: Callable[[], bool]
    ) -> None:
        future = executor.submit(tenant, work, is_wanted)
        self._waiting[future] = tenant
        future.add_done_callback(self._waiting.pop)

    def _grammar(self, assign: Assign) -> Turns[Grammar]:
        yield from ()  # a grammar is compiled in one step
        tools = assign.tools
        forced = tools is not None and tools.forced
        param = "response_format" if assign.guided_json and not forced else "tools"
        if self._grammars is None:
            raise NotServed(Reason.UNSUPPORTED, "this site can't hold an answer to a grammar", param)
        if (
            tools is not None
            and assign.guided_json
            and not forced
            and self._form is not None
            and self._form.bare
        ):
            message = "this model writes calls as plain JSON, which can't be told from an answer in JSON"
            raise NotServed(Reason.UNSUPPORTED, message, param)
        schema = json.loads(assign.guided_json) if assign.guided_json else None
        form = self._form if isinstance(assign.prompt, ChatPrompt) else None
        source = guided_source(schema, tools, form, self._grammars.literal)
        if self._thought is not None and isinstance(assign.prompt, ChatPrompt):
            thinking = thinking_after(self._render(assign.prompt), self._thought)
            source = after_thought(source, thinking, self._grammars.literal)
        return self._grammars.compile(source, param)

    def _prepared(self, assign: Assign, grammar: Grammar | None) -> Turns[Prepared]:
        prompt, tools = assign.prompt, assign.tools
        text = self._render(prompt) if isinstance(prompt, ChatPrompt) else None
        ids = yield from self._prompt_ids(assign, text)
        self._check("prompt", ids)
        resumed = assign.resumed
        if assign.by_text:
            resumed = yield from self._resumed_ids(assign)
        self._check("resume", resumed)
        self._check("stop_token_ids", assign.sampling.stop_token_ids)
        self._check("logit_bias", tuple(assign.sampling.logit_bias))
        echo = ""
        if assign.echo:
            echo = prompt.text if isinstance(prompt, TextPrompt) else str(self._tokenizer.decode(ids))
        shown: dict[int, str] = {}
        calling = thinking = None
        if text is not None and self._form is not None and (tools is not None or self._form is HARMONY):
            functions, single = ({}, False) if tools is None else (tools.functions, tools.single)
            calling = ToolCallStyle(self._form, functions, single)
            shown |= self._call_marks
        if text is not None and self._thought is not None:
            thinking = thinking_after(text, self._thought)
            if calling is not None and grammar is None and isinstance(calling.form, Format):
                thinking = thinking._replace(call=calling.form.ends_thought)
            shown |= self._thought_marks
        check_resumed_thought(assign, thinking, in_channels=calling is not None and self._form is HARMONY)
        return Prepared(
            tuple(ids),
            echo,
            grammar=grammar,
            tool_calling=calling,
            thinking=thinking,
            shown=shown,
            resumed=resumed,
        )

    def _prompt_ids(self, assign: Assign, rendered: str | None) -> Turns[Sequence[int]]:
        prompt = assign.prompt
        if rendered is not None:
            return (yield from self._encode(rendered, special=False))  # the template includes special tokens
        assert not isinstance(prompt, ChatPrompt)
        if isinstance(prompt, PoolingPrompt):
            raise NotServed(Reason.UNSUPPORTED, NO_POOLING, "model")
        if not isinstance(prompt, TextPrompt):
            return prompt.token_ids
        if ids := (yield from self._encode(prompt.text, special=True)):
            return ids
        start = self._tokenizer.bos_token_id  # an empty prompt starts a new text
        if start is None:
            message = "the prompt has no tokens, and this model has no token to begin with"
            raise NotServed(Reason.INVALID, message, "prompt")
        return [start]

    def _resumed_ids(self, assign: Assign) -> Turns[tuple[int, ...]]:
        """Tokenize the delivered text, perhaps to other tokens than those generated.

        Raises NotServed if the tokens do not decode to exactly that text.
        """
        ids = yield from self._encode(assign.resumed_text, special=False)
        if self._tokenizer.decode(ids, **_AS_GENERATED) != assign.resumed_text:
            message = "this model's tokenizer does not say the delivered text as it was: it cannot go on here"
            raise NotServed(Reason.UNSUPPORTED, message)
        return tuple(ids)

    def _encode(self, text: str, *, special: bool) -> Turns[list[int]]:
        """Encode a text. Raises NotServed as soon as the text is known to exceed the context length."""
        limit, chars = self._context_tokens, self._encoder.max_token_chars
        if limit is not None and chars is not None and self._encoder.chars(text) > limit * chars:
            raise _too_long(
                f"the prompt has {self._encoder.chars(text)} characters, at most {chars} in a token,", limit
            )
        ids: list[int] = []
        for piece in self._encoder.pieces(text, special=special):
            if limit is not None and len(ids) >= limit:
                raise _too_long(f"the prompt has more than {len(ids)} tokens,", limit)
            if ids:
                yield
            ids += piece
        return ids

    def _render(self, prompt: ChatPrompt) -> str:
        """Render a chat with the model's chat template. Raises NotServed if the chat is not supported."""
        from jinja2 import TemplateError

        if not self.chats:
            message = "this model has no chat template; use /v1/completions"
            raise NotServed(Reason.UNSUPPORTED, message, "messages")
        if any(each.parts for each in prompt.messages):
            raise NotServed(Reason.UNSUPPORTED, NO_IMAGES, "messages")
        if prompt.tools is not None and self._form is None:
            raise NotServed(Reason.UNSUPPORTED, self._no_tools, "tools")
        reads_calls = self._form is not None
        shield = (lambda text: text) if self._allow_special_tokens else self._encoder.shield
        tools = {} if prompt.tools is None else {"tools": self._template_tools(prompt.tools, shield)}
        messages = [
            template_message(place, each, reads_calls, shield)
            | {"role": self._roles.get(each.role, each.role)}
            for place, each in enumerate(prompt.messages)
        ]
        arguments = effort_arguments(prompt.reasoning_effort) | shielded(prompt.template_kwargs, shield)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages,
                    chat_template=None,  # so that no client argument can set it
                    tokenize=False,
                    add_generation_prompt=True,
                    **tools,
                    **arguments,
                )
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as exc:
            message = f"the model's chat template refuses these messages: {exc}"
            raise NotServed(Reason.INVALID, message, "messages") from exc

    def _template_tools(self, tools: Tools, shield: Callable[[str], str]) -> list[dict[str, Any]]:
        """Return the tools as templates expect them. The gpt-oss template fails without a description."""
        offered = [shielded(each, shield) for each in tools.offered]
        if self._form is HARMONY:
            for each in offered:
                each["function"].setdefault("description", "")
        return offered

    def _check(self, param: str, ids: Sequence[int]) -> None:
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < self._vocab_size:
                message = f"token id {token} is not in the vocabulary of {self._vocab_size} tokens"
                raise NotServed(Reason.INVALID, message, param)


def prompt_chars(assign: Assign) -> int:
    """Return the number of characters to tokenize, without those of the chat template."""
    prompt, chars = assign.prompt, len(assign.resumed_text)
    if isinstance(prompt, ChatPrompt):
        messages = prompt.messages
        return chars + sum(len(m.content) + len(m.tool_calls_json) + len(m.reasoning) for m in messages)
    return chars + (len(prompt.text) if isinstance(prompt, TextPrompt) else 0)


def check_resumed_thought(assign: Assign, thinking: Thinking | None, *, in_channels: bool) -> None:
    """Raise NotServed if the reasoning in the delivered part of a resumed answer can't be determined."""
    thinks = thinking is not None or in_channels
    if assign.by_text and thinking is not None and thinking.opened:
        message = "the delivered text would be read as the model's thought: it cannot go on here"
    elif assign.resumed and thinks and assign.resumed_reasoning_chars is None:
        message = "the gateway does not say how much of the model's thought was delivered"
    else:
        return
    raise NotServed(Reason.UNSUPPORTED, message)


def _too_long(found: str, limit: int) -> NotServed:
    message = f"{found} but prompt and response together may have at most {limit} tokens here"
    return NotServed(Reason.CONTEXT_LENGTH, message, "prompt")


def _finish(work: Turns[T]) -> T:
    """Run all steps and return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def _or_refusal(assign: Assign, work: Turns[T]) -> Turns[T | NotServed]:
    """Return the result of `work`, or a NotServed for the exception that it raised."""
    try:
        return (yield from work)
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


def template_message(
    place: int, message: ChatMessage, reads_calls: bool, shield: Callable[[str], str]
) -> dict[str, Any]:
    """Convert a message to the form that templates expect. Empty optional fields are omitted.

    `reads_calls`: the template supports tool calls, with arguments as an object instead of JSON text.
    `shield`: applied to all fields but the role, which may be untrusted.
    """
    fields: dict[str, Any] = {"role": message.role, "content": shield(message.content)}
    if message.name:
        fields["name"] = shield(message.name)
    if message.tool_calls_json:
        calls = json.loads(message.tool_calls_json)
        read = (call_with_object(place, each) if reads_calls else each for each in calls)
        fields["tool_calls"] = [shielded(each, shield) for each in read]
    if message.tool_call_id:
        fields["tool_call_id"] = shield(message.tool_call_id)
    if message.reasoning:
        fields |= dict.fromkeys(("reasoning_content", "reasoning"), shield(message.reasoning))
        if not message.content:  # the gpt-oss template rejects it beside content
            fields["thinking"] = fields["reasoning"]
    return fields


def call_with_object(place: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
        json.dumps(arguments, ensure_ascii=False).encode()  # fails for a lone surrogate
    except (ValueError, TypeError) as exc:
        message = f"the arguments of {function.get('name')} are not JSON: {exc}"
        raise NotServed(Reason.INVALID, message, f"messages.{place}.tool_calls") from exc
    return {**call, "function": {**function, "arguments": arguments}}
