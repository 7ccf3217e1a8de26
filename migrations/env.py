"""Alembic's environment. `run.py` passes the connection, the lock and the transaction."""

from alembic import context

from gateway.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
