"""The sites as columns of numbers, updated one site at a time, so that a decision over a thousand sites takes
a few dozen vector operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf, sqrt
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from gateway.domain import Credit, Model, ModelState, Site, SiteState
from gateway.prices import MTOK, prices_of

Numbers = NDArray[np.float64]
T = TypeVar("T")

UNKNOWN_SECONDS_PER_TOKEN = 0.05
"""Assumed for sites without measurements, which differ only in price until their first answers."""
REMAINING_VALUES = 64
"""The largest number of remaining lengths in a report."""
PROMPT_TOKEN_WORK = 0.02
"""The work of a prompt token relative to a response token, by which a site orders its queue."""
ALL_AHEAD = 1e9
"""The value of `per_pending_size` at which all pending requests start before the demand, of whatever size."""
NO_MODELS: Mapping[str, Model] = MappingProxyType({})
MAX_CACHED = 1_000
"""The number of cached masks of serving sites, one per kind of demand. Each costs a pass over all sites."""


class FiguresOf(NamedTuple, Generic[T]):
    """The inputs of a decision. Assignments since the report count as pending."""

    quiet_until_s: T  # time of the last report plus its `quiet_s`; -inf: the site takes no work
    received_s: T  # time of the last report
    slots: T
    running: T  # running requests
    requests: T  # running and pending requests
    crowding: T  # `_crowding` of the requests per slot
    iteration_s: T  # with one more row
    prefill_s: T  # of pending and unfinished prompts, with the round trip and one iteration
    running_tokens: T  # tokens that running requests are still expected to generate
    pending_tokens: T  # tokens that pending requests are expected to generate
    pending_kv_tokens: T  # `pending_tokens` plus the prompt tokens of the pending requests
    per_pending_size: T  # 1 / mean size of the pending requests; ALL_AHEAD: all start before the demand
    too_many: T  # requests that must end before one more has a slot; 0 or less: a slot is free
    per_remaining: T  # requests per value of `remaining`
    kv_room_tokens: T  # KV tokens not used, reserved or needed by pending requests; may be negative
    kv_each_tokens: T  # KV tokens that a request frees when it ends
    per_token_s: T
    all_slots_per_token_s: T  # delay of the requests in all slots together, per prompt token
    per_kv_token_s: T
    token_load: T
    weight: T
    input_usd_per_token: T
    cached_discount_usd_per_token: T
    output_usd_per_token: T
    context_usd_per_token: T  # per context token that an output token reads


Figures = FiguresOf[Numbers]
"""The figures of all sites, each `[sites]`."""


def least(values: Numbers) -> float:
    """Return the least value of a vector, inf if it is empty. (`values.min()` takes four times as long.)"""
    return float(values.item(int(values.argmin()))) if len(values) else inf


def most(values: Numbers) -> float:
    """Return the greatest value of a vector, -inf if it is empty."""
    return float(values.item(int(values.argmax()))) if len(values) else -inf


def size(prompt_tokens: float, response_tokens: float) -> float:
    """Return the size by which a site orders its queue: the geometric mean of the response tokens and of the
    work, that is, the response tokens plus the weighted prompt tokens.
    """
    length = max(1.0, response_tokens)
    return sqrt(length * (length + PROMPT_TOKEN_WORK * prompt_tokens))


def figures(site: Site, credit: Credit, known_ahead: float | None = None) -> FiguresOf[float]:
    """Return the figures of one site. `credit` counts as pending, in addition to the report.

    `known_ahead`: the share of the pending requests that starts before the demand, None if unknown.
    """
    share_ahead = 1.0 if known_ahead is None else known_ahead
    load, identity, cost = site.load, site.identity, site.load.iteration
    prices = prices_of(identity, load)
    pending = (load.pending + credit.requests) * share_ahead
    prompt_tokens = (load.pending_prompt_tokens + credit.prompt_tokens) * share_ahead
    response_tokens = (load.pending_response_tokens + credit.response_tokens) * share_ahead
    slots, requests = max(1, identity.slots), load.running + pending
    memory = kv_tokens(site)
    rows, used = min(slots, requests + 1), max(0, memory - load.kv_free_tokens)
    fitted_s = cost.seconds(rows, rows, used)
    iteration_s = fitted_s or load.seconds_per_iteration or UNKNOWN_SECONDS_PER_TOKEN
    iteration_s += load.training_s_per_iteration
    occupied = used + load.kv_reserved_tokens
    begun_tokens = max(0, load.unread_tokens - load.running)  # prompt tokens beyond one per request
    room = memory - occupied - prompt_tokens - response_tokens
    return FiguresOf(
        quiet_until_s=load.received_s + load.quiet_s
        if site.state is SiteState.READY and site.weight > 0
        else -inf,
        received_s=load.received_s,
        slots=slots,
        running=load.running,
        requests=requests,
        crowding=_crowding(requests / slots),
        iteration_s=iteration_s,
        prefill_s=site.rtt_s + iteration_s + cost.per_token_s * (begun_tokens + prompt_tokens),
        running_tokens=sum(load.running_remaining) * load.running_weight,
        pending_tokens=response_tokens,
        pending_kv_tokens=prompt_tokens + response_tokens,
        per_pending_size=pending / size(prompt_tokens, response_tokens) if known_ahead is None else ALL_AHEAD,
        too_many=requests + 1 - slots,
        per_remaining=load.running_weight,
        kv_room_tokens=room if memory > 0 else inf,
        kv_each_tokens=max(1.0, occupied / max(1, load.running)),
        per_token_s=cost.per_token_s,
        all_slots_per_token_s=slots * cost.per_token_s,
        per_kv_token_s=cost.per_kv_token_s,
        token_load=load.token_load + credit.prompt_tokens + credit.response_tokens,
        weight=max(site.weight, 1e-9),
        input_usd_per_token=prices.input_usd_per_mtok / MTOK,
        cached_discount_usd_per_token=(prices.input_usd_per_mtok - prices.cached_usd_per_mtok) / MTOK,
        output_usd_per_token=prices.output_usd_per_mtok / MTOK,
        context_usd_per_token=prices.context_usd_per_mtok / MTOK,
    )


def kv_tokens(site: Site) -> int:
    """Return the tokens for which a site has KV memory now, 0 if unknown."""
    return site.identity.kv_capacity_tokens + site.load.kv_extra_tokens


def _crowding(per_slot: float) -> float:
    """Return the square of the requests per slot while slots are free, so that sites fill up evenly, and a
    linear function beyond, where each further request delays those that wait.
    """
    return per_slot * per_slot if per_slot < 1.0 else 2.0 * per_slot - 1.0


def remaining_row(site: Site) -> Numbers:
    """Return the predicted remaining lengths of running requests `[REMAINING_VALUES]`, ascending, padded with
    the last value.
    """
    row = np.empty(REMAINING_VALUES)
    _write_remaining(row, site)
    return row


def _write_remaining(row: Numbers, site: Site) -> None:
    values = site.load.running_remaining[:REMAINING_VALUES]
    row[: len(values)] = values
    row[len(values) :] = values[-1] if values else 0.0


class Fleet:
    """The sites with their figures. `sites[i]` is column `i` of `figures` and row `i` of `remaining`.

    Columns are computed lazily, on read, as a site changes several times between two decisions.
    """

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._places: dict[str, int] = {}
        self._values = np.zeros((len(Figures._fields), 8))
        self._remaining = np.zeros((8, REMAINING_VALUES))
        self._outdated: set[int] = set()  # columns of sites that changed since they were computed
        self._figures: Figures | None = None  # views of `_values`; rebuilt after a site joins or leaves
        self._serving: dict[tuple[str, frozenset[str], frozenset[str] | None], NDArray[np.bool_]] = {}
        self._asleep: dict[str, dict[str, Model]] = {}  # by model: where it sleeps or wakes

    @staticmethod
    def of(sites: Iterable[Site]) -> Fleet:
        fleet = Fleet()
        for site in sites:
            fleet.put(site)
        return fleet

    @property
    def figures(self) -> Figures:
        for place in self._outdated:
            site = self.sites[place]
            self._values[:, place] = figures(site, site.credit)
        self._outdated.clear()
        if self._figures is None:
            self._figures = Figures(*self._values[:, : len(self.sites)])
        return self._figures

    @property
    def remaining(self) -> Numbers:
        return self._remaining[: len(self.sites)]

    def place(self, name: str) -> int | None:
        return self._places.get(name)

    def site(self, name: str) -> Site | None:
        place = self._places.get(name)
        return self.sites[place] if place is not None else None

    def put(self, site: Site) -> None:
        """Add or update a site."""
        place = self._places.get(site.name)
        if place is None:
            place = self._places[site.name] = len(self.sites)
            self.sites.append(site)
            self._sites_changed()
            if place == self._values.shape[1]:
                self._values = np.concatenate([self._values, np.zeros_like(self._values)], axis=1)
                self._remaining = np.concatenate([self._remaining, np.zeros_like(self._remaining)])
            _write_remaining(self._remaining[place], site)
            self._note_asleep(site.name, {}, site.identity.models)
        else:
            before, self.sites[place] = self.sites[place], site
            if site.load is not before.load:
                _write_remaining(self._remaining[place], site)
            if site.identity is not before.identity or site.pinned_off != before.pinned_off:
                self._update_serving(place)
                self._note_asleep(site.name, before.identity.models, site.identity.models)
        self._outdated.add(place)

    def _update_serving(self, place: int) -> None:
        """Update one site in every cached mask, after its models have changed."""
        site = self.sites[place]
        for (model, needs, regions), mask in self._serving.items():
            mask[place] = _serves(site, model, needs, regions)

    def asleep(self, model: str) -> Mapping[str, Model]:
        """Return the `Model` at each site where the model sleeps or wakes, by site name."""
        return self._asleep.get(model, NO_MODELS)

    def _note_asleep(self, name: str, before: Mapping[str, Model], now: Mapping[str, Model]) -> None:
        if before is now:
            return
        for model in before.values():
            if model.state is not ModelState.READY and (where := self._asleep.get(model.id)) is not None:
                where.pop(name, None)
                if not where:
                    del self._asleep[model.id]
        for model in now.values():
            if model.state is not ModelState.READY:
                self._asleep.setdefault(model.id, {})[name] = model

    def remove(self, name: str) -> None:
        """Remove a site. The last site takes over its column."""
        self._note_asleep(name, self.sites[self._places[name]].identity.models, {})
        place, last = self._places.pop(name), self.sites.pop()
        if last.name != name:
            self.sites[place] = last
            self._places[last.name] = place
            self._outdated.add(place)
            _write_remaining(self._remaining[place], last)
        self._outdated.discard(len(self.sites))
        self._sites_changed()

    def _sites_changed(self) -> None:
        self._figures = None
        self._serving.clear()

    def serving(
        self, model: str, needs: frozenset[str], regions: frozenset[str] | None = None
    ) -> NDArray[np.bool_]:
        """Return a mask `[sites]` of the sites that serve the model with these features, in these regions."""
        known = self._serving.get((model, needs, regions))
        if known is None:
            if len(self._serving) >= MAX_CACHED:
                self._serving.clear()
            known = np.array([_serves(site, model, needs, regions) for site in self.sites], dtype=bool)
            self._serving[model, needs, regions] = known
        return known

    def few_serving(
        self, model: str, needs: frozenset[str], regions: frozenset[str] | None = None, *, most: int
    ) -> list[str]:
        """Return the names of the ready sites of `serving`, or [] if more than `most` sites serve."""
        places = self.serving(model, needs, regions).nonzero()[0]
        found = [self.sites[place] for place in places] if len(places) <= most else []
        return [site.name for site in found if site.state is SiteState.READY]


def _serves(site: Site, model: str, needs: frozenset[str], regions: frozenset[str] | None) -> bool:
    served = site.identity.models.get(model)
    if regions is not None and site.identity.region not in regions:
        return False
    return served is not None and model not in site.pinned_off and needs <= served.features
