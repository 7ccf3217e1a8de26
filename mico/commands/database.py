"""`mico db …` and `mico explain`: the schema, and the routing decisions of a query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.wording import several
from mico.errors import CommandFailed
from mico.options import Database, Json
from mico.session import Session, session_of
from mico.terminal import format_seconds

if TYPE_CHECKING:
    from gateway.outcome import Attempt
    from gateway.store.queries import ExplainedQuery
    from gateway.store.store import Store

app = typer.Typer(help="The database.", no_args_is_help=True)


@app.command("upgrade")
def upgrade(context: typer.Context, database: Database = None) -> None:
    """Upgrade the schema to this version's. Safe to repeat, and safe while others do the same.

    Does nothing where a newer version has upgraded it in a way that this version can use.
    """
    from gateway.store.tables import SCHEMA
    from mico.store_access import upgrade as run

    session = session_of(context)
    where = session.settings.resolve("database_url", database)
    found = run(where.value)
    state = f"{where.shown} has schema {found.revision}"
    if found.revision == SCHEMA:
        session.terminal.info(f"{state}, the newest")
    else:
        by = f"Mico {found.made_by} made it"
        session.terminal.info(f"{state}: {by}, this version ({SCHEMA}) can use it, nothing is changed")


def explain(
    context: typer.Context,
    request_id: Annotated[str, typer.Argument(help="The x-request-id of an answer.")],
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Explain why a query went to its site, and what happened to it."""
    import msgspec

    from mico.store_access import with_store

    session = session_of(context)

    async def work(store: Store) -> list[ExplainedQuery]:
        return await store.read.explain(request_id)

    found = with_store(session.settings.value("database_url", database), session.folder.path, work)
    if not found:
        tip = "records are written within seconds of the end of an answer; the id is its x-request-id"
        raise CommandFailed(f"nothing is known of {request_id}", tip=tip)
    if as_json:
        session.terminal.json(msgspec.to_builtins(found))
        return
    for each in found:
        print_explanation(session, each)


def print_explanation(session: Session, explained: ExplainedQuery) -> None:
    usage = explained.usage
    model = f"{usage.model} by the route {usage.asked_model}" if usage.asked_model else usage.model
    session.terminal.data(
        f"{usage.query_id}: {model}, {usage.status}{f' ({usage.error})' if usage.error else ''}, "
        f"{usage.prompt_tokens} prompt + {usage.completion_tokens} completion tokens"
    )
    if usage.forecast_source is not None:
        session.terminal.data(
            f"forecast by {usage.forecast_source}: {usage.forecast_expected:.0f} tokens on average, "
            f"half of such answers within {usage.forecast_p50}, nine in ten within {usage.forecast_p90}"
        )
    for number, attempt in enumerate(explained.attempts, 1):
        print_attempt(session, number, attempt)


def print_attempt(session: Session, number: int, attempt: Attempt) -> None:
    from gateway.prices import dollars

    decision = attempt.decision
    first = format_seconds(attempt.first_token_s)
    session.terminal.data(
        f"attempt {number}: {decision.site} by {decision.policy} ({decision.reason}); "
        f"ended {attempt.ended}, first token after {first}, cost {dollars(attempt.nano_usd)}"
    )
    expected = next((each.cached_tokens for each in decision.estimates if each.site == decision.site), 0.0)
    session.terminal.data(
        f"of {several(attempt.prompt_tokens, 'prompt token')} {attempt.cached_tokens:,} were in its cache, "
        f"{expected:,.0f} expected"
    )
    rows = [
        [
            each.site,
            *map(format_seconds, (each.wait_s, each.first_token_s, each.finish_s, each.load_age_s)),
            f"{each.cached_tokens:,.0f}",
            f"${each.price_usd:.6f}",
            "" if each.cost is None else f"{each.cost:.3g}",
        ]
        for each in decision.estimates
    ]
    columns = ["site", "wait", "first token", "finish", "report age", "cached", "price", "cost"]
    session.terminal.table(columns, rows, title="estimates; the least cost was taken")
    for site, why in decision.excluded.items():
        session.terminal.data(f"not {site}: {why}")
