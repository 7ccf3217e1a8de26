"""A model that is split over several processes answers as the whole one, and its ranks never drift apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Request, Sampling
from site_engine.core.tensor_split import part_of, part_shape, sizes_of
from site_engine.engine.build import packed_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.errors import ModelNotSupported
from site_engine.model.loader import LoadedModel, load
from site_engine.model.weights import read_parts
from site_engine.text.grammar import Grammars
from tests.support.engine_models import FAMILIES, Ticks, drain, greedy, greedy_answer, tokenizer
from tests.support.tensor_groups import Group, grouped, saved

torch.set_num_threads(1)
TIGHT = {"kv_tokens": 112, "debug_poison": True}
GRAMMAR = 'start: %json {"type": "array", "items": {"type": "integer"}, "minItems": 2}'


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    saved(folder, FAMILIES["llama"]())
    return folder


def config_of(name: str, **changes: Any) -> Any:
    config = FAMILIES[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    return config


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (config_of("llama"), 2),
        (config_of("mistral"), 2),
        (config_of("qwen2"), 2),
        (config_of("llama"), 4),  # with two KV heads
        (config_of("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True), 2),
    ],
    ids=["llama", "mistral", "qwen2", "shared KV heads", "biases and one embedding"],
)
def test_greedy_texts_are_those_of_the_whole_model(config: Any, size: int, tmp_path: Path) -> None:
    """With prompts in chunks, prefixes that are shared, and less memory than all need."""
    plain = saved(tmp_path, config)
    draw = Random(size)
    beginning = [draw.randrange(300) for _ in range(12)]
    asked = [[*beginning, *(draw.randrange(300) for _ in range(draw.choice((1, 9, 30))))] for _ in range(7)]
    with grouped(tmp_path, size, **TIGHT) as group:
        for number, prompt in enumerate(asked):
            request = greedy(str(number), prompt, 12)
            request.remaining = RemainingCurve.exactly(2)  # too few: the pages run out
            group.engine.submit(request)
        got = drain(group.engine)
    timings = [got[str(number)].outputs[-1].timings for number in range(len(asked))]
    assert any(each.preemptions for each in timings if each)
    assert any(each.cached_prompt_tokens for each in timings if each)
    for number, prompt in enumerate(asked):
        assert got[str(number)].token_ids == greedy_answer(plain, prompt, 12), number


def ruled(model: LoadedModel) -> Iterator[Request]:
    rules: dict[str, dict[str, Any]] = {
        "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        "bias": {"logit_bias": {17: 30.0}, "logprobs": 2},
        "drawn": {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 1.5},
        "echo": {"logprobs": 1, "prompt_logprobs": True},
        "plain": {},
    }
    for name, each in rules.items():
        yield Request(name, [3, 2, 1], Sampling(**{"temperature": 0.0, "max_tokens": 9} | each))
    request = greedy("guided", [3, 2, 1], 24)
    request.grammar = Grammars(tokenizer(), model.vocab_size, ()).compile(GRAMMAR, "")
    yield request


def answers(engine: SiteEngine) -> dict[str, list[int]]:
    for request in ruled(engine._model):
        engine.submit(request)
    return {name: one.token_ids for name, one in drain(engine).items()}


def test_rules_of_sampling_need_the_leader_alone(llama: Path) -> None:
    chosen = EngineSettings(slots=6, token_budget=32, page_size=4, kv_tokens=512)
    wanted = answers(packed_engine(load(str(llama)), chosen, Ticks()))
    with grouped(llama) as group:
        assert answers(group.engine) == wanted


def test_residuals_are_equal_bit_by_bit(llama: Path) -> None:
    with grouped(llama, 4) as group:
        seen = record(group)
        answers(group.engine)
    assert len(seen[0]) > 20
    for rank in range(1, 4):
        assert len(seen[rank]) == len(seen[0])
        assert all(torch.equal(*pair) for pair in zip(seen[0], seen[rank], strict=True))


def record(group: Group) -> dict[int, list[torch.Tensor]]:
    """Keep what each layer of each rank returns from now on."""
    seen: dict[int, list[torch.Tensor]] = {rank: [] for rank in group.models}
    for rank, model in group.models.items():
        for layer in model.model.model.layers:
            layer.register_forward_hook(
                lambda module, given, out, rank=rank: seen[rank].append(out.detach().clone())
            )
    return seen


def test_ranks_read_what_they_keep_and_nothing_else(tmp_path: Path) -> None:
    plain = saved(tmp_path, FAMILIES["llama"](), torch.bfloat16)
    state = plain.state_dict()
    sizes = sizes_of(plain.config.to_dict(), 2)
    for rank in range(2):
        parts = {name: part_of(name, tuple(each.shape), sizes, rank, 2) for name, each in state.items()}
        kept = {name: part_shape(part, tuple(state[name].shape)) for name, part in parts.items()}
        numbers = sum(torch.Size(shape).numel() for shape in kept.values())
        size, header = tmp_path.joinpath("model.safetensors").stat().st_size, 8 + header_bytes(tmp_path)
        assert numbers < 0.8 * sum(each.numel() for each in state.values()) < size
        before = bytes_read()
        weights = read_parts(tmp_path, parts, torch.device("cpu"))
        assert bytes_read() - before < 2 * numbers + 2 * header + 4096  # the header is read in whole blocks
        for name, (begin, end) in {name: part.rows for name, part in parts.items()}.items():
            columns = parts[name].columns
            whole = state[name][begin:end] if columns is None else state[name][:, slice(*columns)]
            assert torch.equal(weights[name], whole.to(torch.bfloat16)), name


def bytes_read() -> int:
    """Return the bytes that this process has read by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def header_bytes(folder: Path) -> int:
    with folder.joinpath("model.safetensors").open("rb") as file:
        return int.from_bytes(file.read(8), "little")


