"""An artifact learns from outcomes, knows new models afterwards, and is replaced only by a better one."""

import os
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from predictor.artifact import KINDS, LEXICAL_NAME, SHIPPED, digest_of, export, write
from predictor.artifact import read as read_artifact
from predictor.data.dataset import file_digest, prompt_percent, read
from predictor.errors import ArtifactError, DataError, RefusedUpdate
from predictor.hot_reload import HotReloadForecaster
from predictor.onnx_forecaster import Features, OnnxForecaster
from predictor.outcome_log import NEWEST, OutcomeLog, log_files
from predictor.training import length_head
from predictor.update.update import HELD_OUT_PERCENT, update

pytestmark = pytest.mark.slow

LEXICAL = SHIPPED / LEXICAL_NAME
STORY = "Write a story about a fox and a lighthouse."


def outcomes(path: Path, count: int, model: str = "terse/model", tokens: int = 4) -> Path:
    """Write outcomes of a model whose answers all have about the same length."""
    kinds = ("Write a story about {}.", "What is {}?", "List ten facts about {}.")
    rows = [
        {
            "source": "test",
            "prompt_id": f"p{index}",
            "prompt": kinds[index % 3].format(f"thing number {index}"),
            "model": model,
            "response_tokens": tokens + index % 3,
        }
        for index in range(count)
    ]
    pd.DataFrame(rows).to_parquet(path)
    return path


def expected(folder: Path, model: str) -> float:
    (found,) = OnnxForecaster(folder).forecast([Features(STORY, model)])
    return found.expected()


def test_a_new_model_is_learned_from_its_outcomes(tmp_path: Path) -> None:
    data, folder = outcomes(tmp_path / "outcomes.parquet", 300), tmp_path / "new"
    report = update(LEXICAL, data, out=folder, steps=150)
    fresh = OnnxForecaster(folder)
    assert fresh.knows("terse/model")
    assert not OnnxForecaster(LEXICAL).knows("terse/model")
    assert expected(folder, "terse/model") < expected(LEXICAL, "terse/model") / 3
    assert report["outcomes"]["after"]["log_loss"] < report["outcomes"]["before"]["log_loss"]
    assert fresh.card.trained_on["updates"][0]["figures"] == report


