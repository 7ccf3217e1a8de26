"""The gateway's durable state (keys, usage, decisions, orders) in SQLite or Postgres; `store.py` opens it."""
