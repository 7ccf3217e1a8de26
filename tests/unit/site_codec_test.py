"""Messages of the link: no message of a gateway raises, and no field of a site's is lost."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Caller, Query, SiteIdentity
from gateway.domain import Finish as GatewayFinish
from gateway.domain import Sampling as GatewaySampling
from gateway.failure import Resume
from gateway.federation import codec as gateway_codec
from gateway.federation import load_codec
from gateway.federation.answer_limits import AnswerLimits
from gateway.federation.directory import Directory
from gateway.federation.training import trains_of
from gateway.openai.sampling import MODEL_DEFAULTS
from gateway.prompt import Chat, Message
from predictor.forecast import Forecast
from site_engine import messages as m
from site_engine.core.load import DeviceFigures, IterationCost, LoadFigures
from site_engine.core.remaining_curve import RemainingPoint
from site_engine.core.request import Finish, Lane, Sampling, Timings, TokenLogprob
from site_engine.core.training import (
    AdapterShape,
    Content,
    End,
    Kind,
    Recipe,
    StepDone,
    StopTraining,
    Train,
    Training,
    Trains,
)
from site_engine.errors import Reason, WrongMessage
from site_engine.federation import codec
from site_engine.federation.client_json import MAX_NESTING
from tests.support.site_fakes import HELLO, FakeEngine
from wire import federation_pb2 as pb

FLAT = pb.Forecast(generated=[5, 5], expected_remaining=[1, 1], p90_remaining=[1, 1])
ADD = '[{"type": "function", "function": {"name": "add"}}]'
NO_KWARGS = pb.Chat(messages=[pb.ChatMessage(role="user")], template_kwargs_json="[]")
NO_JSON = pb.ChatMessage(role="user", tool_calls_json="{")


def chat_with(tools: str, **rules: str) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user")], tools_json=tools, **rules)


def nested(depth: int) -> str:
    return '{"x":' * (depth - 1) + "{}" + "}" * (depth - 1)


floats = st.floats(width=32)
texts = st.text(max_size=5)
small = st.integers(0, 2**32 - 1)
samplings = st.builds(
    pb.Sampling,
    max_tokens=st.none() | small,
    n=st.integers(0, 200),
    temperature=floats,
    top_p=floats,
    top_k=small,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    stop=st.lists(texts, max_size=2),
    logit_bias=st.dictionaries(small, floats, max_size=2),
    logprobs=st.none() | small,
    echo=st.booleans(),
    guided_json=texts,
)
chats = st.builds(
    pb.Chat,
    messages=st.lists(
        st.builds(pb.ChatMessage, role=texts, content=texts, tool_calls_json=texts), max_size=2
    ),
    tools_json=texts,
)
forecasts = st.builds(
    pb.Forecast,
    generated=st.lists(small, max_size=3),
    expected_remaining=st.lists(floats, max_size=3),
    p90_remaining=st.lists(small, max_size=3),
)
assigns = st.one_of(
    st.builds(
        pb.Assign,
        attempt_id=texts,
        sampling=samplings,
        forecast=forecasts,
        lane=st.integers(0, 3),
        deadline_s=floats,
        resume=st.builds(pb.ResumeFrom, token_ids=st.lists(small, max_size=2), text_chars=small),
        **prompt,
    )
    for prompt in ({}, {"chat": chats}, {"text": texts}, {"token_ids": st.builds(pb.TokenIds)})
)


@given(assigns)
def test_no_assign_raises(body: pb.Assign) -> None:
    decoded = codec.decode(pb.GatewayMessage(assign=body))
    assert isinstance(decoded, m.Assign | m.Rejected)
    assert decoded.attempt_id == body.attempt_id
    if isinstance(decoded, m.Rejected):
        assert decoded.message
        assert next(codec.encode(decoded)).rejected.message == decoded.message


def test_a_full_assign_arrives_whole() -> None:
    body = pb.Assign(
        attempt_id="a",
        query_id="q",
        model="letters",
        chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi", name="Ada")]),
        sampling=pb.Sampling(
            max_tokens=0, n=2, temperature=0.5, top_p=0.9, top_k=3, seed=0, stop=["\n"], logit_bias={4: -1.0}
        ),
        forecast=pb.Forecast(generated=[0, 9], expected_remaining=[8.0, 2.0], p90_remaining=[20, 5]),
        lane=1,
        priority=-2,
        deadline_s=3.5,
        tenant="t",
    )
    got = codec.decode(pb.GatewayMessage(assign=body))
    assert isinstance(got, m.Assign)
    assert got.prompt == m.ChatPrompt((m.ChatMessage("user", "hi", "Ada"),))
    assert (got.choices, got.lane, got.priority, got.deadline_s, got.tenant) == (2, Lane.BATCH, -2, 3.5, "t")
    assert got.remaining.points == (RemainingPoint(0, 8.0, 20), RemainingPoint(9, 2.0, 5))
    sampling = got.sampling
    assert (sampling.max_tokens, sampling.seed, sampling.stop) == (0, 0, ("\n",))
    assert (sampling.repetition_penalty, sampling.logprobs, sampling.logit_bias) == (1.0, None, {4: -1.0})


@pytest.mark.parametrize(
    ("change", "reason", "param"),
    [
        ({"sampling": pb.Sampling(temperature=-1)}, Reason.INVALID, "temperature"),
        ({"sampling": pb.Sampling(top_p=1.5)}, Reason.INVALID, "top_p"),
        ({"sampling": pb.Sampling(n=129)}, Reason.INVALID, "n"),
        ({"sampling": pb.Sampling(stop=[""])}, Reason.INVALID, "stop"),
        ({"sampling": pb.Sampling(guided_json="{")}, Reason.INVALID, "response_format"),
        ({"sampling": pb.Sampling(guided_json="[]")}, Reason.INVALID, "response_format"),
        ({"sampling": pb.Sampling(guided_json=nested(MAX_NESTING + 1))}, Reason.INVALID, "response_format"),
        ({"sampling": pb.Sampling(guided_json=nested(10_000))}, Reason.INVALID, "response_format"),
        ({"chat": chat_with("{")}, Reason.INVALID, "tools"),
        ({"chat": chat_with("[]")}, Reason.INVALID, "tool_choice"),
        ({"chat": chat_with('[{"type": "function"}]')}, Reason.INVALID, "tools"),
        ({"chat": chat_with(ADD, tool_choice="perhaps")}, Reason.INVALID, "tool_choice"),
        ({"chat": chat_with(ADD, tool_choice="named", tool_name="sub")}, Reason.INVALID, "tool_choice"),
        ({"resume": pb.ResumeFrom(tool_calls=1)}, Reason.INVALID, "resume"),
        ({"deadline_s": -1.0}, Reason.INVALID, "deadline_s"),
        ({"forecast": FLAT}, Reason.INVALID, "forecast"),
        ({"resume": pb.ResumeFrom(text_chars=4)}, Reason.INVALID, "resume"),
        ({"resume": pb.ResumeFrom(token_ids=[1]), "sampling": pb.Sampling(n=2)}, Reason.UNSUPPORTED, ""),
        ({"chat": pb.Chat(messages=[NO_JSON])}, Reason.INVALID, "messages.0.tool_calls"),
        ({"chat": NO_KWARGS}, Reason.INVALID, "chat_template_kwargs"),
        ({"token_ids": pb.TokenIds()}, Reason.INVALID, "prompt"),
        ({"attempt_id": ""}, Reason.INVALID, "attempt_id"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], reason: Reason, param: str) -> None:
    body = pb.Assign(**{"attempt_id": "a", "text": "x", **change})
    got = codec.decode(pb.GatewayMessage(assign=body))
    assert isinstance(got, m.Rejected)
    assert (got.reason, got.param) == (reason, param)


def test_json_may_nest_as_deeply_as_the_site_bears() -> None:
    schema = nested(MAX_NESTING)
    body = pb.Assign(attempt_id="a", text="x", sampling=pb.Sampling(guided_json=schema))
    got = codec.decode(pb.GatewayMessage(assign=body))
    assert isinstance(got, m.Assign)
    assert got.guided_json == schema


def test_a_message_of_a_newer_gateway_is_ignored() -> None:
    assert codec.decode(pb.GatewayMessage()) is None


def test_the_unknown_values_of_a_newer_gateway_degrade() -> None:
    lane = codec.decode(pb.GatewayMessage(assign=pb.Assign(attempt_id="a", text="x", lane=7)))
    assert isinstance(lane, m.Assign)
    assert lane.lane is Lane.BATCH
    prompt = codec.decode(pb.GatewayMessage(assign=pb.Assign(attempt_id="a")))
    assert isinstance(prompt, m.Rejected)
    assert prompt.reason is Reason.UNSUPPORTED, "another site might know that kind"


@pytest.mark.parametrize(
    ("lowest", "highest", "agreed"),
    [(0, 0, 1), (1, 0, 1), (1, 2, 2), (2, 3, 3), (3, 4, 3), (1, 9, 3), (2, 0, 2)],
)
def test_a_site_and_a_gateway_meet_at_the_highest_protocol_of_both(
    lowest: int, highest: int, agreed: int
) -> None:
    body = pb.Welcome(gateway="g", protocol=lowest, highest_protocol=highest)
    got = codec.decode(pb.GatewayMessage(welcome=body))
    assert isinstance(got, m.Welcome)
    assert got.protocol == agreed


def test_a_gateway_too_far_ahead_is_refused_with_both_ranges() -> None:
    body = pb.Welcome(gateway="g", protocol=4, highest_protocol=5)
    with pytest.raises(WrongMessage, match="the gateway speaks protocols 4 to 5, this site 1 to 3: upgrade"):
        codec.decode(pb.GatewayMessage(welcome=body))


@pytest.mark.parametrize(("lowest", "highest"), [(1, 0), (1, 1), (1, 2), (2, 3), (2, 0), (1, 9)])
def test_a_gateway_takes_a_site_with_a_protocol_in_common(lowest: int, highest: int) -> None:
    (hello,) = codec.encode(HELLO)
    hello.hello.protocol, hello.hello.highest_protocol = lowest, highest
    assert gateway_codec.identity(hello.hello).name == "alpha"


@pytest.mark.parametrize(
    ("lowest", "highest", "named"), [(4, 5, "4 to 5"), (0, 0, "0 to 0"), (4, 0, "4 to 4")]
)
def test_a_site_too_far_ahead_is_refused_with_both_ranges(lowest: int, highest: int, named: str) -> None:
    (hello,) = codec.encode(HELLO)
    hello.hello.protocol, hello.hello.highest_protocol = lowest, highest
    with pytest.raises(
        gateway_codec.ProtocolError, match=f"the site speaks protocols {named}, this gateway 1 to 3: upgrade"
    ):
        gateway_codec.identity(hello.hello)


def test_a_finish_of_a_newer_site_ends_the_choice() -> None:
    assert gateway_codec.delta(pb.Delta(finish=77), AnswerLimits(9, 9, 999)).finish is GatewayFinish.STOP


@pytest.mark.parametrize("body", [pb.Welcome(), pb.Welcome(gateway="g", heartbeat_s=float("inf"))])
def test_a_welcome_that_makes_no_sense_is_a_fault(body: pb.Welcome) -> None:
    with pytest.raises(WrongMessage):
        codec.decode(pb.GatewayMessage(welcome=body))


def test_every_reason_has_its_name_on_the_wire() -> None:
    for reason in Reason:
        (message,) = codec.encode(m.Rejected("a", reason, "because", "n"))
        assert pb.Rejected.Reason.Name(message.rejected.reason) == reason.value


def test_a_delta_says_everything() -> None:
    logprob = TokenLogprob("é", b"\xc3\xa9", -0.5, (TokenLogprob("e", b"e", None),))
    delta = m.Delta("a", 1, "é", (7, 8), 9, Finish.STOP, "", (logprob,), (logprob,), Timings(1, 2, 3, 4, 5))
    (message,) = codec.encode(m.Step((delta,)))
    (got,) = message.step.deltas
    assert (got.index, got.text, list(got.token_ids), got.completion_tokens) == (1, "é", [7, 8], 9)
    assert got.finish == pb.Delta.STOP
    assert (got.logprobs[0].raw, got.logprobs[0].logprob) == (b"\xc3\xa9", -0.5)
    assert got.prompt_logprobs[0].top[0].absent
    assert got.timings.cached_prompt_tokens == 4


@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=12))
def test_a_step_is_cut_but_loses_nothing(lengths: list[int]) -> None:
    deltas = tuple(m.Delta(f"a{i}", 0, "x" * length, (), 0) for i, length in enumerate(lengths))
    parts = [part.step for part in codec.encode(m.Step(deltas))]
    sent = [(each.attempt_id, len(each.text)) for part in parts for each in part.deltas]
    assert sent == [(f"a{i}", length) for i, length in enumerate(lengths)]
    assert all(part.ByteSize() <= codec.MAX_STEP_BYTES + 100 for part in parts if len(part.deltas) > 1)


def test_hello_and_load_carry_every_figure() -> None:
    cost = IterationCost(1, 2, 3, 4)
    device = DeviceFigures("cuda:0", True, 1, 2, 3, 4, 5, 6.5, 7, 8)
    figures = LoadFigures(
        1,
        2,
        3.5,
        4,
        5,
        6.5,
        0.5,
        cost,
        (7, 8),
        1,
        9,
        10.5,
        11,
        12,
        13,
        16.0,
        (device,),
        2,
        0.25,
        17,
        18,
        frozenset({"f"}),
    )
    (load,) = codec.encode(m.Load(3, figures, stalled_s=14.0, unknown_messages=15))
    unsaid = set(pb.Load.DESCRIPTOR.fields_by_name) - {each.name for each, _ in load.load.ListFields()}
    assert not unsaid
    read = load_codec.load(load.load, 0.0)
    (got,) = read.devices
    assert astuple(got) == tuple(device)
    assert (read.training, read.training_s_per_iteration) == (2, 0.25)
    assert (read.kv_extra_tokens, read.computed_tokens_total) == (17, 18)
    (hello,) = codec.encode(replace(HELLO, trains=Trains(2, 64, 1.5)))
    unset = set(pb.Hello.DESCRIPTOR.fields_by_name) - {each.name for each, _ in hello.hello.ListFields()}
    assert unset == {"attempts"}
    assert trains_of(hello.hello) == (2, 64, 1.5)
    assert trains_of(next(codec.encode(HELLO)).hello) is None


def test_devices_of_one_name_are_one_and_a_site_has_not_thousands() -> None:
    many = [pb.DeviceLoad(device=f"cuda:{at // 2}\n", running=at) for at in range(10_000)]
    got = load_codec.load(pb.Load(devices=many), 0.0).devices
    assert len(got) == load_codec.MAX_DEVICES // 2
    assert (got[1].device, got[1].running) == ("cuda:1", 3)


def test_an_order_to_train_and_its_report_say_everything() -> None:
    content = pb.Content(sha256=b"a" * 32, bytes=9)
    order = pb.Train(
        job_id="j", run="r", tenant="t", model="b", tuned_model="ft:b", data=content, validation=content
    )
    order.epochs, order.batch_size, order.learning_rate, order.rank, order.alpha = 2, 4, 0.5, 8, 16.0
    order.target, order.seed, order.revision = "attention", 7, "rev"
    got = codec.decode(pb.GatewayMessage(train=order))
    data = Content(b"a" * 32, 9)
    assert got == Train(
        "j", "r", "t", "b", "ft:b", data, data, None, 2, 4, 0.5, 8, 16.0, "attention", 7, "rev"
    )
    assert got.recipe() == Recipe(2, 4, 0.5, 7, AdapterShape(8, 16.0, "attention"))
    stop = codec.decode(pb.GatewayMessage(stop_training=pb.StopTraining(run="r", snapshot=True)))
    assert stop == StopTraining("r", snapshot=True)
    steps = (StepDone(1, 2, 0.5, 0.25, 10), StepDone(2, 2, 0.25, 0.5, 20, 0.75))
    report = Training("j", "r", 2, 2, 20, steps, 5.0, End.GIVEN_UP, "word", "why", "rev")
    (message,) = codec.encode(report)
    unsaid = set(pb.Training.DESCRIPTOR.fields_by_name) - {
        each.name for each, _ in message.training.ListFields()
    }
    assert not unsaid
    assert message.training.end == pb.Training.GIVEN_UP
    assert [each.HasField("validation_loss") for each in message.training.steps] == [False, True]


def test_the_numbers_of_ends_and_of_contents_are_those_of_the_wire() -> None:
    assert {each.name: each.value for each in End} == dict(pb.Training.End.items())
    assert {each.name: each.value for each in Kind} == dict(pb.StoreBegin.Kind.items())


def test_a_gateway_takes_the_longest_token_and_bounds_prompts_by_it() -> None:
    model = replace(HELLO.models[0], context_tokens=100, max_token_chars=16)
    (message,) = codec.encode(replace(HELLO, models=(model,)))
    assert gateway_codec.identity(message.hello).models[model.id].max_prompt_chars == 1600
    message.hello.models[0].ClearField("max_token_chars")
    assert gateway_codec.identity(message.hello).models[model.id].max_prompt_chars == 0


def test_the_bound_of_prompts_is_that_of_the_site_that_takes_most() -> None:
    def site(name: str, context_tokens: int, max_token_chars: int) -> SiteIdentity:
        model = replace(HELLO.models[0], context_tokens=context_tokens, max_token_chars=max_token_chars)
        (message,) = codec.encode(replace(HELLO, site=name, models=(model,)))
        return gateway_codec.identity(message.hello)

    directory = Directory()
    for name, context_tokens in (("a", 100), ("b", 400), ("c", 200)):
        directory.join(site(name, context_tokens, 4), 0.0)
    (model,) = directory.models.values()
    assert (model.context_tokens, model.max_prompt_chars) == (400, 1600)
    directory.join(site("d", 50, 0), 0.0)
    (model,) = directory.models.values()
    assert (model.context_tokens, model.max_prompt_chars) == (400, 0)


def test_a_gateway_takes_what_prompts_have_left_and_a_site_that_does_not_tell_for_none() -> None:
    (load,) = codec.encode(m.Load(3, FakeEngine().load()._replace(running=2, unread_tokens=700)))
    assert load_codec.load(load.load, 0.0).unread_tokens == 700
    load.load.ClearField("unread_tokens")
    assert load_codec.load(load.load, 0.0).unread_tokens == 0


def test_what_was_delivered_of_a_thought_arrives_and_an_older_gateway_says_nothing_of_it() -> None:
    query = Query("q", "m", "hi", GatewaySampling(), Caller("k", "t"), 0.0, 9.0)
    delivered = Resume((1, 2), "", 2, reasoning_chars=3)
    sent = gateway_codec.assign(query, "a", Forecast((0, 100), (1.0,), "flat"), delivered, 9.0)
    got = codec.decode(sent)
    assert isinstance(got, m.Assign)
    assert (got.resumed, got.resumed_reasoning_chars) == ((1, 2), 3)
    sent.assign.resume.ClearField("reasoning_chars")
    older = codec.decode(sent)
    assert isinstance(older, m.Assign)
    assert older.resumed_reasoning_chars is None


@pytest.mark.parametrize(("stops", "told"), [(("END", "x"), "END"), (("x",), "")])
def test_the_stop_string_of_a_choice_is_one_that_was_asked_for(stops: tuple[str, ...], told: str) -> None:
    delta = m.Delta("a", 0, "", (), 1, Finish.STOP, reasoning="hm", reasoning_tokens=1, stop_sequence="END")
    (message,) = codec.encode(m.Step((delta,)))
    got = gateway_codec.delta(message.step.deltas[0], AnswerLimits(9, 9, 999, stops=stops))
    assert (got.stop_sequence, got.reasoning, got.reasoning_tokens) == (told, "hm", 1)


def test_reasoning_and_arguments_of_a_template_arrive_whole() -> None:
    turns = (Message("assistant", "42", reasoning="Six sevens."), Message("user", "Why?"))
    asked = Chat(turns, template_kwargs_json='{"a":[1]}', reasoning_effort="high")
    query = Query("q", "m", asked, GatewaySampling(), Caller("k", "t"), 0.0, 9.0)
    got = codec.decode(gateway_codec.assign(query, "a", Forecast((0, 100), (1.0,), "flat"), None, 9.0))
    assert isinstance(got, m.Assign)
    assert isinstance(got.prompt, m.ChatPrompt)
    assert [each.reasoning for each in got.prompt.messages] == ["Six sevens.", ""]
    assert (got.prompt.template_kwargs, got.prompt.reasoning_effort) == ({"a": [1]}, "high")


@given(st.sets(st.sampled_from(MODEL_DEFAULTS)))
def test_what_a_client_left_out_arrives_with_openais_values(names: set[str]) -> None:
    asked = GatewaySampling(max_tokens=3, left_out=tuple(names))
    query = Query("q", "m", "hi", asked, Caller("k", "t"), 0.0, 9.0)
    sent = gateway_codec.assign(query, "a", Forecast((0, 100), (1.0,), "flat"), None, 9.0)
    got = codec.decode(sent)
    assert isinstance(got, m.Assign)
    assert got.sampling.left_out == names
    assert replace(got.sampling, left_out=frozenset()) == Sampling(max_tokens=3)
    assert got.sampling.with_defaults({"top_p": 0.5}).top_p == (0.5 if "top_p" in names else 1.0)
