"""Exported metrics: names, labels, and values after queries ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from gateway.device import DeviceLoad
from gateway.domain import Credit, LoadReport, Model, Site, SiteIdentity, SiteState
from gateway.ending import Ending
from gateway.federation.directory import Directory
from gateway.outcome import Status
from gateway.security.login_limiter import MAX_ADDRESSES, LoginLimiter
from gateway.telemetry.metrics import FORGET_EVERY, Metrics, sites_by_model
from tests.support.ended_queries import ANSWERED, attempt


def serving(*models: str) -> dict[str, Model]:
    return {name: Model(name, "1", 100, 0, "test") for name in models}


def directory() -> Directory:
    here = Directory()
    for name in ("a", "b"):
        identity = SiteIdentity(name, "boot", f"cloud-{name}", "r", serving("m"), 4, kv_capacity_tokens=100)
        here.join(identity, 0.0)
        report = LoadReport(seq=1, received_s=0.0, running=2, token_load=50.0, tokens_per_s=7.0)
        here.report(name, report, Credit(1, 10.0, 20.0))
    return here


def exported(metrics: Metrics) -> Callable[..., float | None]:
    """A look-up in one scrape: name and labels → value, None if there is no such sample."""
    families = text_string_to_metric_families(metrics.text().decode())
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }
    return lambda name, **labels: samples.get((name, frozenset(labels.items())))


def test_sites_are_exported_as_they_are_at_the_scrape() -> None:
    here = directory()
    metrics = Metrics(here, lambda: 3)
    value = exported(metrics)
    a = {"site": "a", "cloud": "cloud-a", "region": "r"}
    assert value("mico_queries_live") == 3
    assert value("mico_site_outstanding_tokens", **a) == 80
    assert value("mico_site_capacity_tokens", **a) == 70
    assert value("mico_site_state", site="a", state="ready") == 1
    here.set_state("a", SiteState.DRAINING)
    assert exported(metrics)("mico_site_state", site="a", state="ready") == 0


def test_devices_are_exported_for_sites_that_have_several() -> None:
    here = directory()
    devices = (
        DeviceLoad("cuda:0", False, 4, 1, 2, 100, 50, 9.5, 3, 0),
        DeviceLoad("cuda:1", True, 4, 0, 0, 100, 0, 0.0, 0, 1),
    )
    here.report("a", LoadReport(seq=2, received_s=0.0, devices=devices), here.sites[0].credit)
    value = exported(Metrics(here, lambda: 3))
    assert value("mico_device_lost", site="a", device="cuda:1") == 1
    assert value("mico_device_running", site="a", device="cuda:0") == 1
    assert value("mico_device_pending", site="a", device="cuda:0") == 2
    assert value("mico_device_kv_free_tokens", site="a", device="cuda:0") == 50
    assert value("mico_device_moves_total", site="a", device="cuda:0") == 3
    assert value("mico_device_losses_total", site="a", device="cuda:1") == 1
    assert value("mico_device_lost", site="b", device="cuda:0") is None


def test_an_answer_is_counted_once_everywhere() -> None:
    metrics = Metrics(directory(), lambda: 0)
    metrics.observe(structs.replace(ANSWERED, ending=Ending(cached_tokens=3)))
    value = exported(metrics)
    assert value("mico_requests_total", site="a", outcome="answered") == 1
    served = {"site": "a", "cloud": "cloud-a", "model": "m"}
    assert value("mico_tokens_total", **served, type="response") == 9
    assert value("mico_tokens_total", **served, type="prompt") == 5
    assert value("mico_cached_prompt_tokens_total", **served) == 3
    assert value("mico_decisions_total", reason="first") == 1
    assert value("mico_ttft_seconds_count", site="a") == 1
    assert value("mico_itl_seconds_sum", site="a") == 0.1
    assert value("mico_forecast_abs_error_tokens_sum", model="m") == 1


def test_moves_and_failovers_are_told_apart() -> None:
    metrics = Metrics(directory(), lambda: 0)
    metrics.observe(
        structs.replace(ANSWERED, attempts=(attempt("a", "released"), attempt("b", "lost"), attempt("a")))
    )
    value = exported(metrics)
    assert value("mico_decisions_total", reason="offload") == 1
    assert value("mico_decisions_total", reason="failover") == 1
    assert value("mico_offloads_total", **{"from": "a", "to": "b", "result": "answered"}) == 1


def test_a_query_that_no_site_took_costs_no_tokens() -> None:
    metrics = Metrics(directory(), lambda: 0)
    refused = structs.replace(ANSWERED, status=Status.REFUSED, attempts=(), queue_s=None, first_token_s=None)
    metrics.observe(structs.replace(refused, mistaken=True))
    metrics.observe(refused)
    value = exported(metrics)
    assert value("mico_requests_total", site="none", outcome="refused") == 1, "a mistake or a quota"
    assert value("mico_requests_total", site="none", outcome="failed") == 1, "for want of a site: ours"
    assert b"mico_tokens_total{" not in metrics.text()


def test_a_model_that_no_site_can_serve_is_exported_as_zero() -> None:
    model = Model("m", "1", 100, 0, "test")
    identity = SiteIdentity("a", "boot", "aws", "r", {"m": model, "n": model}, 4, 100)
    ready = Site(identity, SiteState.READY, LoadReport(seq=1, received_s=0.0))
    assert sites_by_model([]) == {}
    assert sites_by_model([ready, replace(ready, pinned_off=frozenset({"n"}))]) == {"m": 2, "n": 1}
    assert sites_by_model([replace(ready, state=SiteState.DRAINING)]) == {"m": 0, "n": 0}
    assert sites_by_model([replace(ready, weight=0.0)]) == {"m": 0, "n": 0}


def test_every_promised_metric_is_there_with_its_labels() -> None:
    metrics = Metrics(here := directory(), lambda: 0)
    moved = structs.replace(ANSWERED, attempts=(attempt("a", "released"), attempt("b")))
    metrics.observe(moved)
    families = text_string_to_metric_families(metrics.text().decode())
    labels = {
        sample.name: frozenset(sample.labels) - {"le"} for family in families for sample in family.samples
    }
    promised = {
        "mico_site_outstanding_tokens": {"site", "cloud", "region"},
        "mico_site_capacity_tokens": {"site", "cloud", "region"},
        "mico_tokens_total": {"site", "cloud", "model", "type"},
        "mico_cached_prompt_tokens_total": {"site", "cloud", "model"},
        "mico_ttft_seconds_bucket": {"site"},
        "mico_itl_seconds_bucket": {"site"},
        "mico_queue_seconds_bucket": {"site"},
        "mico_requests_total": {"site", "outcome"},
        "mico_site_state": {"site", "state"},
        "mico_decisions_total": {"reason"},
        "mico_forecast_abs_error_tokens_bucket": {"model"},
        "mico_offloads_total": {"from", "to", "result"},
        "mico_link_unknown_messages_total": {"site", "reader"},
    }
    assert {name: labels[name] for name in promised} == promised
    assert len(here.sites) == 2


def test_what_was_counted_of_a_site_that_is_forgotten_goes_with_it() -> None:
    metrics = Metrics(directory(), lambda: 0)
    metrics.observe(structs.replace(ANSWERED, attempts=(attempt("a", "released"), attempt("b"))))
    for number in range(50):  # machines that came and went, each under a name of its own
        metrics.observe(
            structs.replace(ANSWERED, attempts=(attempt(f"gone-{number}", "released"), attempt("b")))
        )
        metrics.observe(
            structs.replace(ANSWERED, attempts=(attempt("b", "released"), attempt(f"gone-{number}")))
        )
    page = metrics.text().decode()
    assert "gone-" not in page
    assert 'mico_requests_total{outcome="answered",site="b"} 51.0' in page


def test_what_was_counted_of_a_model_that_no_site_lists_goes_with_it() -> None:
    """Tuned models come and go at sites that stay."""
    metrics = Metrics(here := directory(), lambda: 0)
    a, b = (site.identity for site in here.sites)
    metrics.observe(ANSWERED)
    for number in range(50):
        here.set_identity(replace(a, models=serving("m", name := f"tuned-{number}")))
        metrics.observe(structs.replace(ANSWERED, model=name))
        metrics.observe(structs.replace(ANSWERED, model=name, asked_model="route"))
    here.set_identity(replace(b, models=serving("m", "tuned-49")))
    here.set_identity(replace(a, models=serving("m")))
    here.leave("b")
    page = metrics.text().decode()
    assert 'mico_tokens_total{cloud="cloud-a",model="m",site="a",type="response"} 9.0' in page
    assert "tuned-49" in page, "the site that has it is down, and may join again"
    assert "tuned-48" not in page
    metrics.observe(structs.replace(ANSWERED, model="tuned-48"))
    here.set_identity(replace(a, models=serving("m", "tuned-48")))
    again = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "mico", "gen_ai_token_type": "output"}
    model = {"gen_ai_request_model": "tuned-48", "gen_ai_response_model": "tuned-48"}
    assert exported(metrics)("gen_ai_client_token_usage_count", **again, **model) == 1, "it begins anew"


def test_what_was_counted_of_sites_and_models_that_have_gone_goes_without_a_scrape() -> None:
    metrics = Metrics(directory(), lambda: 0)
    metrics.observe(ANSWERED)
    for number in range(4 * FORGET_EVERY):
        gone = structs.replace(ANSWERED, model=f"gone-{number}", attempts=(attempt(f"gone-{number}"),))
        metrics.observe(gone)
    metrics.observe(structs.replace(ANSWERED, attempts=(attempt("a", "released"), attempt("b"))))
    kept = {
        value
        for family in metrics._registry.collect()
        for sample in family.samples
        for value in sample.labels.values()
    }
    assert sum(value.startswith("gone-") for value in kept) <= FORGET_EVERY
    value = exported(metrics)
    assert value("mico_requests_total", site="a", outcome="answered") == 1
    assert value("mico_requests_total", site="b", outcome="answered") == 1


def test_messages_that_one_end_of_a_link_does_not_know_are_counted_by_their_reader() -> None:
    here = directory()
    here.count_unknown_message("a")
    here.report("a", LoadReport(seq=2, received_s=0.0, unknown_messages=3), here.sites[0].credit)
    page = Metrics(here, lambda: 0).text().decode()
    assert 'mico_link_unknown_messages_total{reader="gateway",site="a"} 1.0' in page
    assert 'mico_link_unknown_messages_total{reader="site",site="a"} 3.0' in page


def test_a_flood_of_names_that_clients_chose_leaves_the_figures_as_they_are() -> None:
    """Models that do not exist, and ids of requests, are what anybody may send without end."""
    metrics, limiter = Metrics(directory(), lambda: 0), LoginLimiter(lambda: 0.0)
    sizes: list[tuple[int, int]] = []
    refused = structs.replace(ANSWERED, status=Status.REFUSED, attempts=(), mistaken=True)
    for number in range(3 * MAX_ADDRESSES):
        name = f"{number:09}"
        outcome = structs.replace(refused, query_id=name, request_id=name, model=name, error=name)
        metrics.observe(outcome)
        limiter.record_failure(name)
        if number % MAX_ADDRESSES == MAX_ADDRESSES - 1:
            sizes.append((metrics.text().count(b"\n"), len(limiter._seen)))
    assert sizes[0] == sizes[1] == sizes[2]
    assert limiter.wait_s("000000000") == 0.0, "the oldest is forgotten"


def test_an_answer_is_counted_by_the_conventions_for_generative_ai() -> None:
    metrics = Metrics(directory(), lambda: 0)
    metrics.observe(ANSWERED)
    failed = structs.replace(
        ANSWERED, status=Status.FAILED, ending=Ending(error_type="UpstreamLost"), first_token_s=None
    )
    metrics.observe(failed)
    metrics.observe(structs.replace(failed, attempts=(), model="what a client wrote"))
    value = exported(metrics)
    of_all = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "mico",
        "gen_ai_request_model": "m",
        "gen_ai_response_model": "m",
    }
    assert value("gen_ai_server_request_duration_seconds_sum", **of_all, error_type="") == 1.0
    assert value("gen_ai_server_request_duration_seconds_count", **of_all, error_type="UpstreamLost") == 1
    assert value("gen_ai_server_time_to_first_token_seconds_sum", **of_all) == 0.2
    assert value("gen_ai_server_time_per_output_token_seconds_sum", **of_all) == 0.1
    assert value("gen_ai_client_token_usage_sum", **of_all, gen_ai_token_type="input") == 10
    assert value("gen_ai_client_token_usage_sum", **of_all, gen_ai_token_type="output") == 18
    assert b"what a client wrote" not in metrics.text()
