"""Write an evaluation as `report.md` with a table of groups, and two plots in the same folder.

Requires matplotlib, from the extra `plots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from predictor.errors import DataError
from predictor.evaluation import metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATED = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
COLUMNS = ("rows", "spearman", "mae", "mae_p50", "accuracy_1024", "majority_1024", "p90_coverage", "log_loss")
MAX_POINTS = 20_000
MAX_GROUPS = 6
"""The number of groups, largest first, with their own line in the reliability plot."""


def require_matplotlib() -> None:
    """Raise DataError if matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise DataError("plots need matplotlib, of the extra plots")


def write(  # noqa: PLR0917 - each is of another type
    folder: Path,
    document: dict[str, Any],
    lengths: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    edges: tuple[int, ...],
    groups: dict[str, NDArray[np.int64]],
) -> None:
    """Write the report and its plots. `groups` maps group names to row indices."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    plot_reliability(figure.subplots(), lengths, probabilities, edges, groups)
    figure.savefig(folder / "reliability.png", dpi=110)
    figure = Figure(figsize=(6.5, 6), layout="constrained")
    plot_predicted(figure.subplots(), lengths, metrics.expected(probabilities, edges))
    figure.savefig(folder / "predicted.png", dpi=110)
    (folder / "report.md").write_text(render_markdown(document), "utf-8")


def plot_reliability(
    axes: Axes,
    lengths: NDArray[np.int64],
    probabilities: NDArray[np.float64],
    edges: tuple[int, ...],
    groups: dict[str, NDArray[np.int64]],
) -> None:
    """Plot the observed coverage of each stated quantile, for all rows and for the largest groups."""
    covered = {q: lengths <= metrics.quantile(probabilities, edges, q) for q in STATED}
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.plot(STATED, [covered[q].mean() for q in STATED], color="black", marker="o", label="all")
    for name, rows in sorted(groups.items(), key=lambda each: -len(each[1]))[:MAX_GROUPS]:
        axes.plot(STATED, [covered[q][rows].mean() for q in STATED], linewidth=1, label=name)
    axes.set(xlabel="stated share", ylabel="share of answers within", title="Reliability")
    axes.legend(fontsize=7)


def plot_predicted(axes: Axes, lengths: NDArray[np.int64], expected: NDArray[np.float64]) -> None:
    """Plot expected against actual length on log scales, for at most MAX_POINTS answers."""
    shown = np.random.default_rng(0).permutation(len(lengths))[:MAX_POINTS]
    axes.loglog(np.maximum(expected[shown], 1), lengths[shown], ".", markersize=2, alpha=0.3)
    ends = [1, max(2, int(lengths.max()))]
    axes.loglog(ends, ends, color="grey", linewidth=0.8)
    axes.set(xlabel="expected tokens", ylabel="tokens of the answer", title="Predicted against actual")


def render_markdown(document: dict[str, Any]) -> str:
    """Return the report in Markdown, with the groups as a table."""
    lines = [
        f"# {document['artifact']} on {document['data']}",
        "",
        f"{document['rows']} rows, {document['ms_per_query']} ms a query; digest {document['digest'][:12]}.",
        "",
        "![reliability](reliability.png) ![predicted against actual](predicted.png)",
        "",
        _table_row(["source", "model", *COLUMNS, "lexical mae", "ceiling mae"]),
        _table_row(["---"] * (len(COLUMNS) + 4)),
    ]
    for group in document["groups"]:
        ceiling = group["ceiling"] or {}
        cells = [group["source"], group["model"], *(group[name] for name in COLUMNS)]
        lines.append(_table_row([*cells, group["lexical"]["mae"], ceiling.get("mae")]))
    return "\n".join(lines) + "\n"


def _table_row(cells: Sequence[object]) -> str:
    return "| " + " | ".join("" if cell is None else str(cell).replace("|", "/") for cell in cells) + " |"
