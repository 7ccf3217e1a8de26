"""Differences among servers of the OpenAI API: their metrics, and their fields beyond OpenAI's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from site_engine.remote.prometheus import MetricNames

_SAMPLING = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"})
_CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


class EffortStyle(Enum):
    """Where a server reads the effort of reasoning."""

    FIELD = "in OpenAI's field reasoning_effort, with OpenAI's values"
    FIELD_AND_SWITCH = "in that field, but for no reasoning in the switches of the template"
    TEMPLATE = "in the arguments of the template alone"


class Counting(Enum):
    """The ways in which servers count the tokens of a prompt."""

    TOKENIZE = "/tokenize reads a chat"
    TEMPLATE_FIRST = "/apply-template makes a text of a chat, which /tokenize reads"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server, recognized by `owned_by` of its models or by the prefix of its metrics."""

    name: str
    metric_names: MetricNames | None = None
    owners: Collection[str] = ()
    metric_prefix: str = ""
    extra_fields: frozenset[str] = frozenset()  # beyond OpenAI's, honoured under our names
    continuous_usage: bool = False  # stream_options.continuous_usage_stats: exact counts in every chunk
    logprobs: bool = False
    guided: bool = False  # honours response_format by a schema, and tools, rather than drop them silently
    template_kwargs: bool = False  # honours chat_template_kwargs
    effort: EffortStyle = EffortStyle.FIELD
    reasoning_names: tuple[str, ...] = ("reasoning_content",)  # of reasoning in earlier answers
    ranks_texts: bool = False  # POST /rerank with `texts`
    about_path: str = ""  # where the server says what its model can do
    continue_fields: Mapping[str, bool] | None = (
        None  # make it continue a chat's last message; None: it can't
    )
    counting: Counting | None = None
    drops: frozenset[str] = frozenset()  # OpenAI's fields that it takes and does not honour
    raw_text: bool = True  # reads the prompt of /v1/completions as it is, without a template
    refuses_excess: bool = False  # of `max_tokens` over what fits; a chat without them may be as long as fits
    omitted_defaults: frozenset[str] = frozenset()  # fields not sent at values that turn them off
    truncates: bool = False  # cuts a prompt to its context rather than refuse it
    alive_path: str = ""  # shows it alive, where it has no /health

    @property
    def features(self) -> tuple[str, ...]:
        """Features of its models, for Hello."""
        has = {
            "chat": True,
            "logprobs": self.logprobs,
            "tools": self.guided,
            "guided": self.guided,
            "template_kwargs": self.template_kwargs,
            "resume_text": self.raw_text,
            "resume_chat": self.continue_fields is not None,
            "count": self.counting is not None,
        }
        return tuple(name for name, is_there in has.items() if is_there)


VLLM = Dialect(
    name="vllm",
    refuses_excess=True,
    template_kwargs=True,
    effort=EffortStyle.FIELD_AND_SWITCH,
    reasoning_names=("reasoning", "reasoning_content"),  # of 0.16 and later, and of before
    owners=("vllm",),
    metric_prefix="vllm:",
    extra_fields=_SAMPLING,
    continuous_usage=True,
    logprobs=True,
    guided=True,
    continue_fields=_CONTINUE,
    counting=Counting.TOKENIZE,
    metric_names=MetricNames(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        generated=("vllm:generation_tokens_total",),
        capacity_of=("vllm:cache_config_info", ("block_size", "num_gpu_blocks")),
    ),
)
SGLANG = Dialect(
    name="sglang",
    refuses_excess=True,
    template_kwargs=True,
    effort=EffortStyle.FIELD_AND_SWITCH,
    owners=("sglang",),
    about_path="/get_model_info",
    metric_prefix="sglang:",
    extra_fields=_SAMPLING,
    continuous_usage=True,
    logprobs=True,
    guided=True,
    continue_fields=_CONTINUE,
    metric_names=MetricNames(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        usage=("sglang:token_usage",),
        # the second counts a request when it ends
        generated=('sglang:realtime_tokens_total{mode="decode"}', "sglang:generation_tokens_total"),
        capacity=("sglang:max_total_num_tokens",),
    ),
)
TGI = Dialect(
    name="tgi",
    # refuses a top_p of 1; makes a repetition penalty of 2 of a chat's presence penalty of 0
    omitted_defaults=frozenset({"top_p", "presence_penalty"}),
    drops=frozenset({"logit_bias", "n", "presence_penalty", "prompt of token ids"}),
    metric_prefix="tgi_",
    metric_names=MetricNames(
        running=("tgi_batch_current_size",),
        waiting=("tgi_queue_size",),
        generated=("tgi_request_generated_tokens_sum",),
    ),
)
LLAMA_CPP = Dialect(
    name="llama.cpp",
    template_kwargs=True,
    effort=EffortStyle.TEMPLATE,
    owners=("llamacpp",),
    about_path="/props",
    metric_prefix="llamacpp:",
    extra_fields=frozenset({"top_k", "min_p", "ignore_eos"}),
    guided=True,
    continue_fields={},  # by itself, wherever the last message is the assistant's
    counting=Counting.TEMPLATE_FIRST,
    metric_names=MetricNames(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        usage=("llamacpp:kv_cache_usage_ratio",),
        generated=("llamacpp:tokens_predicted_total",),
    ),
)
TEI = Dialect(name="text-embeddings-inference", metric_prefix="te_", about_path="/info", ranks_texts=True)
MICO = Dialect(
    name="mico",
    owners=("mico", "route"),  # a key may see names of routes alone
    extra_fields=_SAMPLING,
    logprobs=True,
    guided=True,
    template_kwargs=True,
)
OLLAMA = Dialect(
    name="ollama",
    owners=("library",),
    guided=True,
    drops=frozenset({"logit_bias", "n", "parallel_tool_calls", "prompt of token ids", "tool_choice"}),
    raw_text=False,
    truncates=True,
    alive_path="/api/version",
)
UNKNOWN = Dialect(name="unknown server")

DIALECTS = (VLLM, SGLANG, TGI, LLAMA_CPP, TEI, OLLAMA, MICO)


def recognize(owners: Collection[str], metrics: Collection[str]) -> Dialect:
    """Recognize a server by the metrics that it exports, else by the owner of its models, else as UNKNOWN."""
    for each in DIALECTS:
        if each.metric_prefix and any(name.startswith(each.metric_prefix) for name in metrics):
            return each
    return next((each for each in DIALECTS if set(each.owners) & set(owners)), UNKNOWN)
