"""Prices of tokens: exact sums, old sites, and sites that are paid by the hour."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import IterationCost, LoadReport, SiteIdentity
from gateway.federation import codec
from gateway.prices import MAX_NANO_USD, Prices, dollars, prices_of
from site_engine.config import SiteConfig
from site_engine.errors import ConfigError
from wire import federation_pb2 as pb

TOKENS = st.integers(0, 10**7)
CENTS_PER_MTOK = st.integers(0, 10**5)


def hello(**prices: float) -> SiteIdentity:
    model = pb.Model(id="demo", context_tokens=100)
    message = pb.Hello(protocol=1, site="a", models=[model], slots=4, kv_capacity_tokens=100, **prices)  # type: ignore[arg-type]
    return codec.identity(pb.Hello.FromString(message.SerializeToString()))


@given(tokens=st.tuples(TOKENS, TOKENS, TOKENS), cents=st.tuples(*[CENTS_PER_MTOK] * 3))
def test_a_cost_is_exact_to_half_a_nano_dollar(
    tokens: tuple[int, int, int], cents: tuple[int, int, int]
) -> None:
    prompt, cached, completion = max(tokens[:2]), min(tokens[:2]), tokens[2]
    prices = Prices(*[each / 100 for each in cents])
    exact = sum(
        Fraction(count * price * 10, 1)  # a cent per million tokens is 10 nano-dollars per token
        for count, price in zip((prompt - cached, cached, completion), cents, strict=True)
    )
    assert prices.nano_usd(prompt, cached, completion) == min(MAX_NANO_USD, exact)


def test_prices_below_a_nano_dollar_a_token_are_not_lost() -> None:
    assert Prices(input_usd_per_mtok=0.00025).nano_usd(1_000_000, 0, 0) == 250_000
    assert Prices(input_usd_per_mtok=0.00025).nano_usd(1, 0, 0) == 0


def test_an_absurd_price_fits_a_column_of_the_database() -> None:
    assert Prices(1e12, 1e12, 1e12, 1e12).nano_usd(2**32, 2**31, 2**32) == MAX_NANO_USD < 2**53


def test_amounts_are_shown_to_the_cent_small_ones_to_two_figures_and_a_sign_before_the_dollar() -> None:
    shown = {0: "$0.00", 5: "$0.000000005", 99_960_000: "$0.10", 12_500_000_000: "$12.50"}
    assert {amount: dollars(amount) for amount in shown} == shown
    assert (dollars(-5_000_000_000), dollars(-1_234_000)) == ("-$5.00", "-$0.0012")


def test_cached_input_of_a_site_that_does_not_price_it_costs_as_any_other() -> None:
    load = LoadReport(seq=1, received_s=0.0)
    assert prices_of(hello(input_usd_per_mtok=2.0), load).cached_usd_per_mtok == 2.0
    priced = hello(input_usd_per_mtok=2.0, cached_usd_per_mtok=0.0)
    assert prices_of(priced, load).cached_usd_per_mtok == 0.0
    assert prices_of(priced, load).nano_usd(10, 10, 0) == 0


def test_a_token_of_an_own_site_costs_its_time_on_the_full_site() -> None:
    identity = hello(usd_per_hour=3.6)  # a dollar for 1,000 seconds
    cost = IterationCost(base_s=0.004, per_row_s=0.001, per_token_s=0.002, per_kv_token_s=1e-6)
    prices = prices_of(identity, LoadReport(seq=1, received_s=0.0, iteration=cost))
    assert prices.input_usd_per_mtok == pytest.approx(2.0)
    assert prices.cached_usd_per_mtok == 0.0
    assert prices.output_usd_per_mtok == pytest.approx(4.0)  # a quarter of the base, a row, a token
    assert prices.context_usd_per_mtok == pytest.approx(0.001)
    assert prices.nano_usd(100, 0, 10) == pytest.approx(200_000 + 40_000 + 10 * 105, abs=1)


def test_an_own_site_without_a_fit_is_priced_by_its_iterations_and_one_without_any_is_free() -> None:
    identity = hello(usd_per_hour=3.6)
    unfitted = LoadReport(seq=1, received_s=0.0, seconds_per_iteration=0.004)
    assert prices_of(identity, unfitted).output_usd_per_mtok == pytest.approx(1.0)
    assert prices_of(identity, LoadReport(seq=1, received_s=0.0)) == Prices()


def test_a_site_is_paid_by_tokens_or_by_the_hour() -> None:
    site = {"site": "a", "gateways": ("g:1",), "model": "m"}
    assert SiteConfig(**site, usd_per_hour=2.5).cached_usd_per_mtok is None  # type: ignore[arg-type]
    for wrong in (
        {"usd_per_hour": -1.0},
        {"cached_usd_per_mtok": float("nan")},
        {"usd_per_hour": 1.0, "output_usd_per_mtok": 1.0},
    ):
        with pytest.raises(ConfigError, match="usd_per"):
            SiteConfig(**site, **wrong)  # type: ignore[arg-type]
