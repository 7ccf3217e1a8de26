"""Adapters that a server behind a site loads and unloads while it runs."""

from __future__ import annotations

import pytest

from tests.support import metric_pages
from tests.support.remote_site import Scene, chat, run
from tests.support.site_gateway import assign
from wire import federation_pb2 as pb


@pytest.mark.parametrize("metrics", [None, metric_pages.VLLM])
def test_an_adapter_that_is_loaded_later_is_served_and_one_unloaded_no_more(metrics: str | None) -> None:
    async def scenario(here: Scene) -> None:
        assert [each.id for each in here.hello.models] == ["letters"]
        here.server.adapters = {"support": "letters"}
        models = await here.session.served_models("letters", "support")
        assert [(each.parent, each.revision) for each in models] == [
            ("", "letters"),
            ("letters", "/lora/support"),
        ]
        assert models[1].context_tokens == models[0].context_tokens == 64
        assert models[1].features == models[0].features
        body = assign("a", "abc", max_tokens=5)
        body["assign"].model = "support"
        await here.session.send(**body)
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert here.server.asked[-1]["model"] == "support"
        here.server.adapters = {}
        await here.session.served_models("letters")
        body["assign"].attempt_id = "b"
        await here.session.send(**body)
        assert (await here.refused("b")).reason == pb.Rejected.MODEL_UNKNOWN

    run(scenario, owner="vllm", metrics=metrics)


def test_what_an_adapter_has_begun_ends_after_it_was_unloaded() -> None:
    async def scenario(here: Scene) -> None:
        here.server.go.clear()
        body = chat("a", "hello", max_tokens=5)
        body["assign"].model = "support"
        await here.session.send(**body)
        await here.session.until(lambda: here.session.text("a"))
        here.server.adapters = {"other": "letters"}
        await here.session.served_models("letters", "other")
        here.server.go.set()
        assert await here.session.finished("a") == pb.Delta.LENGTH
        assert here.session.text("a") == "hello"
        assert not here.session.over.is_set()

    run(scenario, adapters={"support": "letters"})


def test_the_same_list_is_told_once_however_often_it_is_read() -> None:
    async def scenario(here: Scene) -> None:
        here.server.adapters = {"support": "letters"}
        created = (await here.session.served_models("letters", "support"))[1].created_s
        seen = here.server.listings
        await here.session.until(lambda: here.server.listings >= seen + 5)
        here.server.adapters = {"support": "letters", "other": "letters"}
        again = (await here.session.served_models("letters", "support", "other"))[1].created_s
        assert (again, len(here.session.received("models"))) == (created, 2)

    run(scenario)


def test_names_in_use_and_names_that_no_gateway_takes_are_kept_out_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(here: Scene) -> None:
        here.server.adapters = {"mine": "letters", "x" * 201: "letters", "a\nb": "letters", "fine": "letters"}
        models = await here.session.served_models("mine", "fine")
        assert [(each.id, each.parent) for each in models] == [("mine", ""), ("fine", "mine")]

    run(scenario, settings={"served_model": "mine"})
    warned = [each.message for each in caplog.records if "is not served" in each.message]
    assert "'mine' of the server is not served: letters is served by this name already" in warned
    assert sum("printable characters" in each for each in warned) == 2


def test_a_site_of_one_configured_model_serves_no_other() -> None:
    async def scenario(here: Scene) -> None:
        seen = here.server.listings
        here.server.adapters = {"support": "letters"}
        await here.session.until(lambda: here.server.listings >= seen + 5)
        assert [m.id for said in here.session.received("models") for m in said.models] in ([], ["letters"])

    run(scenario, settings={"model": "letters"})


def test_a_list_that_cannot_be_read_or_served_leaves_the_models(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(here: Scene) -> None:
        here.server.models = ("another",)
        await here.session.until(lambda: "the models stay as they are" in caplog.text)
        seen = here.server.listings
        await here.session.until(lambda: here.server.listings >= seen + 3)
        assert not here.session.received("models") and not here.session.over.is_set()
        await here.session.send(**assign("a"))
        assert await here.session.finished("a") == pb.Delta.LENGTH

    run(scenario, settings={"model": "letters"})
    assert caplog.text.count("the models stay as they are: model is 'letters'") == 1
