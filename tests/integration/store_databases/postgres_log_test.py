"""The tests' own Postgres goes on whatever it writes into its log."""

from __future__ import annotations

from tests.support.postgres_server import PostgresServer

LINES = 2_000
"""Of a hundred characters: more than a pipe holds."""


def test_a_server_that_has_much_to_say_does_not_stand_still(postgres: PostgresServer) -> None:
    said = f"FOR line IN 1..{LINES} LOOP RAISE LOG '%', repeat('x', 100); END LOOP;"
    postgres.execute(f"DO $$BEGIN {said} END$$")
    postgres.execute("SELECT 1")
