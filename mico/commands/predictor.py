"""`mico predictor …`: forecast a text, evaluate an artifact on data, train, export and update artifacts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mico.errors import CommandFailed
from mico.options import Json, with_option_groups
from mico.output_paths import check_new_folder, check_output_file, create_folder
from mico.session import Session, session_of

if TYPE_CHECKING:
    from predictor.onnx_forecaster import OnnxForecaster

Artifact = Annotated[
    Path | None, typer.Option(help="lexical, small, or an artifact's folder. [default: small]")
]
Corpus = Annotated[
    Path,
    typer.Argument(exists=True, dir_okay=False, help="A parquet file of prompts and answer lengths."),
]
FIGURES = ("rows", "spearman", "mae", "mae_p50", "p90_coverage", "accuracy_512", "majority_512")

app = typer.Typer(help="The length predictor.", no_args_is_help=True)


@app.command("forecast")
def forecast(
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="A question, as a user would ask it.")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model that would answer.")] = "mico-demo",
    artifact: Artifact = None,
    as_json: Json = False,
) -> None:
    """Forecast the length of the answer in tokens, as a distribution."""
    from predictor.onnx_forecaster import Features

    session = session_of(context)
    (expected,) = load_forecaster(artifact).forecast([Features(text, model)])
    facts: dict[str, Any] = {
        "expected_tokens": round(expected.expected(), 1),
        "p50_tokens": expected.quantile(0.5),
        "p90_tokens": expected.quantile(0.9),
        "source": expected.source,
    }
    print_rows(
        session,
        [facts],
        as_json=as_json,
        full={**facts, "edges": expected.edges, "probabilities": expected.probabilities},
    )


@app.command("evaluate")
def evaluate(
    context: typer.Context,
    *,
    data: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="A parquet file of prompts and answer lengths.")
    ],
    artifact: Artifact = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the forecast of every row to this parquet file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a table and plots to this folder; needs matplotlib.")
    ] = None,
    held_out: Annotated[bool, typer.Option(help="Use only prompts that training never sees.")] = False,
    least_rows: Annotated[
        int | None, typer.Option(min=1, help="Leave out smaller groups. [default: 100; 1 with --json]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Evaluate an artifact on a corpus, by source and answering model, beside baselines and the ceiling."""
    from predictor.errors import PredictorError
    from predictor.evaluation.evaluate import evaluate as evaluate_artifact

    session = session_of(context)
    if out is not None:
        check_output_file(out, source=data)
    if report is not None:
        create_folder(report)
    try:
        found = evaluate_artifact(
            data,
            artifact=artifact,
            out=out,
            report=report,
            held_out_only=held_out,
            min_rows=least_rows or (1 if as_json else 100),
            progress=session.terminal.info,
        )
    except PredictorError as error:
        raise CommandFailed("the corpus can't be scored", cause=str(error)) from error
    rows = [
        {"answers": f"{each['source']}, {each['model']}", **{key: each[key] for key in FIGURES}}
        for each in found["groups"]
    ]
    print_rows(session, rows, as_json=as_json, full=found)


class TrainingOptions(NamedTuple):
    """The kind of artifact to train, and with what."""

    kind: Annotated[str, typer.Option(help="lexical, or distilled from an encoder: small, large.")] = (
        "lexical"
    )
    encoder: Annotated[
        str | None, typer.Option(help="An encoder's folder or Hub id; `lexical` needs none.")
    ] = None
    language_model: Annotated[
        str | None,
        typer.Option(
            help="A folder or Hub id of a language model that answers more prompts and teaches too."
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Name of its forecasts. [default: the folder's name]")] = (
        None
    )
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="The same seed and data give the same artifact.")
    ] = 7
    buckets: Annotated[
        int | None,
        typer.Option(min=2, help="Number of ranges of equal width. [default: ranges that grow with length]"),
    ] = None
    l_max: Annotated[
        int, typer.Option(min=64, help="Longest answer length in tokens that is distinguished.")
    ] = 16_384


