"""Specification of a simulated site: region, slots, KV, price, and the cost of an iteration."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from gateway.domain import IterationCost
from mico.errors import CommandFailed, ExitCode

MODEL = "simulated"
REFERENCE = IterationCost(base_s=0.015, per_row_s=0.0002, per_token_s=0.00003, per_kv_token_s=2e-8)
"""Roughly 8 billion parameters on a data-centre GPU: 20 ms for 16 rows, 30,000 prompt tokens a second."""
KV_TOKENS_PER_SLOT = 16_384
PROMPT_PRICE = 0.25
"""Price of a prompt token as a share of that of a response token."""


@dataclass(frozen=True, slots=True)
class SiteSpec:
    name: str
    slots: int
    cost: IterationCost
    rtt_s: float
    kv_tokens: int
    usd_per_mtok: float = 0.0  # of response tokens
    region: str = ""  # empty: its own
    rtts_s: tuple[float, ...] = ()  # one for each gateway; empty: `rtt_s` for all
    is_spare: bool = False  # a machine that is not started yet
    trains_between_s: float = 0.0  # training fills the time between tokens up to this; 0: it does not train

    def seen_by(self, gateway: int) -> SiteSpec:
        """Return the specification with the round trip of one gateway."""
        return replace(self, rtt_s=self.rtts_s[gateway]) if self.rtts_s else self

    @staticmethod
    def of(name: str, slots: int, slowdown: float, rtt_s: float, kv_tokens: int = 0) -> SiteSpec:
        """Return a site that takes `slowdown` times as long as the reference for everything."""
        cost = IterationCost(
            REFERENCE.base_s * slowdown,
            REFERENCE.per_row_s * slowdown,
            REFERENCE.per_token_s * slowdown,
            REFERENCE.per_kv_token_s * slowdown,
        )
        return SiteSpec(name, slots, cost, rtt_s, kv_tokens or slots * KV_TOKENS_PER_SLOT)


UNEQUAL_SITES = (
    (16, 1.0, 0.005),
    (8, 1.7, 0.080),
    (32, 2.2, 0.250),
    (8, 1.0, 0.020),
    (24, 1.3, 0.120),
    (16, 3.0, 0.040),
    (32, 1.0, 0.160),
    (12, 1.5, 0.010),
    (16, 2.0, 0.200),
)
"""(slots, slowdown, round trip in seconds), which `--sites N` takes in turn."""

NUMBER = r"(?:\d{1,9}(?:\.\d{0,9})?|\.\d{1,9})"
SITES = re.compile(r"0*[1-9]\d{0,3}", re.ASCII)
GROUP = re.compile(
    rf"(?P<count>\d{{1,4}})x(?P<slots>\d{{1,6}})(@(?P<slower>{NUMBER}))?"
    rf"(~(?P<rtts_ms>{NUMBER}(\+{NUMBER})*))?(/(?P<kv>\d{{1,12}}))?"
    rf"(:(?P<usd>{NUMBER}))?(=(?P<region>[\w-]+))?",
    re.ASCII,
)


def sites_of(text: str) -> list[SiteSpec]:
    """Parse a description of sites. Raises CommandFailed.

    `9`: nine unequal sites. `2x16@1.0~5,1x32@2.2~250/100000:0.6=eu`: groups of COUNTxSLOTS, slowdown against
    the reference, round trip in ms, KV tokens, USD per million response tokens, region; all but the first two
    may be left out. `~5+250` are the round trips of two gateways.
    """
    if SITES.fullmatch(text):
        specs = [SiteSpec.of("", *UNEQUAL_SITES[i % len(UNEQUAL_SITES)]) for i in range(int(text))]
    else:
        specs = [spec for part in text.split(",") for spec in _group(part.strip())]
    return [replace(spec, name=f"s{i:04d}") for i, spec in enumerate(specs)]


def _group(text: str) -> list[SiteSpec]:
    found = GROUP.fullmatch(text)
    if found is None or not int(found["count"]) * int(found["slots"]) * float(found["slower"] or 1):
        raise CommandFailed(
            f"{text!r} is no group of sites",
            cause="expected a number of sites, at most 9999, or "
            "COUNTxSLOTS[@TIMES_SLOWER][~RTT_MS[+RTT_MS…]][/KV_TOKENS][:USD_PER_MTOK][=REGION],…",
            tip="for example --sites 9, or --sites 2x16@1.0~5,1x32@2.2~250",
            exit_code=ExitCode.WRONG_USAGE,
        )
    slowdown = float(found["slower"] or 1)
    first, *others = rtts_s = tuple(float(rtt_ms) / 1000 for rtt_ms in (found["rtts_ms"] or "20").split("+"))
    spec = SiteSpec.of("", int(found["slots"]), slowdown, first, int(found["kv"] or 0))
    spec = replace(spec, usd_per_mtok=float(found["usd"] or 0), region=found["region"] or "")
    spec = replace(spec, rtts_s=rtts_s if others else ())
    return [spec] * int(found["count"])


def capacity_qps(sites: list[SiteSpec], prompt_tokens: float, response_tokens: float) -> float:
    """Return the queries per second of this mean size that the sites can serve with every row in use.

    A query takes of a site's time a row's share of the fixed part in each of its iterations, its own tokens
    and reads of KV, and its prefill.
    """
    total = 0.0
    context_tokens = prompt_tokens + response_tokens / 2
    for site in sites:
        rows = max(1.0, min(site.slots, site.kv_tokens / (prompt_tokens + response_tokens)))
        cost = site.cost
        each = cost.base_s / rows + cost.per_row_s + cost.per_token_s + cost.per_kv_token_s * context_tokens
        total += 1 / (each * response_tokens + cost.per_token_s * prompt_tokens)
    return total
