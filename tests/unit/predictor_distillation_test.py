"""A language model generates prompts like a corpus's and learns lengths; better teachers weigh more."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from predictor.data import labels, prepare
from predictor.data.augment import GeneratedPrompt
from predictor.data.prepare import CALIBRATION, HELD_OUT, SYNTHETIC, TRAIN, TrainingArrays
from predictor.errors import DataError
from predictor.evaluation import metrics
from predictor.training import train, train_loop
from predictor.training.distillation import ensemble, lm_teacher, synthetic_prompts, teachers
from predictor.training.train_loop import TrainConfig
from tests.support.fakes import pretrained

pytestmark = pytest.mark.slow

EDGES = labels.log_spaced_edges()
RECIPE = TrainConfig(epochs=4, batch_prompts=32, body_rate=3e-3, head_rate=1e-2, beside=1.0, seed=1)
GENERATOR = synthetic_prompts.PromptGeneratorConfig(
    TrainConfig(epochs=16, batch_prompts=16, body_rate=2e-2, head_rate=2e-2), at_once=64
)


def silent(_: str) -> None:
    """Discard progress."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    return str(pretrained.language_model_in(tmp_path_factory.mktemp("language")))


@pytest.fixture(scope="module")
def chats(model: str, tmp_path_factory: pytest.TempPathFactory) -> TrainingArrays:
    """Return a corpus with answers' texts in a language model's tokens, with four generated prompts."""
    frame = pretrained.corpus()[::2].assign(turn=1, answer="A story .")
    vocabulary = train.read_vocabulary(str(pretrained.encoder_in(tmp_path_factory.mktemp("encoder"))))
    generated = [
        GeneratedPrompt(f"What is a {word}?", "questions") for word in ("story", "long", "thing", "what")
    ]
    data = prepare.prepare(frame, vocabulary, mixed=6, seed=1, generated=generated)
    return teachers.tokenize_chats(data, lm_teacher.ChatTokenizer(model))


def test_a_prompt_is_encoded_as_a_turn_without_a_system_prompt(model: str) -> None:
    tokens = lm_teacher.ChatTokenizer(model)
    rows = tokens.encode_chats(["What is thing 7 ?", "What is " + "a " * 300 + "?"])
    read = [[token for token in row if token] for row in rows.tolist()]
    assert tokens.encode(["<user> What is thing 7 ?<end><assistant>"]) == read[:1]
    assert len(read[1]) == lm_teacher.HEAD_TOKENS + lm_teacher.TAIL_TOKENS + 3
    assert tokens.decode(read[:1]) == ["What is thing 7 ?"]
    whole, cut = tokens.encode_padded(["a thing .", "a " * 99], 5).tolist()
    assert whole == [*tokens.encode(["a thing ."])[0], tokens.end, *[0] * (len(whole) - 4)]
    assert cut[:5] == tokens.encode(["a a a a a"])[0]


def test_padding_does_not_change_the_encoding(model: str) -> None:
    body, tokens = lm_teacher.LanguageModelEncoder(model).eval(), lm_teacher.ChatTokenizer(model)
    rows = torch.tensor(tokens.encode_chats(["What is thing 7 ?", "Write a long story about thing 8 ."]))
    with torch.no_grad():
        both, alone = body(rows), body(rows[:1, : int((rows[0] != 0).sum())])
    assert both.shape == (2, 64)
    torch.testing.assert_close(both[:1], alone)


def test_generated_prompts_resemble_the_corpus(model: str) -> None:
    frame = pretrained.corpus().drop_duplicates("prompt_id")[::3]
    texts, lines = [f"{text[:-1]} {text[-1]}" for text in frame.prompt], []
    excluded = frozenset(texts[::2])
    generated = synthetic_prompts.generate_prompts(
        texts, list(frame.source), model, 60, GENERATOR, excluded=excluded, progress=lines.append
    )
    begins = {"stories": "Write a long story about", "questions": "What is"}
    like = [each.text.startswith(begins[each.source]) for each in generated]
    assert len(generated) > 20 and np.mean(like) > 0.9
    assert len({each.text for each in generated}) == len(generated)
    assert {each.text for each in generated} & set(texts) and not {each.text for each in generated} & excluded
    assert lines[-1] == f"{len(generated)} new prompts asked"


def test_generated_prompts_have_rows_of_models_of_their_source(chats: TrainingArrays) -> None:
    synthetic = chats.rows(SYNTHETIC)
    assert len(synthetic) == 3 * 4 + 2 * 6
    assert set(chats.length[synthetic]) == {0} and chats.models[0] not in {
        chats.models[i] for i in chats.model[synthetic]
    }
    assert [text for text in chats.texts if text.startswith("What is a ")] == list(chats.texts[300 * 2 :][:4])


def test_it_forecasts_stories_longer_than_questions(chats: TrainingArrays, model: str) -> None:
    lines: list[str] = []
    net = teachers.train_language_model(chats, model, RECIPE, EDGES, "cpu", lines.append)
    rows = chats.rows(HELD_OUT)
    probabilities = torch.softmax(torch.tensor(train_loop.predict_logits(net, chats, rows)), 1).numpy()
    mean = metrics.expected(probabilities, EDGES)
    story = np.array([chats.texts[prompt].startswith("Write") for prompt in chats.prompt[rows]])
    assert len(rows) > 40 and mean[story].min() > 2 * mean[~story].max()