def test_after_an_update_the_p90_covers_about_90_percent(tmp_path: Path) -> None:
    data = outcomes(tmp_path / "outcomes.parquet", 900)
    rows = pd.read_parquet(data)
    forecasts = OnnxForecaster(LEXICAL).forecast([Features(text, "text-davinci-003") for text in rows.prompt])
    chance = np.random.default_rng(4).random(len(rows))
    rows["response_tokens"] = [1 + each.quantile(q) // 2 for each, q in zip(forecasts, chance, strict=True)]
    rows.to_parquet(data)
    report = update(LEXICAL, data, out=tmp_path / "new", steps=40)
    after = report["outcomes"]["after"]
    assert after["rows"] > 150
    assert 0.86 <= after["p90_coverage"] <= 0.94


def test_a_rehearsal_keeps_what_is_forecast_elsewhere(tmp_path: Path) -> None:
    elsewhere = outcomes(tmp_path / "elsewhere.parquet", 300, "text-davinci-003", tokens=900)
    data = outcomes(tmp_path / "outcomes.parquet", 300)
    update(LEXICAL, data, out=tmp_path / "new", elsewhere=elsewhere, steps=40)
    assert expected(tmp_path / "new", "terse/model") < 40
    before = expected(LEXICAL, "text-davinci-003")
    assert expected(tmp_path / "new", "text-davinci-003") == pytest.approx(before, rel=0.15)


def test_without_a_rehearsal_other_models_are_forecast_as_before(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    update(LEXICAL, outcomes(tmp_path / "outcomes.parquet", 300), out=folder, steps=20)
    assert expected(folder, "text-davinci-003") == pytest.approx(expected(LEXICAL, "text-davinci-003"))


def test_an_update_that_is_no_better_is_refused(tmp_path: Path) -> None:
    data, folder = outcomes(tmp_path / "outcomes.parquet", 300, "gpt-4-1106-preview"), tmp_path / "new"
    rows = pd.read_parquet(data)
    kept_aside = rows.prompt_id.map(prompt_percent) < HELD_OUT_PERCENT
    rows.loc[kept_aside, "response_tokens"] = 500
    rows.to_parquet(data)
    with pytest.raises(RefusedUpdate, match="the artifact stays"):
        update(LEXICAL, data, out=folder, steps=40)
    assert not folder.exists()


def test_a_head_whose_training_ends_in_no_numbers_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = length_head.tune

    def diverges(*given: Any, **chosen: Any) -> length_head.LengthHead:
        tuned = tune(*given, **chosen)
        tuned.models.weight.data.fill_(float("nan"))
        return tuned

    monkeypatch.setattr(length_head, "tune", diverges)
    data = outcomes(tmp_path / "outcomes.parquet", 300)
    update(LEXICAL, data, out=tmp_path / "new", steps=40)  # to the nearest known model's, recalibrated
    assert expected(tmp_path / "new", "terse/model") < expected(LEXICAL, "terse/model")


def test_a_loss_elsewhere_is_refused(tmp_path: Path) -> None:
    elsewhere = outcomes(tmp_path / "elsewhere.parquet", 300, "gpt-4", tokens=4)
    data = outcomes(tmp_path / "outcomes.parquet", 300)
    with pytest.raises(RefusedUpdate, match="elsewhere"):
        update(LEXICAL, data, out=tmp_path / "new", elsewhere=elsewhere, margin=-1.0, steps=20)


def test_other_traffic_may_have_the_new_model_too(tmp_path: Path) -> None:
    files = [outcomes(tmp_path / f"{model}.parquet", 300, model) for model in ("gpt-4", "terse")]
    pd.concat([pd.read_parquet(file) for file in files]).to_parquet(tmp_path / "elsewhere.parquet")
    report = update(
        LEXICAL, files[1], out=tmp_path / "new", elsewhere=tmp_path / "elsewhere.parquet", steps=20
    )
    assert report["elsewhere"]["after"]["log_loss"] < report["elsewhere"]["before"]["log_loss"]
    assert OnnxForecaster(tmp_path / "new").knows("terse")


def test_one_prompt_that_is_asked_again_and_again_is_learned_from(tmp_path: Path) -> None:
    data = outcomes(tmp_path / "outcomes.parquet", 300)
    rows = pd.read_parquet(data).sort_values("prompt_id", key=lambda ids: ids.map(prompt_percent))
    rows.iloc[:60, 1:3] = rows.iloc[0, 1:3]
    rows.iloc[60:, 1:3] = rows.iloc[-1, 1:3]
    rows.to_parquet(data)
    update(LEXICAL, data, out=tmp_path / "new", steps=40)
    assert OnnxForecaster(tmp_path / "new").knows("terse/model")


def test_too_few_outcomes_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows to learn from"):
        update(LEXICAL, outcomes(tmp_path / "outcomes.parquet", 20), out=tmp_path / "new")


def test_a_server_takes_up_the_new_artifact_and_keeps_the_old_beside_a_damaged_one(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    data = outcomes(tmp_path / "outcomes.parquet", 300)
    update(LEXICAL, data, out=folder, steps=5)
    serving = HotReloadForecaster(folder)
    query = [Features(STORY, "terse/model")]
    before = serving.forecast(query)[0].expected()
    assert not serving.refresh()
    update(folder, data, steps=200)
    assert serving.forecast(query)[0].expected() == before
    assert serving.refresh()
    assert serving.forecast(query)[0].expected() < before


def test_what_was_learned_of_models_that_a_new_artifact_does_not_know_stays(tmp_path: Path) -> None:
    folder, data = tmp_path / "served", outcomes(tmp_path / "outcomes.parquet", 300)
    shutil.copytree(LEXICAL, folder)
    serving = HotReloadForecaster(folder)
    terse, unseen, other = (Features("What is it?", name) for name in ("terse/model", "un/seen", "an/other"))
    untaught = serving.forecast([unseen])[0].expected()
    for _ in range(24):
        serving.observe(unseen, 5)
        serving.observe(terse, 900)
    before = serving.forecast([unseen])[0]
    assert before.expected() < untaught / 2
    update(folder, data, steps=40)
    assert serving.refresh()
    learned, known, unknown = serving.forecast([unseen, terse, other])
    assert abs(learned.expected() - before.expected()) < (untaught - before.expected()) / 8
    assert " like " in learned.source and learned.source.startswith(serving.name)
    assert (known.source, known.expected() < 20) == (serving.name, True), "the artifact itself knows it"
    assert unknown.source == f"{serving.name}:unknown-model"
    for _ in range(60):
        serving.observe(unseen, 900)
    assert serving.forecast([unseen])[0].expected() > 2 * before.expected(), "it goes on to learn"


def test_an_outcome_log_is_learned_from_without_a_conversion(tmp_path: Path) -> None:
    kept = OutcomeLog(tmp_path / "outcomes")
    rows = pd.read_parquet(outcomes(tmp_path / "same.parquet", 300))
    for row in rows.itertuples():
        kept.add(Features(row.prompt, row.model), int(row.response_tokens))
    kept.add(Features("\ud800 你好", "terse/model"), 4)
    folder = tmp_path / "new"
    report = update(LEXICAL, tmp_path / "outcomes", out=folder, steps=40)
    assert report["outcomes"]["after"]["log_loss"] < report["outcomes"]["before"]["log_loss"]
    assert OnnxForecaster(folder).knows("terse/model")


def test_limits_of_answers_are_not_learned_as_their_lengths(tmp_path: Path) -> None:
    """Clients cut answers at 128. Without those, the same update would forecast 84% to be shorter."""
    draw, limit, kept = np.random.default_rng(3), 128, OutcomeLog(tmp_path / "outcomes")
    prompts = pd.read_parquet(outcomes(tmp_path / "same.parquet", 900)).prompt
    lengths = 1 + draw.lognormal(5.3, 0.8, len(prompts)).astype(int)
    for text, length in zip(prompts, lengths.tolist(), strict=True):
        kept.add(Features(text, "long/model"), min(length, limit), ended=length <= limit)
    assert read(tmp_path / "outcomes").response_tokens.max() <= limit
    update(LEXICAL, tmp_path / "outcomes", out=tmp_path / "new", steps=150)
    forecasts = OnnxForecaster(tmp_path / "new").forecast([Features(text, "long/model") for text in prompts])
    within = np.mean([each.share_within(limit) for each in forecasts])
    assert within == pytest.approx((lengths <= limit).mean(), abs=0.15)
    assert np.mean([each.expected() for each in forecasts]) > limit


def test_an_update_is_judged_by_lengths_that_are_known(tmp_path: Path) -> None:
    """Drawn lengths would confirm what is forecast: answers cut at 100 say nothing of those beyond."""
    kept = OutcomeLog(tmp_path / "outcomes")
    for number in range(300):
        kept.add(Features(f"What is {number}?", "long/model"), 100, ended=False)
    with pytest.raises(DataError, match="0 to judge by that no limit cut short"):
        update(LEXICAL, tmp_path / "outcomes", out=tmp_path / "new")
    for number in range(300, 900):
        kept.add(Features(f"What is {number}?", "long/model"), 1_500)
    report = update(LEXICAL, tmp_path / "outcomes", out=tmp_path / "new", steps=40)["outcomes"]
    assert 100 < report["after"]["rows"] < 150  # a fifth of 600
    assert report["after"]["mae_tokens"] > 500, "they are of 1,500, of which it has learned a part"
    assert report["before"]["log_loss"] > report["after"]["log_loss"]


def test_an_outcome_log_is_read_by_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that an operator had made, what users asked could be read by everyone on the machine."""
    monkeypatch.setattr("predictor.outcome_log.MAX_LINES", 1)
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        for number in range(2):
            OutcomeLog(tmp_path).add(Features(f"a secret, {number}", "m"), 1)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(file.stat().st_mode) for file in log_files(tmp_path)] == [0o600, 0o600]


def test_an_outcome_log_keeps_the_newest_and_continues_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predictor.outcome_log.MAX_LINES", 10)
    for start in (0, 18):
        kept = OutcomeLog(tmp_path)
        for number in range(start, start + 18):
            kept.add(Features(f"question {number}", "m"), number + 1)
    lengths = read(tmp_path).response_tokens.tolist()
    assert lengths == list(range(lengths[0], 37))
    assert 10 <= len(lengths) <= 20


def test_a_folder_without_outcomes_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="start the gateway with"):
        update(LEXICAL, tmp_path)


def test_a_torn_line_costs_no_other_outcome(tmp_path: Path) -> None:
    """As a full disk or a power cut leaves it: what came behind joined that line, and none was read."""
    folder = tmp_path / "outcomes"
    kept = OutcomeLog(folder)
    kept.add(Features("first", "m"), 1)
    with (folder / NEWEST).open("a") as file:
        file.write('{"source": "serv')
    OutcomeLog(folder).add(Features("second", "m"), 2)
    with (folder / NEWEST).open("a") as file:
        file.write('{"source": "served", "prompt_id"')
    assert read(folder).response_tokens.tolist() == [1, 2]


def test_a_failed_write_costs_no_other_outcome(tmp_path: Path) -> None:
    kept = OutcomeLog(tmp_path)
    (tmp_path / NEWEST).mkdir()
    with pytest.raises(IsADirectoryError):
        kept.add(Features("lost", "m"), 1)
    (tmp_path / NEWEST).rmdir()
    kept.add(Features("second", "m"), 2)
    assert read(tmp_path).response_tokens.tolist() == [2]


def test_outcomes_are_read_whole_while_a_gateway_adds_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None twice and none left out, whatever was renamed between a look and the next."""
    monkeypatch.setattr("predictor.outcome_log.MAX_LINES", 40)
    kept, added = OutcomeLog(tmp_path), 80
    for number in range(added):
        kept.add(Features("q", "m"), number + 1)

    def add_more() -> None:
        for number in range(added, 1_000):
            kept.add(Features("q", "m"), number + 1)

    writing = threading.Thread(target=add_more)
    writing.start()
    while writing.is_alive():
        lengths = read(tmp_path).response_tokens.tolist()
        assert lengths == list(range(lengths[0], lengths[0] + len(lengths)))
        assert 40 <= len(lengths) <= 80
        assert len(file_digest(tmp_path)) == 64
    writing.join()


def test_the_card_records_the_outcomes_read_though_more_are_appended_meanwhile(tmp_path: Path) -> None:
    data = outcomes(tmp_path / "outcomes.parquet", 300)
    before = file_digest(data)

    def more_comes(_: str) -> None:
        data.write_bytes(b"other")

    update(LEXICAL, data, out=tmp_path / "new", steps=5, progress=more_comes)
    assert OnnxForecaster(tmp_path / "new").card.trained_on["updates"][0]["sha256"] == before


def test_a_models_name_is_compared_without_case(tmp_path: Path) -> None:
    """A gateway serves `GPT-4` as `gpt-4`, so that is what an update has to be better than."""
    reports = [
        update(LEXICAL, outcomes(tmp_path / f"{name}.parquet", 300, name), out=tmp_path / name, steps=5)
        for name in ("gpt-4", "GPT-4")
    ]
    assert reports[0] == reports[1]
    assert OnnxForecaster(tmp_path / "GPT-4").card.models == OnnxForecaster(LEXICAL).card.models


@pytest.mark.parametrize("rows", [0, 1])
def test_a_corpus_too_small_to_rehearse_is_refused(tmp_path: Path, rows: int) -> None:
    elsewhere = outcomes(tmp_path / "elsewhere.parquet", 3)
    pd.read_parquet(elsewhere).head(rows).to_parquet(elsewhere)
    with pytest.raises(DataError, match="rows to rehearse"):
        update(LEXICAL, outcomes(tmp_path / "o.parquet", 300), out=tmp_path / "new", elsewhere=elsewhere)


def test_an_artifact_is_whole_at_any_instant_of_its_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that is killed, or finds the disk full, leaves the old artifact or the new one."""
    folder, seen = tmp_path / "served", []
    export(SHIPPED / KINDS["small"], folder)
    old = read_artifact(folder)
    new = replace(old.card, name="newer", digest=digest_of(b"g"), vocabulary_digest=digest_of(b"v\n"))

    def look(*_: object) -> None:
        seen.append(read_artifact(folder).card.name)

    def looking(act: Callable[..., object]) -> Callable[..., object]:
        def done(*arguments: object) -> object:
            look()
            found = act(*arguments)
            look()
            return found

        return done

    monkeypatch.setattr(os, "fsync", looking(os.fsync))
    monkeypatch.setattr(Path, "replace", looking(Path.replace))
    write(folder, b"g", new, ["v"])
    assert seen[0] == old.card.name
    assert seen[-1] == read_artifact(folder).card.name == "newer"
    assert {file.name for file in folder.iterdir()} == {"card.json", "model.onnx", "vocab.txt"}


def test_a_full_disk_leaves_the_artifact_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "served"
    export(LEXICAL, folder)
    before = read_artifact(folder)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(folder, b"g", replace(before.card, digest=digest_of(b"g")))
    assert read_artifact(folder) == before
    assert {file.name for file in folder.iterdir()} == {"card.json", "model.onnx"}


def test_a_full_disk_after_an_interrupted_replacement_leaves_what_was_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, killed = tmp_path / "served", 2
    export(SHIPPED / KINDS["small"], folder)
    before = read_artifact(folder)
    new = replace(before.card, name="newer", digest=digest_of(b"g"))
    rename, sync, done = Path.replace, os.fsync, []

    def interrupted(act: Callable[..., object]) -> Callable[..., object]:
        def acted(*arguments: object) -> object:
            done.append(act)
            if len(done) > killed:
                raise OSError(28, "No space left on device")
            return act(*arguments)

        return acted

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted(rename))
        with pytest.raises(OSError, match="No space left"):
            write(folder, b"g", new, before.vocabulary)
    assert read_artifact(folder).card == new
    done.clear()
    monkeypatch.setattr(os, "fsync", interrupted(sync))
    with pytest.raises(OSError, match="No space left"):
        write(folder, b"h", replace(new, digest=digest_of(b"h")), before.vocabulary)
    assert read_artifact(folder).card == new


def test_of_two_updates_of_one_artifact_the_slower_does_not_undo_the_faster(tmp_path: Path) -> None:
    folder, data = tmp_path / "served", outcomes(tmp_path / "outcomes.parquet", 300)
    export(LEXICAL, folder)
    begun: list[str] = []

    def interrupt(forecasts: str) -> None:
        if not begun:
            begun.append(forecasts)
            update(folder, data, steps=5)

    with pytest.raises(ArtifactError, match="another update"):
        update(folder, data, steps=5, progress=interrupt)
    assert len(OnnxForecaster(folder).card.trained_on["updates"]) == 1
