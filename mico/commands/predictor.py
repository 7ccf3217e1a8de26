"""`mico predictor …`: what it expects of a text, how good it is on data, and how to make a new one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.errors import CommandFailed
from mico.session import Json, Session, session

if TYPE_CHECKING:
    from predictor.runtime import OnnxForecaster

Artifact = Annotated[Path | None, typer.Option(help="An artifact's folder. [default: the shipped one]")]
Corpus = Annotated[
    Path,
    typer.Argument(
        exists=True, dir_okay=False, help="A parquet file of prompts with the lengths of answers."
    ),
]
FIGURES = ("rows", "spearman", "mae_of_mean", "mae_of_p50", "p90_coverage", "accuracy_512", "majority_512")

app = typer.Typer(help="The length predictor.", no_args_is_help=True)


@app.command("forecast")
def forecast(
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="A question, as a user would ask it.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model that would answer.")] = "mico-demo",
    artifact: Artifact = None,
    as_json: Json = False,
) -> None:
    """How long the answer will be, in tokens: a distribution, not a number."""
    from predictor.runtime import Features

    here = session(context)
    (expected,) = opened(artifact).forecast([Features(text, model)])
    facts: dict[str, Any] = {
        "expected_tokens": round(expected.expected(), 1),
        "p50_tokens": expected.quantile(0.5),
        "p90_tokens": expected.quantile(0.9),
        "source": expected.source,
    }
    show(
        here,
        [facts],
        as_json=as_json,
        whole={**facts, "edges": expected.edges, "probabilities": expected.probabilities},
    )


@app.command("evaluate")
def evaluate(context: typer.Context, data: Corpus, artifact: Artifact = None, as_json: Json = False) -> None:
    """Score an artifact on the held-out part of a corpus, by source and answering model."""
    from predictor import dataset
    from predictor.train import held_out_figures

    here = session(context)
    forecaster = opened(artifact)
    with here.terminal.spinner(f"scoring {forecaster.name}"):
        found: dict[str, Any] = held_out_figures(forecaster, dataset.split(dataset.read(data)).held_out)
    rows = [{"answers": name, **{key: each[key] for key in FIGURES}} for name, each in found.items()]
    show(here, rows, as_json=as_json, whole=found)


@app.command("train")
def train(
    context: typer.Context,
    *,
    data: Corpus,
    out: Annotated[Path, typer.Argument(help="The folder for the new artifact.")],
    name: Annotated[str, typer.Option(help="What forecasts made by it are called.")] = "lexical",
    seed: Annotated[int, typer.Option(help="The same seed and data give the same artifact.")] = 7,
    as_json: Json = False,
) -> None:
    """Train the lexical model and write it with its card. Serve it with `predictor = FOLDER` of a gateway."""
    from predictor.train import train_lexical

    here = session(context)
    card = train_lexical(data, out, name=name, seed=seed, progress=here.terminal.say)
    here.terminal.say(f"{card.name} is in {out}")
    rows = [
        {"answers": key, **{each: value[each] for each in FIGURES}} for key, value in card.figures.items()
    ]
    show(here, rows, as_json=as_json, whole=card.figures)


def opened(folder: Path | None) -> OnnxForecaster:
    from predictor.artifact import DEFAULT_NAME, SHIPPED
    from predictor.errors import ArtifactError
    from predictor.runtime import OnnxForecaster

    try:
        return OnnxForecaster(folder or SHIPPED / DEFAULT_NAME)
    except ArtifactError as error:
        raise CommandFailed(
            "the predictor can't be loaded", cause=str(error), tip="mico predictor train makes one"
        ) from error


def show(here: Session, rows: list[dict[str, Any]], *, as_json: bool, whole: Any) -> None:
    """`whole` is what a script gets; people get the columns that fit."""
    if as_json:
        here.terminal.data(json.dumps(whole))
    elif rows:
        here.terminal.table(list(rows[0]), [list(row.values()) for row in rows])
    else:
        here.terminal.say("nothing to show: the corpus has too few held-out rows of any model")
