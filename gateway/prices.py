"""Price the tokens of a site, in whole nano-dollars. Pure.

A provider's site has prices per token. For a site that is paid by the hour, idle or not, prices per token are
computed from its measurements: a token costs its share of the time of a site whose slots are all busy. So the
price of an answer does not depend on concurrent requests, and tokens never cost more than the hours in which
the site generated them; the remaining cost is idle time. docs/decisions/own-site-prices.md compares other
rules.
"""

from __future__ import annotations

import msgspec

from gateway.domain import LoadReport, SiteIdentity

SECONDS_AN_HOUR = 3_600.0
MTOK = 1e6
NANO_USD = 1e9
"""Nano-dollars per dollar."""
ATTO_USD_PER_TOKEN = 1e12
"""The atto-dollars (1e-18 dollars) per token in one dollar per million tokens. Prices are rounded to these.
"""
ATTO_PER_NANO = 10**9
MAX_NANO_USD = 10**15
"""The limit of the cost of one attempt: a million dollars. Sums of such costs fit a database's integers."""


class Prices(msgspec.Struct, frozen=True):
    """Prices in dollars per million tokens. `context_usd_per_mtok` is for the context tokens that output
    tokens read: each output token reads the prompt and the output before it.
    """

    input_usd_per_mtok: float = 0.0
    cached_usd_per_mtok: float = 0.0
    output_usd_per_mtok: float = 0.0
    context_usd_per_mtok: float = 0.0

    def nano_usd(
        self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, choices: int = 1
    ) -> int:
        """Return the cost of an attempt in nano-dollars, MAX_NANO_USD at most. `cached_tokens`: the cached
        part of the prompt. `completion_tokens`: the sum of all choices, which are assumed to be equally long.
        """
        if self == FREE:
            return 0
        cached_tokens = min(cached_tokens, prompt_tokens)
        context_tokens = completion_tokens * (2 * prompt_tokens + completion_tokens // choices) // 2
        atto_usd = (
            (prompt_tokens - cached_tokens) * _atto_usd(self.input_usd_per_mtok)
            + cached_tokens * _atto_usd(self.cached_usd_per_mtok)
            + completion_tokens * _atto_usd(self.output_usd_per_mtok)
            + context_tokens * _atto_usd(self.context_usd_per_mtok)
        )
        return min(MAX_NANO_USD, (atto_usd + ATTO_PER_NANO // 2) // ATTO_PER_NANO)


FREE = Prices()


def prices_of(identity: SiteIdentity, load: LoadReport) -> Prices:
    """Return the prices of a site. For a site paid by the hour they are 0 until it has measured its speed."""
    if identity.usd_per_hour == 0.0:
        cached, per_input = identity.cached_usd_per_mtok, identity.input_usd_per_mtok
        return Prices(per_input, per_input if cached is None else cached, identity.output_usd_per_mtok)
    cost, slots = load.iteration, max(1, identity.slots)
    output_s = cost.base_s / slots + cost.per_row_s + cost.per_token_s
    usd = identity.usd_per_hour / SECONDS_AN_HOUR * MTOK
    return Prices(
        usd * cost.per_token_s,
        0.0,
        usd * (output_s or load.seconds_per_iteration / slots),
        usd * cost.per_kv_token_s,
    )


def dollars(nano_usd: int) -> str:
    """Format an amount for people: to the cent, or to two significant digits below ten cents."""
    sign, usd = "-" if nano_usd < 0 else "", abs(nano_usd) / NANO_USD
    is_small = 0.0 < usd < 0.0995  # from here on, two digits round to ten cents
    return f"{sign}$" + (f"{float(f'{usd:.2g}'):.9f}".rstrip("0") if is_small else f"{usd:,.2f}")


def decimal_usd(nano_usd: int) -> str:
    """Format an amount in dollars for programs, exactly."""
    whole, rest = divmod(nano_usd, 10**9)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".")


def _atto_usd(usd_per_mtok: float) -> int:
    return round(usd_per_mtok * ATTO_USD_PER_TOKEN)
