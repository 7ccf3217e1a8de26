"""However a request ends, it ends once, says why, and leaves nothing behind; the others do not notice."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from site_engine.core.request import (
    Finish,
    Lane,
    RejectionReason,
    Request,
    RequestRejected,
    Sampling,
)
from site_engine.engine.build import packed_engine
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.settings import EngineSettings
from site_engine.engine_client import Listener
from tests.support.engine_models import (
    CONTEXT,
    VOCAB,
    Collected,
    Ticks,
    assert_idle,
    drain,
    engine_for,
    family,
    gather,
    greedy,
    tokenizer,
)

torch.set_num_threads(1)


def last(collected: dict[str, Collected], request_id: str) -> Any:
    return collected[request_id].last


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 8])
def test_cancel_in_any_state_frees_everything_and_says_so_once(steps: int) -> None:
    engine = engine_for(family("llama").served, slots=2, token_budget=8)
    prompts = {"long": list(range(1, 21)), "short": [1, 2], "waits": [5, 6, 7]}
    for name, prompt in prompts.items():
        engine.submit(greedy(name, prompt, 12))
    collected: dict[str, Collected] = {}
    for _ in range(steps):
        gather(engine.step(), collected)
    for name in prompts:
        engine.cancel(name)
        engine.cancel(name)
    gather(engine.step(), collected)
    assert_idle(engine)
    for name in prompts:
        assert last(collected, name).finish is Finish.CANCELLED
        assert last(collected, name).completion_tokens == len(collected[name].token_ids)


def test_a_group_that_is_not_given_up_waits_on_however_full_the_queue_has_become() -> None:
    engine, collected = engine_for(family("llama").served, slots=1, max_pending=10), dict[str, Collected]()
    thread = EngineThread(engine, lambda call: call(), Ticks())
    thread.listener = Listener(lambda outputs: gather(list(outputs), collected), lambda _: None, pytest.fail)
    answers: list[object] = []

    def submit(*names: str, tenant: str) -> None:
        requests = [greedy(name, [1, 2, 3], 30, ignore_eos=True) for name in names]
        for each in requests:
            each.tenant = tenant
        thread.submit(requests, answers.append)
        thread.turn()

    submit("one", "other", tenant="many")  # one of the group runs, the other waits
    for at in range(8):
        submit(f"more {at}", tenant="many")
    submit("another's", tenant="few")
    assert not any(answers)
    decisions: list[bool] = []
    thread.release([["one", "other"]], decisions.extend)
    while engine.has_work:
        thread.turn()
    assert decisions == [False]
    finishes = [each.last.finish for each in collected.values() if each.last is not None]
    assert finishes == [Finish.LENGTH] * 11
    assert list(collected)[:2] == ["one", "other"], "it has waited no less for being asked for"


def test_cancel_of_an_unknown_request_is_nobodys_concern() -> None:
    engine = engine_for(family("llama").served)
    engine.cancel("never heard of it")
    assert engine.step() == []
    assert not engine.has_work


def test_a_cancelled_neighbour_changes_nobody() -> None:
    expected = family("llama").generate([9, 8, 7], 20)
    engine = engine_for(family("llama").served, page_size=2)
    engine.submit(greedy("stays", [9, 8, 7], 20))
    engine.submit(greedy("goes", [1, 2, 3, 4], 20))
    collected: dict[str, Collected] = {}
    for _ in range(5):
        gather(engine.step(), collected)
    engine.cancel("goes")
    drain(engine, collected)
    assert collected["stays"].token_ids == expected


def test_release_gives_up_exactly_those_that_have_not_started() -> None:
    engine = engine_for(family("llama").served, slots=1)
    for name in ("a", "b", "c"):
        engine.submit(greedy(name, [1, 2, 3], 5))
    engine.step()
    running = engine.load().running
    given_up = engine.release(["a", "b", "c", "unknown", "b"])
    assert running == 1
    assert len(given_up) == 2
    collected = drain(engine)
    assert set(collected) == {"a", "b", "c"} - set(given_up)
    assert_idle(engine)


def test_a_released_request_may_come_back() -> None:
    engine = engine_for(family("llama").served)
    request = greedy("again", [1, 2, 3], 6)
    engine.submit(request)
    assert engine.release(["again"]) == ["again"]
    engine.submit(request)
    assert drain(engine)["again"].token_ids == family("llama").generate([1, 2, 3], 6)


def test_an_oversize_prompt_is_refused_with_both_numbers() -> None:
    engine = engine_for(family("llama").served)
    with pytest.raises(RequestRejected, match=rf"{CONTEXT + 3}.*{CONTEXT}") as refused:
        engine.submit(greedy("too long", [1] * (CONTEXT + 3), 1))
    assert refused.value.reason is RejectionReason.CONTEXT_LENGTH
    small = engine_for(family("llama").served, kv_tokens=32)
    with pytest.raises(RequestRejected, match=r"40.*32"):
        small.submit(greedy("never fits", [1] * 40, 1))
    assert_idle(engine)


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (greedy("empty", [], 1), "prompt"),
        (greedy("id", [VOCAB], 1), "prompt"),
        (greedy("bias", [1], 1, logit_bias={VOCAB: 1.0}), "logit_bias"),
        (greedy("no bias", [1], 1, logit_bias={1: 0.0, 2: float("nan")}), "logit_bias"),
        (greedy("no limit", [1], 1, logit_bias={1: 0.0, 2: float("inf")}), "logit_bias"),
        (greedy("stop", [1], 1, stop_token_ids=(-1,)), "stop_token_ids"),
        (greedy("no string", [1], 1, stop=("x", "")), "stop"),
        (greedy("negative", [1], -1), "max_tokens"),
        (greedy("divides", [1], 1, repetition_penalty=0.0), "repetition_penalty"),
        (greedy("no number", [1], 1, presence_penalty=float("nan")), "presence_penalty"),
        (Request("cold", [1], Sampling(temperature=-0.1)), "temperature"),
        (Request("resumed", [1], resumed=[VOCAB]), "resume"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_field(request_: Request, param: str) -> None:
    with pytest.raises(RequestRejected) as refused:
        engine_for(family("llama").served).submit(request_)
    assert (refused.value.reason, refused.value.param) == (RejectionReason.INVALID, param)


def test_a_full_queue_refuses_and_the_limit_of_tokens_is_clipped() -> None:
    engine = engine_for(family("llama").served, max_pending=2)
    clipped = greedy("a", [1] * 10, 10_000)
    engine.submit(clipped)
    assert clipped.max_tokens == CONTEXT - 10
    engine.submit(Request("b", [1] * 10))
    with pytest.raises(RequestRejected) as refused:
        engine.submit(greedy("c", [1], 1))
    assert refused.value.reason is RejectionReason.FULL


def test_one_bad_forward_fails_the_request_that_causes_it_and_no_other() -> None:
    served = family("llama").served
    engine = engine_for(served, slots=4)
    expected = family("llama").generate([9, 8, 7], 15)
    engine.submit(greedy("good", [9, 8, 7], 15))
    engine.submit(greedy("bad", [1, 2, 313], 15))
    runner: Any = engine.runner
    forward = runner._forward

    def breaks(ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        if 313 in ids:
            raise ArithmeticError("a fault in the machine")
        result: torch.Tensor = forward(ids, *rest)
        return result

    runner._forward = breaks
    collected = drain(engine)
    assert last(collected, "bad").finish is Finish.FAILED
    assert "a fault in the machine" in last(collected, "bad").error
    assert collected["good"].token_ids == expected
    assert_idle(engine)


def test_a_bad_forward_leaves_nothing_to_those_that_share_its_pages_and_wait_for_their_turn() -> None:
    """Lines whose prompts are paced share pages in iterations in which they compute nothing."""
    prompt = list(range(100, 132))
    expected = family("llama").generate([*prompt, 8], 5)
    engine = engine_for(family("llama").served, token_budget=32)
    line = greedy("good", [*prompt, 8], 5)
    line.lane = Lane.BATCH
    engine.submit(greedy("bad", [*prompt, 7], 5))
    engine.submit(line)
    budget: Any = engine._scheduler.prompt_budget
    runner: Any = engine.runner
    forward, left = runner._forward, {Lane.CHAT: 8, Lane.BATCH: 8}
    budget.left = lambda lane, paced: left[lane]
    engine.step()
    assert line.computed == 16

    def breaks(*_: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a fault in the machine")

    left.update({Lane.CHAT: 16, Lane.BATCH: 0})
    runner._forward = breaks
    (failed,) = engine.step()
    assert failed.finish is Finish.FAILED
    left[Lane.BATCH], runner._forward = 32, forward
    assert drain(engine)["good"].token_ids == expected
    assert_idle(engine)


@pytest.mark.parametrize("poison", [False, True])
def test_numbers_that_are_not_finite_fail_one_row_and_leave_no_trace_in_its_pages(poison: bool) -> None:
    expected = family("llama").generate([9, 8, 7], 15)
    engine = engine_for(family("llama").served, slots=4, kv_tokens=96, debug_poison=poison)
    engine.submit(greedy("good", [9, 8, 7], 15))
    engine.submit(greedy("bad", [1, 2, 313], 15))
    runner: Any = engine.runner
    forward = runner._forward

    def spoils(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(ids, positions, wanted).clone()
        if 313 in ids:
            logits[-1] = float("nan")
            for request in engine._scheduler.running:
                if request.id == "bad":
                    engine._kv_cache.fill(request.pages, float("nan"))
        return logits

    runner._forward = spoils
    collected = drain(engine)
    assert "not finite" in last(collected, "bad").error
    assert collected["good"].token_ids == expected
    engine.submit(greedy("next", [9, 8, 7], 15))
    assert drain(engine)["next"].token_ids == expected


@pytest.mark.parametrize("fault", ["not finite", "an error", "none"])
def test_tokens_are_counted_that_answers_have(fault: str) -> None:
    """Not that of a prompt which is evaluated alone, nor those of rows that fail."""
    engine = engine_for(family("llama").served, slots=4)
    engine.submit(greedy("good", [9, 8, 7], 15))
    engine.submit(greedy("bad", [1, 2, 313], 15))
    engine.submit(greedy("prompt alone", [4, 5, 6], 0))
    runner: Any = engine.runner
    forward = runner._forward

    def spoils(ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = forward(ids, positions, wanted).clone()
        if fault == "not finite" and 313 in ids:
            logits[wanted.tolist().index(ids[0].tolist().index(313))] = float("nan")
        elif fault == "an error" and 313 in ids:
            raise ArithmeticError("a fault in the machine")
        return logits

    runner._forward = spoils
    found = drain(engine)
    assert len(found["good"].token_ids) == 15
    assert engine.load().tokens_total == sum(len(each.token_ids) for each in found.values())


def test_a_deadline_ends_a_request_with_the_reason() -> None:
    clock = Ticks()
    engine = packed_engine(family("llama").served, EngineSettings(slots=1, token_budget=8), clock)
    late = greedy("late", [1, 2, 3], 100)
    late.deadline_s = 0.05
    engine.submit(late)
    collected = drain(engine)
    assert last(collected, "late").finish is Finish.FAILED
    assert "deadline" in last(collected, "late").error
    assert 0 < last(collected, "late").completion_tokens < 100


def test_deadlines_of_answers_that_ended_in_time_are_forgotten() -> None:
    engine = engine_for(family("llama").served)
    for number in range(300):
        request = greedy(str(number), [1], 1)
        request.deadline_s = 1e9
        engine.submit(request)
        drain(engine)
    assert len(engine._live._deadlines) <= 67
    slow = greedy("0", [1, 2], 9)
    engine.submit(slow)
    assert len(drain(engine)["0"].token_ids) == 9


def test_the_deadline_of_a_request_that_is_given_up_and_comes_back_is_kept_once() -> None:
    """When gateways move it to and fro."""
    engine = engine_for(family("llama").served)
    request = greedy("waits", [1], 1)
    request.deadline_s = 1e9
    engine.submit(request)
    for _ in range(300):
        engine.release(["waits"])
        engine.submit(request, request.to_move())
    assert len(engine._live._deadlines) <= 67
    assert last(drain(engine), "waits").finish is Finish.LENGTH


def test_a_resumed_answer_goes_on_where_it_was_cut() -> None:
    prompt, whole = [4, 5, 6], family("gpt2").generate([4, 5, 6], 24)
    engine = engine_for(family("gpt2").served)
    engine.submit(greedy("whole", prompt, 24))
    text = drain(engine)["whole"].text
    for cut in (1, 7, 23, 24):
        request = greedy(f"cut {cut}", prompt, 24)
        resumed = Request(
            request.id, prompt, request.sampling, resumed=whole[:cut], resumed_chars=min(cut, len(text))
        )
        engine.submit(resumed)
        one = drain(engine)[request.id]
        assert one.token_ids == whole[cut:]
        assert one.text == text[min(cut, len(text)) :]
        assert one.last is not None
        assert one.last.completion_tokens == 24
    assert_idle(engine)


def test_a_stop_string_is_never_emitted_also_when_it_crosses_tokens() -> None:
    engine = engine_for(family("gpt2").served)
    engine.submit(greedy("whole", [4, 5, 6], 60))
    whole = drain(engine)["whole"]
    assert tokenizer().decode(whole.token_ids).startswith(whole.text)
    rnd = random.Random(0)
    crossed = 0
    for _ in range(30):
        begin = rnd.randrange(1, len(whole.text) - 5)
        stop = whole.text[begin : begin + rnd.randint(1, 5)]
        engine.submit(greedy(stop, [4, 5, 6], 60, stop=(stop, "never this")))
        one = drain(engine)[stop]
        assert one.text == whole.text[: whole.text.index(stop)]
        assert last({stop: one}, stop).finish is Finish.STOP
        crossed += len(one.outputs) > 1 and len(stop) > 3
    assert crossed > 0


def test_seeds_do_not_depend_on_the_batch() -> None:
    def run(names: list[str], **settings: Any) -> dict[str, list[int]]:
        engine = engine_for(family("qwen2").served, **settings)
        for name in names:
            sampling = Sampling(max_tokens=12, temperature=1.2, top_p=0.95, top_k=50, seed=int(name))
            engine.submit(Request(name, [int(name), 2, 3], sampling))
        return {name: one.token_ids for name, one in drain(engine).items()}

    together = run(["1", "2", "3", "4", "5"])
    assert len({tuple(ids) for ids in together.values()}) == 5
    for name, token_ids in together.items():
        assert run([name], page_size=16)[name] == token_ids


def test_choices_of_one_seed_differ_and_repeat() -> None:
    def run() -> list[list[int]]:
        engine = engine_for(family("qwen2").served)
        for choice in range(3):
            sampling = Sampling(max_tokens=10, temperature=1.5, seed=7)
            engine.submit(Request(f"{choice}", [1, 2, 3], sampling, choice=choice))
        collected = drain(engine)
        return [collected[f"{choice}"].token_ids for choice in range(3)]

    first = run()
    assert first == run()
    assert len({tuple(ids) for ids in first}) == 3


def test_log_probabilities_are_those_of_the_plain_model() -> None:
    prompt = [11, 12, 13, 14, 15, 16, 17]
    engine = engine_for(family("llama").served, token_budget=8, slots=2)
    engine.submit(greedy("neighbour", [3, 3, 3], 9))
    engine.submit(greedy("it", prompt, 6, logprobs=3, prompt_logprobs=True))
    one = drain(engine)["it"]
    whole = [*prompt, *one.token_ids]
    with torch.no_grad():
        plain = torch.log_softmax(family("llama").plain(torch.tensor([whole])).logits[0].double(), dim=-1)
    found = [*[entry for output in one.outputs for entry in output.prompt_logprobs]]
    assert found[0].logprob is None
    found += [entry for output in one.outputs for entry in output.logprobs]
    assert len(found) == len(whole)
    for place, entry in enumerate(found[1:]):
        assert entry.logprob == pytest.approx(plain[place, whole[place + 1]].item(), abs=2e-3)
        assert [top.logprob for top in entry.top] == pytest.approx(
            plain[place].topk(3).values.tolist(), abs=2e-3
        )
    assert one.outputs[0].prompt_logprobs
    assert (
        b"".join(entry.raw for entry in found[len(prompt) :]).decode("utf-8", "replace").startswith(one.text)
    )


@pytest.mark.parametrize("prompt", [[1, 2, 3], [1]])
def test_an_answer_of_no_tokens_gives_the_prompt_alone(prompt: list[int]) -> None:
    engine = engine_for(family("llama").served)
    engine.submit(greedy("echo", prompt, 0, prompt_logprobs=True))
    one = drain(engine)["echo"]
    assert one.token_ids == []
    assert one.last is not None
    assert one.last.finish is Finish.LENGTH
    assert len(one.last.prompt_logprobs) == len(prompt)


def test_a_prompt_of_one_token_has_a_log_probability_of_none() -> None:
    engine = engine_for(family("llama").served)
    engine.submit(greedy("echo", [5], 2, logprobs=0, prompt_logprobs=True))
    one = drain(engine)["echo"]
    assert [each.logprob for each in one.outputs[0].prompt_logprobs] == [None]
    assert not one.outputs[1].prompt_logprobs
