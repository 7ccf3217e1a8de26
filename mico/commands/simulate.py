"""`mico simulate`: runs on a virtual clock, decided by the code that decides in production."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mico.errors import CommandFailed, ExitCode
from mico.options import Json, with_option_groups
from mico.output_paths import create_folder
from mico.session import Session, session_of

if TYPE_CHECKING:
    from mico.simulation.compare import Comparison

COLUMNS = {
    "trace": "trace",
    "load": "load",
    "sites": "sites",
    "policy": "policy",
    "estimator": "estimator",
    "order": "order",
    "offload": "offload",
    "affinity": "affinity",
    "hit_rate": "hit rate",
    "mean_normalized_latency": "mean s/token",
    "p99_normalized_latency": "p99 s/token",
    "mean_ttft_s": "mean TTFT s",
    "p50_ttft_s": "p50 TTFT s",
    "p99_ttft_s": "p99 TTFT s",
    "makespan_s": "makespan s",
    "jain": "Jain",
    "offloads": "offloads",
    "completed": "completed",
    "usd_per_mtok": "$/Mtok",
    "usd": "$",
    "machine_usd": "machines $",
}
"""The fields of a row that the table shows, and their headings; `--json` has every field."""
TRACE_COLUMNS = ("arrival_s", "prompt_tokens", "response_tokens")
CORPUS_TIP = (
    "a parquet file with the columns source, prompt_id, prompt, model, response_tokens, or outcomes"
    " that a gateway kept"
)

Sites = Annotated[
    list[str] | None,
    typer.Option(
        help="Number of unequal sites, or groups "
        "COUNTxSLOTS[@TIMES_SLOWER][~RTT_MS][/KV_TOKENS][:USD_PER_MTOK][=REGION],…, "
        "with a round trip for each gateway as in ~5+250; "
        "repeat it for several federations. Without it: 3.",
    ),
]
Corpus = Annotated[
    Path,
    typer.Option(
        help="A parquet file of texts with answer lengths, as `mico predictor evaluate` takes, or the folder"
        " where a gateway keeps its `outcomes`.",
        envvar="MICO_CORPUS",
    ),
]
BatchShare = Annotated[
    float, typer.Option(min=0, max=1, help="Share of the queries that are lines of batches.")
]
Bound = Annotated[
    list[str] | None,
    typer.Option(help="Share of all queries that only one region may answer: REGION=SHARE; repeatable."),
]


class ComparisonOptions(NamedTuple):
    """The settings that are combined; texts with commas name several."""

    trace: Annotated[
        str,
        typer.Option(
            help="Trace files, poisson, burst, agents or day (24 hours at no set load), separated by commas."
        ),
    ] = "poisson"
    load: Annotated[str, typer.Option(help="Loads as shares of the sites' capacity, such as 0.8,0.95.")] = (
        "0.8"
    )
    sites: Sites = None
    policy: Annotated[str, typer.Option(help="Policies, separated by commas.")] = "mico,least_requests"
    estimator: Annotated[
        str,
        typer.Option(
            help="Estimators, with commas: shipped, oracle, noisy:0.5, constant, input, histogram, bins."
        ),
    ] = "shipped"
    order: Annotated[
        str,
        typer.Option(help="Orders of a site's queue, separated by commas: work, shortest, fcfs, longest."),
    ] = "work"
    offload: Annotated[str, typer.Option(help="Whether idle sites take pending work: on, off or both.")] = (
        "on"
    )
    affinity: Annotated[
        str,
        typer.Option(
            help="How gateways use the sites' prefix caches, with commas: prefix (as in production), untold"
            " (they do not hear of others'), none, hash, session, tree, tree:ABOVE. Without it, no caches."
        ),
    ] = ""
    queries: Annotated[int, typer.Option(min=1, help="Maximum number of queries of each trace.")] = 4000
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws.")] = 0
    gateways: Annotated[int, typer.Option(min=1, help="Gateways that share the sites.")] = 1
    report_every_s: Annotated[
        float, typer.Option(min=0.001, help="Minimum seconds between two reports of a site.")
    ] = 0.05
    report_delay_s: Annotated[
        float, typer.Option(min=0, help="Delay of reports in seconds, beside the round trip.")
    ] = 0.0
    outage: Annotated[
        list[str] | None,
        typer.Option(help="A site or region lost for a time: NAME@FROM_S-UNTIL_S; repeatable."),
    ] = None
    scaling: Annotated[
        Path | None,
        typer.Option(
            help="A gateway's scaling plan (TOML); its pools are regions of --sites and begin with those."
        ),
    ] = None
    start_s: Annotated[
        float, typer.Option(min=0, help="Seconds from asking for a machine of a pool until it serves.")
    ] = 300.0
    batch_share: BatchShare = 0.0
    bound: Bound = None
    corpus: Corpus = Path("data/length_corpus.parquet")

    def comparison(self) -> Comparison:
        """Parse the options. Raises CommandFailed."""
        from mico.simulation import compare

        return compare.Comparison(
            traces=[_checked_trace(each) for each in _split(self.trace)],
            loads=[_parse_load(each) for each in _split(self.load)],
            sites=self.sites or ["3"],
            policies=_split(self.policy),
            estimators=_split(self.estimator),
            orders=_split(self.order),
            offload=_parse_offload(self.offload),
            corpus=self.corpus,
            queries=self.queries,
            seed=self.seed,
            gateways=self.gateways,
            report_every_s=self.report_every_s,
            report_delay_s=self.report_delay_s,
            outages=tuple(compare.outage(each) for each in self.outage or ()),
            batch_share=self.batch_share,
            bound=dict(compare.bound(each) for each in self.bound or ()),
            affinities=_split(self.affinity),
            scaling=None if self.scaling is None else compare.scaling(self.scaling, self.start_s),
        )


@with_option_groups
def simulate(
    context: typer.Context,
    *,
    options: ComparisonOptions,
    plot: Annotated[Path | None, typer.Option(help="Write a plot of the latencies to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Compare policies, estimators, orders and sites on recorded or random traffic, without a GPU."""
    session = session_of(context)
    try:
        import mico.simulation.compare  # noqa: F401  # an early answer where pandas is missing
    except ModuleNotFoundError as error:
        raise CommandFailed(
            "the simulator reads traces with pandas",
            cause=str(error),
            tip="install the extra train (in a checkout: ./dev setup)",
        ) from error
    if plot is not None:
        create_folder(plot.parent)
    runs = _run(session, options.comparison())
    if plot is not None:
        _plot(runs, plot)
    if as_json:
        session.terminal.json({"runs": runs})
    else:
        cells = [[_format(row[field]) for field in COLUMNS] for row in runs]
        session.terminal.table(list(COLUMNS.values()), cells)