@app.command("train")
@with_option_groups
def train(
    context: typer.Context,
    *,
    data: Corpus,
    out: Annotated[Path, typer.Argument(help="The folder for the new artifact.")],
    options: TrainingOptions,
    as_json: Json = False,
) -> None:
    """Train an artifact and write it with its card. Serve it with `predictor = FOLDER` of a gateway.

    If the file has the answers' texts in a column `answer`, teachers learn from them, too.
    """
    from predictor.errors import PredictorError
    from predictor.training.train import train as train_artifact

    session = session_of(context)
    create_folder(out)
    try:
        card = train_artifact(
            data,
            out,
            kind=options.kind,
            encoder=options.encoder,
            language_model=options.language_model,
            name=options.name,
            seed=options.seed,
            buckets=options.buckets,
            max_length=options.l_max,
            progress=session.terminal.info,
        )
    except PredictorError as error:
        raise CommandFailed("the artifact can't be trained", cause=str(error)) from error
    session.terminal.info(f"{card.name} is in {out}")
    facts = [{"answers": key, **value} for key, value in card.figures.items()]
    print_rows(session, facts, as_json=as_json, full=card.figures)


@app.command("export")
def export(
    context: typer.Context,
    *,
    out: Annotated[Path, typer.Argument(help="The folder for the copy, which must not hold an artifact.")],
    artifact: Artifact = None,
    as_json: Json = False,
) -> None:
    """Check an artifact and copy it to a folder: ONNX, vocabulary and card.

    Use it on a shipped artifact, for `mico predictor update` and for a gateway (`predictor = FOLDER`).
    The output of `train` has that form already.
    """
    from predictor.artifact import export as export_artifact
    from predictor.artifact import resolve_folder
    from predictor.errors import ArtifactError

    session = session_of(context)
    check_new_folder(out)
    try:
        card = export_artifact(resolve_folder(artifact), out)
    except ArtifactError as error:
        raise CommandFailed("nothing was exported", cause=str(error)) from error
    load_forecaster(out)
    facts = {"name": card.name, "kind": card.kind, "sha256": card.digest, "folder": str(out)}
    print_rows(session, [facts], as_json=as_json, full=facts)


@app.command("update")
def update(
    context: typer.Context,
    *,
    artifact: Annotated[
        Path,
        typer.Argument(
            exists=True,
            file_okay=False,
            help="The artifact's folder, from train, export or an earlier update.",
        ),
    ],
    outcomes: Annotated[
        Path,
        typer.Argument(exists=True, help="Recent outcomes: a gateway's outcomes folder, or a corpus."),
    ],
    elsewhere: Annotated[Path | None, typer.Option(help="A corpus of other traffic that is served.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. [default: replace the artifact]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train on outcomes; replace the artifact only if the new one is better on held-out outcomes."""
    from predictor.errors import PredictorError
    from predictor.update.update import update as update_artifact

    session = session_of(context)
    check_new_folder(out or artifact)
    try:
        found = update_artifact(
            artifact, outcomes, out=out, elsewhere=elsewhere, progress=session.terminal.info
        )
    except PredictorError as error:
        raise CommandFailed("no artifact was written", cause=str(error)) from error
    rows = [
        {"judged on": where, "artifact": which, **figures}
        for where, sides in found.items()
        for which, figures in sides.items()
    ]
    print_rows(session, rows, as_json=as_json, full=found)


def load_forecaster(folder: Path | None) -> OnnxForecaster:
    from predictor.artifact import resolve_folder
    from predictor.errors import ArtifactError
    from predictor.onnx_forecaster import OnnxForecaster

    try:
        return OnnxForecaster(resolve_folder(folder))
    except ArtifactError as error:
        raise CommandFailed(
            "the predictor can't be loaded", cause=str(error), tip="mico predictor train makes one"
        ) from error


def print_rows(session: Session, rows: list[dict[str, Any]], *, as_json: bool, full: Any) -> None:
    """Print `full` as JSON for a script, or `rows` as a table for people."""
    if as_json:
        session.terminal.data(json.dumps(full))
    elif rows:
        session.terminal.records(rows)
    else:
        session.terminal.info("nothing to show: the corpus has too few held-out rows of any model")
