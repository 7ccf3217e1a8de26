"""How servers of the OpenAI kind differ: what they export, and what they take beyond OpenAI's fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from site_engine.remote.prometheus import Names

_SAMPLING = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"})
_CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


@dataclass(frozen=True, slots=True)
class Dialect:
    """`owners` and `prefix` recognize it: by `owned_by` of its models, or by the names of its metrics."""

    name: str
    names: Names | None = None
    owners: Collection[str] = ()
    prefix: str = ""
    extras: frozenset[str] = frozenset()  # fields of ours that it honours under the same name
    counts_on: bool = False  # stream_options.continuous_usage_stats: exact counts in every chunk
    logprobs: bool = False
    guides: bool = False  # response_format by a schema, and tools: known not to be dropped silently
    continues: Mapping[str, bool] | None = None  # what to ask so that a chat's last message is continued

    @property
    def features(self) -> tuple[str, ...]:
        """What Hello says of its models."""
        has = {
            "chat": True,
            "logprobs": self.logprobs,
            "tools": self.guides,
            "guided": self.guides,
            "resume_text": True,
            "resume_chat": self.continues is not None,
        }
        return tuple(name for name, is_there in has.items() if is_there)


VLLM = Dialect(
    name="vllm",
    owners=("vllm",),
    prefix="vllm:",
    extras=_SAMPLING,
    counts_on=True,
    logprobs=True,
    guides=True,
    continues=_CONTINUE,
    names=Names(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        generated=("vllm:generation_tokens_total",),
        prompted=("vllm:prompt_tokens_total",),
        capacity_of=("vllm:cache_config_info", ("block_size", "num_gpu_blocks")),
    ),
)
SGLANG = Dialect(
    name="sglang",
    owners=("sglang",),
    prefix="sglang:",
    extras=_SAMPLING,
    counts_on=True,
    logprobs=True,
    guides=True,
    continues=_CONTINUE,
    names=Names(
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        usage=("sglang:token_usage",),
        generated=("sglang:generation_tokens_total",),
        prompted=("sglang:prompt_tokens_total",),
        capacity=("sglang:max_total_num_tokens",),
    ),
)
TGI = Dialect(
    name="tgi",
    prefix="tgi_",
    names=Names(
        running=("tgi_batch_current_size",),
        waiting=("tgi_queue_size",),
        generated=("tgi_request_generated_tokens_sum",),
        prompted=("tgi_request_input_length_sum",),
    ),
)
LLAMA_CPP = Dialect(
    name="llama.cpp",
    owners=("llamacpp",),
    prefix="llamacpp:",
    extras=frozenset({"top_k", "min_p", "ignore_eos"}),
    guides=True,
    continues={},  # by itself, wherever the last message is the assistant's
    names=Names(
        running=("llamacpp:requests_processing",),
        waiting=("llamacpp:requests_deferred",),
        usage=("llamacpp:kv_cache_usage_ratio",),
        generated=("llamacpp:tokens_predicted_total",),
        prompted=("llamacpp:prompt_tokens_total",),
    ),
)
MICO = Dialect(name="mico", owners=("mico",), extras=_SAMPLING, logprobs=True, guides=True)
UNKNOWN = Dialect(name="unknown server")

ALL = (VLLM, SGLANG, TGI, LLAMA_CPP, MICO)


def recognized(owners: Collection[str], metrics: Collection[str]) -> Dialect:
    """By the metrics that it exports, else by who owns its models, else UNKNOWN."""
    for each in ALL:
        if each.prefix and any(name.startswith(each.prefix) for name in metrics):
            return each
    return next((each for each in ALL if set(each.owners) & set(owners)), UNKNOWN)
