"""Metric pages of four kinds of server become the same few numbers; a page that is none of them is named."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.remote.dialects import (
    DIALECTS,
    LLAMA_CPP,
    MICO,
    SGLANG,
    TGI,
    UNKNOWN,
    VLLM,
    Dialect,
    recognize,
)
from site_engine.remote.prometheus import (
    MAX_KV_TOKENS,
    MAX_REQUESTS,
    MAX_TOTAL,
    ServerLoad,
    UnknownMetrics,
    parse_metrics,
    server_load,
)
from tests.support import metric_pages

VLLM_PAGE = metric_pages.VLLM.replace("{running}", "3").replace("{waiting}", "2")


@pytest.mark.parametrize(
    ("page", "dialect", "expected"),
    [
        (VLLM_PAGE, VLLM, ServerLoad(3, 2, 0.25, 16_000, 250_000)),
        (metric_pages.SGLANG, SGLANG, ServerLoad(162, 2826, 0.28, 442_354, 7_557_572)),
        (metric_pages.TGI, TGI, ServerLoad(12, 3, None, None, 5120)),
        (metric_pages.LLAMA_CPP, LLAMA_CPP, ServerLoad(1, 4, None, None, 39_080)),
    ],
)
def test_a_page_says_how_busy_its_server_is(page: str, dialect: Dialect, expected: ServerLoad) -> None:
    found = parse_metrics(page)
    assert recognize((), found) is dialect
    assert dialect.metric_names is not None
    assert server_load(found, dialect.metric_names) == expected


def test_engines_of_one_server_add_up_and_their_shares_are_averaged() -> None:
    page = VLLM_PAGE + VLLM_PAGE.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    assert VLLM.metric_names is not None
    assert server_load(parse_metrics(page), VLLM.metric_names) == ServerLoad(6, 4, 0.5, 32_000, 500_000)


def test_requests_that_sglang_also_tells_by_priority_count_once() -> None:
    """With --enable-priority-scheduling the sum stands beside its parts, of each engine."""
    page = "".join(
        f'sglang:{name}{{dp_rank="{rank}",priority="{priority}"}} {value}\n'
        for name in ("num_running_reqs", "num_queue_reqs")
        for rank in (0, 1)
        for priority, value in (("", 5), ("0", 2), ("9", 3))
    )
    assert SGLANG.metric_names is not None
    load = server_load(parse_metrics(page), SGLANG.metric_names)
    assert (load.running, load.waiting) == (10, 10)


def test_what_each_rank_of_sglang_tells_of_the_same_requests_counts_once() -> None:
    """Every rank tells its room for tokens, and the rest, too, with --enable-metrics-for-all-schedulers."""
    figures = {"num_running_reqs": 3, "num_queue_reqs": 2, "max_total_num_tokens": 1_000, "token_usage": 0.5}
    page = "".join(
        f'sglang:{name}{{dp_rank="{tp // 2}",moe_ep_rank="{tp}",pp_rank="{pp}",tp_rank="{tp}"}} {value}\n'
        for name, value in figures.items()
        for pp in (0, 1)
        for tp in (0, 1, 2, 3)
    )
    assert SGLANG.metric_names is not None
    assert server_load(parse_metrics(page), SGLANG.metric_names) == ServerLoad(6, 4, 0.5, 2_000)


def test_tokens_that_sglang_tells_while_it_generates_go_before_those_of_ended_requests() -> None:
    page = metric_pages.SGLANG + "".join(
        f'sglang:realtime_tokens_total{{mode="{mode}",tp_rank="0"}} {tokens}\n'
        for mode, tokens in (("prefill_compute", 900), ("prefill_cache", 90), ("decode", 12))
    )
    assert SGLANG.metric_names is not None
    assert server_load(parse_metrics(page), SGLANG.metric_names).tokens_total == 12


def test_older_names_count_where_the_newer_are_missing() -> None:
    assert VLLM.metric_names is not None
    older = VLLM_PAGE.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert server_load(parse_metrics(older), VLLM.metric_names).kv_usage == 0.25


def test_a_capacity_that_is_not_known_yet_is_none() -> None:
    assert VLLM.metric_names is not None
    page = VLLM_PAGE.replace('num_gpu_blocks="1000"', 'num_gpu_blocks="None"')
    assert server_load(parse_metrics(page), VLLM.metric_names).kv_capacity_tokens is None


def test_a_page_without_the_metric_that_counts_is_refused_by_name() -> None:
    assert SGLANG.metric_names is not None
    with pytest.raises(UnknownMetrics, match="sglang:num_running_reqs"):
        server_load(parse_metrics(metric_pages.SOMEBODY), SGLANG.metric_names)


def test_a_server_without_known_metrics_is_recognized_by_its_models() -> None:
    page = parse_metrics(metric_pages.SOMEBODY)
    assert recognize({"vllm"}, page) is VLLM
    assert recognize({"mico"}, page) is MICO
    assert recognize({"route"}, page) is MICO, "a gateway whose routes have the names of its models"
    assert recognize({"library"}, page).name == "ollama"
    assert recognize({"somebody"}, page) is UNKNOWN


def test_labels_may_hold_what_looks_like_the_end_of_a_line() -> None:
    (sample,) = parse_metrics('a:b{x="} 7",y="say \\"hi\\", {you}"} 1e3 1700000000000')["a:b"]
    assert (sample.value, sample.labels["x"]) == (1000.0, "} 7")


NUMBERS = st.one_of(
    st.floats().map(str), st.integers().map(str), st.just("9" * 5_000), st.just("1e308"), st.text(max_size=9)
)


@given(st.data())
def test_no_page_breaks_the_reader(data: st.DataObject) -> None:
    """A server that claims a billion requests must not cost the memory of as many."""
    dialect = data.draw(st.sampled_from([each for each in DIALECTS if each.metric_names is not None]))
    names = dialect.metric_names
    assert names is not None
    known = [*names.running, *names.waiting, *names.usage, *names.generated, *names.capacity]
    lines = [f"{each} {data.draw(NUMBERS)}" for each in data.draw(st.lists(st.sampled_from(known)))]
    if names.capacity_of is not None:
        labels = ",".join(f'{label}="{data.draw(NUMBERS)}"' for label in names.capacity_of[1])
        lines.append(f"{names.capacity_of[0]}{{{labels}}} 1")
    found = server_load(parse_metrics("\n".join([f"{names.running[0]} 3", *lines])), names)
    assert 0 <= found.running <= MAX_REQUESTS
    assert 0 <= (found.waiting or 0) <= MAX_REQUESTS
    assert 0 <= (found.kv_capacity_tokens or 0) <= MAX_KV_TOKENS
    assert 0 <= (found.kv_usage or 0.0) <= 1.0
    assert 0 <= (found.tokens_total or 0) <= MAX_TOTAL


@given(st.text())
def test_a_page_that_is_no_page_is_unknown_or_read(page: str) -> None:
    for dialect in DIALECTS:
        if dialect.metric_names is not None:
            with suppress(UnknownMetrics):
                assert server_load(parse_metrics(page), dialect.metric_names).running >= 0
