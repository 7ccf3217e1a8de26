"""Schema migrations: `upgrade(url)` takes a database to this program's schema, `downgrade` back."""

from migrations.run import downgrade, upgrade

__all__ = ["downgrade", "upgrade"]
