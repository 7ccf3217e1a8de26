"""Export this replica's metrics to Prometheus. Sites are read at the scrape; queries are counted as they end.

Labels are bounded: sites and models by what the directory lists (the counts of others are removed at the
scrape, and now and then without one), everything else by enums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.device import DeviceLoad
from gateway.domain import Site, SiteState
from gateway.federation.directory import Directory
from gateway.outcome import Outcome, Status
from gateway.routing.fleet import kv_tokens
from gateway.telemetry.families import Counters, Histograms
from gateway.telemetry.gen_ai import GenAiMetrics
from gateway.telemetry.recent import is_failure

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DRAIN_TARGET_S = 10.0
"""A site's capacity is the number of tokens that it processes in this time at its measured speed."""

FORGET_EVERY = 1_000
"""Queries after which the counts of what has gone are removed, where nobody scrapes."""
NO_SITE = "none"
"""The label of queries that no site was tried for."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics:
    """Counts queries as they end and renders the exposition. `live` returns the number of running queries."""

    def __init__(self, directory: Directory, live: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self._directory = directory
        self._live = live
        self._requests = Counters(
            "mico_requests",
            "Queries that ended: failed by us, refused for what the client asked or its quota",
            ["site", "outcome"],
            registry,
        )
        self._tokens = Counters("mico_tokens", "Tokens served", ["site", "cloud", "model", "type"], registry)
        self._cached = Counters(
            "mico_cached_prompt_tokens",
            "Prompt tokens that sites had in their caches",
            ["site", "cloud", "model"],
            registry,
        )
        self._decisions = Counters("mico_decisions", "Decisions by kind", ["reason"], registry)
        self._offloads = Counters(
            "mico_offloads", "Queries moved while pending", ["from", "to", "result"], registry
        )
        self._ttft = _seconds("mico_ttft", "From arrival to first token", registry)
        self._itl = _seconds("mico_itl", "Mean time between tokens of an answer", registry)
        self._queue = _seconds("mico_queue", "From arrival to the first assignment", registry)
        self._error = Histograms(
            "mico_forecast_abs_error_tokens",
            "Forecast against actual response length",
            ["model"],
            registry,
            buckets=_TOKENS,
        )
        self._gen_ai = GenAiMetrics(registry)
        self._by_site = (self._requests, self._tokens, self._cached, self._ttft, self._itl, self._queue)
        self._by_model = (self._tokens, self._cached, self._error)
        self._observed = 0  # queries
        registry.register(self)

    def register(self, collector: Collector) -> None:
        """Export the metrics of another part of the gateway, too."""
        self._registry.register(collector)

    def text(self) -> bytes:
        """Render all metrics in Prometheus' text format."""
        self._forget_unlisted()
        return generate_latest(self._registry)

    def observe(self, outcome: Outcome) -> None:
        """Count a query that ended."""
        status = Status.FAILED if is_failure(outcome) else outcome.status
        self._requests.add(1, outcome.site or NO_SITE, status.value)
        self._count_tokens(outcome)
        self._count_decisions(outcome)
        self._time(outcome)
        self._gen_ai.observe(outcome)
        if outcome.status is Status.ANSWERED and outcome.forecast is not None:
            error = abs(outcome.forecast.summary.expected - outcome.completion_tokens)
            self._error.of(outcome.model).observe(error)
        self._observed += 1
        if self._observed % FORGET_EVERY == 0:
            self._forget_unlisted()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges, read at the moment of the scrape."""
        yield GaugeMetricFamily("mico_queries_live", "Queries being answered", value=self._live())
        sites = self._directory.sites
        for name, text, figure in _GAUGES:
            family = GaugeMetricFamily(name, text, labels=["site", "cloud", "region"])
            for site in sites:
                identity = site.identity
                family.add_metric([identity.name, identity.cloud, identity.region], figure(site))
            yield family
        yield from _device_gauges(sites)
        states = GaugeMetricFamily(
            "mico_site_state", "1 for the state a site is in", labels=["site", "state"]
        )
        for site in sites:
            for state in SiteState:
                states.add_metric([site.name, state.value], float(site.state is state))
        yield states
        serving = GaugeMetricFamily("mico_model_sites", "Sites that can serve a model now", labels=["model"])
        for model, number in sites_by_model(sites).items():
            serving.add_metric([model], number)
        yield serving
        unknown = CounterMetricFamily(
            "mico_link_unknown_messages",
            "Messages of the link of kinds that their reader, older than their sender, does not know",
            labels=["site", "reader"],
        )
        for site in sites:
            by_gateway = self._directory.unknown_messages.get(site.name, 0)
            unknown.add_metric([site.name, "gateway"], by_gateway)
            unknown.add_metric([site.name, "site"], site.load.unknown_messages)
        yield unknown

    def _forget_unlisted(self) -> None:
        """Remove the counts of sites and models that are not listed any more: both come and go."""
        sites, models = {NO_SITE, *(site.name for site in self._directory.sites)}, self._directory.models
        for family in self._by_site:
            family.keep("site", sites)
        for end in ("from", "to"):
            self._offloads.keep(end, sites)
        for family in self._by_model:
            family.keep("model", models)
        self._gen_ai.keep(models)

    def _count_tokens(self, outcome: Outcome) -> None:
        if outcome.attempts:
            site = outcome.site
            cloud = self._directory.cloud_of(site) or "unknown"
            self._tokens.add(outcome.prompt_tokens, site, cloud, outcome.model, "prompt")
            self._tokens.add(outcome.completion_tokens, site, cloud, outcome.model, "response")
            self._cached.add(outcome.ending.cached_tokens, site, cloud, outcome.model)

    def _count_decisions(self, outcome: Outcome) -> None:
        before = None
        for attempt in outcome.attempts:
            if before is None:
                kind = "first"
            elif before.ended == "released":
                kind = "offload"
                result = "answered" if outcome.status is Status.ANSWERED else outcome.status.value
                self._offloads.add(1, before.decision.site, attempt.decision.site, result)
            else:
                kind = "failover"
            self._decisions.add(1, kind)
            before = attempt

    def _time(self, outcome: Outcome) -> None:
        if outcome.queue_s is not None:
            self._queue.of(outcome.site).observe(outcome.queue_s)
        if outcome.first_token_s is None:
            return
        self._ttft.of(outcome.site).observe(outcome.first_token_s)
        if outcome.completion_tokens > 1:
            decode_s = outcome.total_s - outcome.first_token_s
            self._itl.of(outcome.site).observe(decode_s / (outcome.completion_tokens - 1))


def sites_by_model(sites: Sequence[Site]) -> dict[str, int]:
    """Return, for every model that any site has, the number of sites that accept its queries."""
    found = dict.fromkeys((model for site in sites for model in site.identity.models), 0)
    for site in sites:
        if site.state is SiteState.READY and site.weight > 0:
            for model in set(site.identity.models) - site.pinned_off:
                found[model] += 1
    return found


def capacity_tokens(site: Site) -> float:
    """Return the tokens that a site processes in DRAIN_TARGET_S.

    Uses the cost of an iteration with every slot busy, because the recent speed may be that of a quiet hour.
    """
    slots = site.identity.slots
    full_s = site.load.iteration.seconds(slots, slots, 0)
    return max(site.load.tokens_per_s, slots / full_s if full_s > 0 else 0.0) * DRAIN_TARGET_S


def outstanding_tokens(site: Site) -> float:
    """Return the predicted tokens still to process, including those assigned since the last report."""
    return site.load.token_load + site.credit.prompt_tokens + site.credit.response_tokens


_GAUGES: tuple[tuple[str, str, Callable[[Site], float]], ...] = (
    ("mico_site_outstanding_tokens", "Predicted tokens still to process", outstanding_tokens),
    ("mico_site_capacity_tokens", "Tokens a site works off in 10 s at its measured speed", capacity_tokens),
    ("mico_site_running", "Requests that hold KV", lambda site: site.load.running),
    ("mico_site_pending", "Requests accepted and not started", lambda site: site.load.pending),
    ("mico_site_kv_free_tokens", "KV tokens free or evictable", lambda site: site.load.kv_free_tokens),
    ("mico_site_kv_capacity_tokens", "KV tokens in all", kv_tokens),
    ("mico_site_tokens_per_second", "Measured speed", lambda site: site.load.tokens_per_s),
    ("mico_site_rtt_seconds", "Round trip of the link", lambda site: site.rtt_s),
)


_DEVICE_GAUGES: tuple[tuple[str, str, Callable[[DeviceLoad], float]], ...] = (
    ("mico_device_lost", "1 while a device's engine starts again", lambda device: device.lost),
    ("mico_device_running", "Requests that hold KV of a device", lambda device: device.running),
    ("mico_device_pending", "Requests that wait for a device", lambda device: device.pending),
    (
        "mico_device_kv_free_tokens",
        "KV tokens of a device free or evictable",
        lambda device: device.kv_free_tokens,
    ),
    ("mico_device_kv_capacity_tokens", "KV tokens of a device in all", lambda device: device.kv_tokens),
)


def _device_gauges(sites: Sequence[Site]) -> Iterator[Metric]:
    """Yield the figures of the devices of sites that have several."""
    labels = ["site", "device"]
    devices = [([site.name, each.device], each) for site in sites for each in site.load.devices]
    for name, text, figure in _DEVICE_GAUGES:
        family = GaugeMetricFamily(name, text, labels=labels)
        for values, each in devices:
            family.add_metric(values, figure(each))
        yield family
    moved = CounterMetricFamily("mico_device_moves", "Requests that came over to a device", labels=labels)
    losses = CounterMetricFamily("mico_device_losses", "Engines that were lost on a device", labels=labels)
    for values, each in devices:
        moved.add_metric(values, each.moved_in)
        losses.add_metric(values, each.losses)
    yield from (moved, losses)


def _seconds(name: str, text: str, registry: CollectorRegistry) -> Histograms:
    return Histograms(f"{name}_seconds", text, ["site"], registry, buckets=_SECONDS)
