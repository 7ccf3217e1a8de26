"""What the gateway keeps: keys, usage and decisions, in SQLite or Postgres. `store.py` opens it all."""
