"""What Alembic runs around the revisions. `run.py` brings connection, lock and transaction."""

from alembic import context

from gateway.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