def _run(session: Session, comparison: Comparison) -> list[dict[str, Any]]:
    from mico.simulation import compare
    from predictor.errors import DataError

    try:
        return list(_with_progress(session, compare.rows(comparison)))
    except DataError as error:
        raise CommandFailed("the corpus can't be used", cause=str(error), tip=CORPUS_TIP) from error


def _with_progress(session: Session, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(rows, 1):
        yield row
        how = "with" if row["offload"] else "without"
        description = "{trace} at {load:.0%} on {sites} sites, {policy}, {estimator}, {order}".format(**row)
        description += f", {row['affinity']}" * bool(row["affinity"])
        session.terminal.info(f"{number}: {description}, {how} offload")


def _split(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _checked_trace(name: str) -> str:
    """Return the name of a trace. Raises CommandFailed for a file that lacks columns."""
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import read_schema

    if Path(name).is_file():
        try:
            missing = [column for column in TRACE_COLUMNS if column not in read_schema(name).names]
            cause = f"it lacks {', '.join(missing)}" if missing else ""
        except ArrowInvalid as error:
            cause = str(error)
        if cause:
            tip = (
                f"a parquet file with the columns {', '.join(TRACE_COLUMNS)}; or poisson, burst, agents, day"
            )
            raise CommandFailed(f"{name} is no trace", cause=cause, tip=tip)
    return name


def _parse_load(text: str) -> float:
    try:
        load = float(text)
    except ValueError:
        load = 0.0
    if not 0 < load < inf:
        raise CommandFailed(
            f"{text!r} is no load", tip="a share of capacity, such as 0.95", exit_code=ExitCode.WRONG_USAGE
        )
    return load


def _parse_offload(text: str) -> list[bool]:
    switches = {"on": [True], "off": [False], "both": [True, False]}
    if text not in switches:
        raise CommandFailed(f"--offload {text}?", tip="on, off or both", exit_code=ExitCode.WRONG_USAGE)
    return switches[text]


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _plot(runs: list[dict[str, Any]], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        raise CommandFailed(
            "no picture without matplotlib",
            cause=str(error),
            tip="install the extra plots (in a checkout: ./dev setup)",
        ) from error
    names = ["{policy} · {estimator} · {order} · {load:g}".format(**row) for row in runs]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.4 * len(runs) + 2), sharey=True)
    left.barh(names, [row["p99_normalized_latency"] for row in runs])
    left.set_xlabel("p99 normalised latency, s/token")
    right.barh(names, [row["p99_ttft_s"] for row in runs])
    right.set_xlabel("p99 time to first token, s")
    figure.tight_layout()
    figure.savefig(path)
