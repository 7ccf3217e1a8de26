"""Price the tokens of a site, in whole nano-dollars. Pure.

A provider's site has prices per token. A site that is paid by the hour, idle or not, has them from its own
measurements: a token costs the time that it would take of a site whose slots are all busy. So the price of
an answer does not depend on its neighbours, tokens never cost more than the hours in which a site answered
them, and the rest of the hours was idle. docs/decisions/own-site-prices.md compares other rules.
"""

from __future__ import annotations

import msgspec

from gateway.domain import LoadReport, SiteIdentity

SECONDS_AN_HOUR = 3_600.0
MTOK = 1e6
NANO_USD = 1e9
"""Nano-dollars in a dollar."""
ATTO_USD_PER_TOKEN = 1e12
"""Units of 1e-18 dollars for each token in one dollar per million tokens: prices are rounded to them."""
ATTO_PER_NANO = 10**9
MAX_NANO_USD = 10**15
"""Bound of what one attempt may be said to cost: a million dollars. Sums of it fit a database's integers."""


class Prices(msgspec.Struct, frozen=True):
    """Dollars per million tokens. `context_usd_per_mtok` is for tokens of context that output tokens read:
    each output token reads the prompt and the output before it.
    """

    input_usd_per_mtok: float = 0.0
    cached_usd_per_mtok: float = 0.0
    output_usd_per_mtok: float = 0.0
    context_usd_per_mtok: float = 0.0

    def nano_usd(
        self, prompt_tokens: int, cached_tokens: int, completion_tokens: int, choices: int = 1
    ) -> int:
        """Return the cost of an attempt. `cached_tokens` is the part of the prompt that the site had;
        `completion_tokens` sums all choices, taken as equally long.
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
    """Return the prices of a site. One that is paid by the hour has none before it has measured itself."""
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
    """Render an amount for people: to the cent, a small one to two figures."""
    sign, usd = "-" if nano_usd < 0 else "", abs(nano_usd) / NANO_USD
    is_small = 0.0 < usd < 0.0995  # what is rounded to ten cents has cents
    return f"{sign}$" + (f"{float(f'{usd:.2g}'):.9f}".rstrip("0") if is_small else f"{usd:,.2f}")


def decimal_usd(nano_usd: int) -> str:
    """Render an amount in dollars for programs, exactly."""
    whole, rest = divmod(nano_usd, 10**9)
    return f"{whole}.{rest:09d}".rstrip("0").rstrip(".")


def _atto_usd(usd_per_mtok: float) -> int:
    return round(usd_per_mtok * ATTO_USD_PER_TOKEN)