def test_it_learns_how_answers_begin(chats: TrainingArrays, model: str) -> None:
    assert chats.answers is not None
    body = lm_teacher.LanguageModelEncoder(model)
    net = teachers.new_net(body, chats, EDGES)
    task = lm_teacher.AnswerPrefixTask(chats.answers, body, len(chats.models))
    rows = torch.tensor(chats.rows(TRAIN)[:8])
    pieces = torch.tensor(chats.pieces[chats.prompt[rows]])
    shown = (pieces, torch.arange(8), rows, torch.tensor(chats.model[rows]))
    optimizer = torch.optim.Adam([*net.parameters(), *task.parameters()], lr=1e-2)
    read, before = task.encode(net, *shown)
    torch.testing.assert_close(read, net.encode(pieces))
    for _ in range(30):
        optimizer.zero_grad()
        task.encode(net, *shown)[1].backward()
        optimizer.step()
    assert task.encode(net, *shown)[1] < 0.1 * before
    unanswered = torch.tensor(chats.rows(CALIBRATION)[:8])
    assert task.encode(net, *shown[:2], unanswered, shown[3])[1] == 0.0


def test_a_held_out_fold_does_not_influence_its_teacher(chats: TrainingArrays, model: str) -> None:
    """Whatever the fold contains, the teacher forecasts all rows the same."""
    assert chats.answers is not None
    held_out = teachers.held_out_fold(chats, 1, 4)
    assert 0.1 < held_out[:600].mean() < 0.4
    own = held_out[chats.prompt] & (chats.part == TRAIN)
    other = replace(
        chats,
        pieces=np.where(held_out[:, None] & (chats.pieces > 0), 7, chats.pieces),
        side=np.where(held_out[:, None], 9.0, chats.side).astype(np.float32),
        length=np.where(own, 1000, chats.length),
        answers=chats.answers._replace(
            prefix=np.where(
                own[chats.answers.of_row >= 0, None] & (chats.answers.prefix > 0), 9, chats.answers.prefix
            )
        ),
    )
    once, outputs = replace(RECIPE, epochs=1), []
    for data in (chats, other):
        net = teachers.train_language_model(data.hold_out(held_out), model, once, EDGES, "cpu", silent)
        outputs.append(train_loop.predict_logits(net, chats, np.arange(len(chats.prompt))))
    assert own.sum() > 50
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_an_epoch_draws_an_answered_prompt_twice(chats: TrainingArrays) -> None:
    rows = chats.rows(TRAIN, SYNTHETIC)
    visits = np.where(chats.length > 0, 2, 1)
    draw = train_loop.BatchSampler(chats.pieces, chats.prompt, rows, replace(RECIPE, batch_prompts=7), visits)
    drawn = list(draw.epoch())
    times = np.bincount(np.concatenate([each.prompts for each in drawn]), minlength=len(chats.pieces))
    assert len(drawn) == draw.batches
    assert set(times[np.unique(chats.prompt[chats.rows(TRAIN)])]) == {2}
    assert set(times[np.unique(chats.prompt[chats.rows(SYNTHETIC)])]) == {1}
    assert times.sum() == 2 * len(set(chats.prompt[chats.rows(TRAIN)])) + len(
        set(chats.prompt[chats.rows(SYNTHETIC)])
    )


def test_folds_are_disjoint_and_whole(chats: TrainingArrays) -> None:
    folds = [teachers.held_out_fold(chats, number, 4) for number in range(4)]
    assert (np.sum(folds, axis=0) == 1).all()
    assert not teachers.held_out_fold(chats, 0, 1).any()


def forecasts(chats: TrainingArrays, noise: float) -> np.ndarray:
    """Return probabilities of each row around its length, noisier with larger `noise`."""
    random = np.random.default_rng(int(10 * noise))
    off = np.maximum(chats.length, 1) * 2.0 ** random.normal(0, noise, len(chats.length))
    return labels.soft_targets(off.astype(np.int64), EDGES, 0.5).astype(np.float16)


def test_the_better_teacher_has_the_larger_weight(chats: TrainingArrays) -> None:
    outputs = [forecasts(chats, noise) for noise in (2.0, 0.2)]
    mixture = ensemble.fit(outputs, chats, EDGES)
    ((worse, better),) = mixture.weights()
    assert worse < 0.25 and better > 0.75
    (worse_factor,), (better_factor,) = mixture.log_factors.exp().tolist()
    assert worse_factor < better_factor
    rows, none = chats.rows(HELD_OUT), [np.zeros(len(chats.pieces), dtype=bool)] * 2
    targets = ensemble.distillation_targets(mixture, outputs, chats, none, 0.7)
    label = labels.range_index(chats.length[rows], EDGES)

    def loss(lines: np.ndarray) -> float:
        return float(-np.log(lines[rows, label].astype(np.float64) + 1e-6).mean())

    assert loss(targets) < min(map(loss, outputs))


def test_training_targets_are_mostly_from_teachers_that_held_the_prompt_out(chats: TrainingArrays) -> None:
    outputs = [forecasts(chats, noise) for noise in (0.3, 0.4)]
    held_out = [teachers.held_out_fold(chats, number, 4) for number in range(2)]
    even = ensemble.fit(outputs, replace(chats, part=np.full_like(chats.part, TRAIN)), EDGES)
    targets = ensemble.distillation_targets(even, outputs, chats, held_out, 0.7).astype(np.float64)
    both = np.mean([each.astype(np.float64) for each in outputs], axis=0)
    by_first = held_out[0][chats.prompt] & (chats.part == TRAIN)
    np.testing.assert_allclose(targets[by_first], (0.7 * outputs[0] + 0.3 * both)[by_first], atol=2e-3)
    others = ~(held_out[0] | held_out[1])[chats.prompt] | (chats.part != TRAIN)
    np.testing.assert_allclose(targets[others], both[others], atol=2e-3)


def test_a_folder_without_a_language_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        lm_teacher.ChatTokenizer(str(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        lm_teacher.LanguageModelEncoder(str(tmp_path))