def test_a_request_leaves_a_group_without_the_keys_and_values_of_one_rank(llama: Path) -> None:
    with grouped(llama) as group:
        group.engine.submit(greedy("one", [5, 6, 7], 8))
        outputs = [output for _ in range(4) for output in group.engine.step()]
        more, moved = group.engine.export("one")
        begun = [token for output in (*outputs, *more) for token in output.token_ids]
        assert moved is not None and begun
        assert group.engine.inbox.open() is None
        assert (moved.computed, moved.place) == (0, None)
        request = Request("one", [5, 6, 7], Sampling(max_tokens=8, temperature=0.0), resumed=tuple(begun))
        group.engine.submit(request, moved)
        rest = drain(group.engine)["one"].token_ids
    alone = packed_engine(load(str(llama)), EngineSettings(page_size=4, kv_tokens=64), Ticks())
    alone.submit(greedy("one", [5, 6, 7], 8))
    assert begun + rest == drain(alone)["one"].token_ids


def test_a_step_that_fails_on_a_rank_is_told_to_what_ends_the_group(llama: Path) -> None:
    with pytest.raises(AssertionError), grouped(llama) as group:
        raised = RuntimeError("no memory")
        with pytest.raises(RuntimeError), group.models[0].group.step(None):  # type: ignore[union-attr]
            raise raised
        assert group.failures == [raised]


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, 2, "GPT2LMHeadModel cannot be split"),
        ({"num_attention_heads": 9}, 2, "9 attention heads"),
        ({"intermediate_size": 47}, 2, "47 columns"),
        ({"num_key_value_heads": 3}, 2, "3 KV heads"),
    ],
)
def test_what_cannot_be_split_is_refused(changes: dict[str, Any], ranks: int, reason: str) -> None:
    config = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 64}
    with pytest.raises(ModelNotSupported, match=reason):
        sizes_of(config | {"architectures": ["LlamaForCausalLM"]} | changes, ranks)


def test_a_model_that_is_no_folder_is_not_split(tmp_path: Path) -> None:
    with pytest.raises(ModelNotSupported, match="folder"), grouped(tmp_path / "none"):
        pass
