"""Metric pages of four kinds of server become the same few numbers; a page that is none of them is named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine.remote.dialects import ALL, LLAMA_CPP, MICO, SGLANG, TGI, UNKNOWN, VLLM, Dialect, recognized
from site_engine.remote.prometheus import Busy, UnknownPage, busy, samples
from tests.support import metric_pages

VLLM_PAGE = metric_pages.VLLM.replace("{running}", "3").replace("{waiting}", "2")


@pytest.mark.parametrize(
    ("page", "dialect", "expected"),
    [
        (VLLM_PAGE, VLLM, Busy(3, 2, 0.25, 16_000, 250_000, 1_800_000)),
        (metric_pages.SGLANG, SGLANG, Busy(162, 2826, 0.28, 442_354, 7_557_572, 8_128_902)),
        (metric_pages.TGI, TGI, Busy(12, 3, None, None, 5120, None)),
        (metric_pages.LLAMA_CPP, LLAMA_CPP, Busy(1, 4, None, None, 39_080, 512)),
    ],
)
def test_a_page_says_how_busy_its_server_is(page: str, dialect: Dialect, expected: Busy) -> None:
    found = samples(page)
    assert recognized((), found) is dialect
    assert dialect.names is not None
    assert busy(found, dialect.names) == expected


def test_engines_of_one_server_add_up_and_their_shares_are_averaged() -> None:
    page = VLLM_PAGE + VLLM_PAGE.replace('engine="0"', 'engine="1"').replace("} 0.25", "} 0.75")
    assert VLLM.names is not None
    assert busy(samples(page), VLLM.names) == Busy(6, 4, 0.5, 32_000, 500_000, 3_600_000)


def test_older_names_count_where_the_newer_are_missing() -> None:
    assert VLLM.names is not None
    older = VLLM_PAGE.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    assert busy(samples(older), VLLM.names).kv_usage == 0.25


def test_a_capacity_that_is_not_known_yet_is_none() -> None:
    assert VLLM.names is not None
    page = VLLM_PAGE.replace('num_gpu_blocks="1000"', 'num_gpu_blocks="None"')
    assert busy(samples(page), VLLM.names).kv_capacity_tokens is None


def test_a_page_without_the_metric_that_counts_is_refused_by_name() -> None:
    assert SGLANG.names is not None
    with pytest.raises(UnknownPage, match="sglang:num_running_reqs"):
        busy(samples(metric_pages.SOMEBODY), SGLANG.names)


def test_a_server_without_known_metrics_is_recognized_by_its_models() -> None:
    page = samples(metric_pages.SOMEBODY)
    assert recognized({"vllm"}, page) is VLLM
    assert recognized({"mico"}, page) is MICO
    assert recognized({"library"}, page) is UNKNOWN


def test_labels_may_hold_what_looks_like_the_end_of_a_line() -> None:
    (sample,) = samples('a:b{x="} 7",y="say \\"hi\\", {you}"} 1e3 1700000000000')["a:b"]
    assert (sample.value, sample.labels["x"]) == (1000.0, "} 7")


@given(st.text())
def test_no_page_breaks_the_reader(page: str) -> None:
    for dialect in ALL:
        if dialect.names is not None:
            try:
                found = busy(samples(page), dialect.names)
            except UnknownPage:
                continue
            assert found.running >= 0
