"""Define the tables for SQLAlchemy. `migrations/` builds the same ones; a test compares the two.

Times are unix seconds. Does not store prompts or answers, only their lengths in tokens.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
)

SCHEMA: Final = "0017"
"""The newest migration that this program needs; `schema.py` says which newer ones it accepts."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

schema_floor = Table(
    "schema_floor",  # one row, written by `migrations`
    metadata,
    Column("floor", String, primary_key=True),  # the lowest SCHEMA of a program that may use these tables
    Column("made_by", String, nullable=False),  # the version of the program that migrated last
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String, primary_key=True),
    Column("created_at", Double, nullable=False),
    # no query of the tenant gets a better priority
    Column("best_priority", Integer, nullable=False, server_default="0"),
    Column("stamp", BigInteger, nullable=False, server_default="0"),  # as that of keys
)

keys = Table(
    "keys",
    metadata,
    Column("id", String, primary_key=True),
    Column("name", String, nullable=False),
    Column("tenant", String, ForeignKey("tenants.name"), nullable=False),
    Column("digest", String, nullable=False, unique=True),  # keyed hash of the secret, hex
    Column("pepper_id", String, nullable=False),  # which pepper the digest was made with
    Column("hint", String, nullable=False),  # the secret's last characters, for people
    Column("models", JSON(none_as_null=True)),  # list of model ids; null means every model
    Column("regions", JSON(none_as_null=True)),  # list of sites' regions; null means every region
    Column("first_id", String),  # first of the keys that replaced one another; they share its quotas
    Column("admin", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("stamp", BigInteger, nullable=False),  # number of its last change, see key_changes.py
    Index("ix_keys_stamp", "stamp", "revoked_at"),
)

change_counters = Table(
    "change_counters",
    metadata,
    Column("name", String, primary_key=True),
    Column("number", BigInteger, nullable=False),  # of the newest change
)

usage = Table(
    "usage",
    metadata,
    Column("query_id", String, primary_key=True),
    Column("request_id", String, nullable=False, index=True),  # the client's id, not unique
    Column("received_at", Double, nullable=False, index=True),
    Column("tenant", String, nullable=False),
    Column("key_id", String, nullable=False),
    Column("model", String, nullable=False),
    Column("status", String, nullable=False),
    Column("error", String, nullable=False),
    Column("site", String, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("queue_s", Double),
    Column("first_token_s", Double),
    Column("total_s", Double, nullable=False),
    Column("forecast_source", String),
    Column("forecast_expected", Double),
    Column("forecast_p50", BigInteger),
    Column("forecast_p90", BigInteger),
    Column("cloud", String, nullable=False, server_default=""),  # of that site
    Column("asked_model", String, nullable=False, server_default=""),  # the route that led to the model
    Column("nano_usd", BigInteger),  # of all attempts; null: written by a version that priced nothing
    Column("cheapest_nano_usd", BigInteger),  # of the same tokens, at any of the sites compared
    Column("dearest_nano_usd", BigInteger),
)

decisions = Table(
    "decisions",
    metadata,
    Column("query_id", String, primary_key=True),
    Column("attempt", Integer, primary_key=True),  # 0 is the first
    Column("received_at", Double, nullable=False, index=True),
    Column("attempt_id", String, nullable=False),
    Column("site", String, nullable=False),
    Column("policy", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("decided_s", Double, nullable=False),  # on the gateway's monotonic clock
    Column("estimates", JSON, nullable=False),
    Column("excluded", JSON, nullable=False),
    Column("ended", String, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("first_token_s", Double),
    Column("model", String, nullable=False, server_default=""),
    Column("cached_tokens", BigInteger),  # of the prompt
    Column("resumed_tokens", BigInteger),  # of the answer, from attempts before
    Column("nano_usd", BigInteger),
    Column("prices", JSON(none_as_null=True)),  # dollars per million tokens, that it was priced by
)

site_hours = Table(
    "site_hours",  # of sites that are paid by the hour
    metadata,
    Column("site", String, primary_key=True),
    Column("hour", Double, primary_key=True, index=True),  # its first second
    Column("nano_usd_per_hour", BigInteger, primary_key=True, autoincrement=False),
    Column("cloud", String, nullable=False),
    Column("minutes", BigInteger, nullable=False),  # bit n is set if the site was joined in minute n
)

quotas = Table(
    "quotas",
    metadata,
    Column("scope", String, primary_key=True),  # "tenant" or "key"
    Column("subject", String, primary_key=True),  # the tenant's name or the first id of the key
    Column("kind", String, primary_key=True),
    Column("amount", BigInteger, nullable=False),
    Column("stamp", BigInteger, nullable=False),  # random at every change: the sum of all reveals any change
)

model_routes = Table(
    "model_routes",
    metadata,
    Column("name", String, primary_key=True),
    Column("route", JSON, nullable=False),
    Column("who", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("stamp", BigInteger, nullable=False),  # as that of quotas
)

replicas = Table(
    "replicas",
    metadata,
    Column("name", String, primary_key=True),
    Column("boot_id", String, nullable=False),  # tells a restarted process from another of the same name
    # on the database's clock: its leases end then; negative: it counts as gone since
    Column("expires_at", Double, nullable=False),
)

quota_slices = Table(
    "quota_slices",
    metadata,
    Column("scope", String, primary_key=True),
    Column("subject", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("replica", String, primary_key=True),  # "": use of the month by replicas that are gone
    Column("period", BigInteger, nullable=False),  # month number; 0 for quotas without a calendar
    Column("amount", BigInteger, nullable=False),  # may be in use by that replica within the quota's window
    Column("used", BigInteger, nullable=False),
    Column("used_at", Double, nullable=False),
    Column("want", BigInteger, nullable=False),
)

site_orders = Table(
    "site_orders",
    metadata,
    Column("site", String, primary_key=True),
    Column("subject", String, primary_key=True),  # "service", "weight" or "model NAME"
    Column("value", String, nullable=False),  # "drain" or "pause", a percentage, "off"
    Column("who", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("given_at", Double, nullable=False),
    Column("until_at", Double),  # the order ends then
    Column("move_at", Double),  # of a pause: remaining queries move then
)

site_events = Table(
    "site_events",
    metadata,
    Column("id", String, primary_key=True),
    Column("at", Double, nullable=False, index=True),
    Column("site", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("text", String, nullable=False),
    Column("bad", Boolean, nullable=False),
    Column("replica", String, nullable=False),  # the replica that saw it: every replica sees all sites
    Index("ix_site_events_newest", "site", "at"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", String, primary_key=True),
    Column("at", Double, nullable=False, index=True),
    Column("who", String, nullable=False),
    Column("site", String, nullable=False),
    Column("action", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("before", String, nullable=False),
    Column("after", String, nullable=False),
    Column("until_at", Double),
)

history = Table(
    "history",
    metadata,
    Column("minute", BigInteger, primary_key=True, autoincrement=False),  # unix time / 60
    Column("sample", JSON, nullable=False),
)

replica_figures = Table(
    "replica_figures",
    metadata,
    Column("replica", String, primary_key=True),
    Column("at", Double, nullable=False),  # on that replica's clock: readers only compare it for equality
    Column("summary", JSON, nullable=False),
)

files = Table(
    "files",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False, index=True),
    Column("filename", String, nullable=False),
    Column("purpose", String, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False, index=True),
    Column("complete", Boolean, nullable=False),  # false: still being written, not visible
)

file_parts = Table(
    "file_parts",
    metadata,
    Column("file_id", String, primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),  # equal sizes except for the last
    Column("data", LargeBinary, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False, index=True),
    Column("key_id", String, nullable=False),
    Column("endpoint", String, nullable=False),
    Column("input_file_id", String, nullable=False),
    Column("completion_window", String, nullable=False),
    Column("about", JSON(none_as_null=True)),  # the client's metadata
    Column("model", String),  # null until the file is validated
    Column("status", String, nullable=False, index=True),
    Column("created_at", Double, nullable=False, index=True),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    Column("total", Integer, nullable=False),
    Column("completed", Integer, nullable=False),  # set at the end; until then the lines are counted
    Column("failed", Integer, nullable=False),
    Column("outline", JSON(none_as_null=True)),  # what its lines should take; null until it is validated
    # lines, at the last renewal of the lease
    Column("in_flight", Integer, nullable=False, server_default="0"),
    Column("ends_at", Double),  # expected, at that time
    Column("usage", JSON(none_as_null=True)),  # OpenAI's, of its answers; null until it has ended
    Column("errors", JSON(none_as_null=True)),  # why the file is not a valid batch
    Column("output_file_id", String),
    Column("error_file_id", String),
    Column("output_kept_s", Double, nullable=False),
    Column("leased_by", String),  # one runner of one replica
    Column("leased_until", Double),
)

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch_id", String, primary_key=True),
    Column("line", Integer, primary_key=True, autoincrement=False),  # from 1
    Column("place", Integer, nullable=False),  # position in the order of running
    Column("custom_id", String, nullable=False),
    Column("begins", BigInteger, nullable=False),  # offset in the input file
    Column("size", Integer, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),  # estimated
    Column("response_tokens", Double, nullable=False),
    # number of the first line that begins alike
    Column("group", Integer, nullable=False, server_default="0"),
    Column("shared_tokens", Integer, nullable=False, server_default="0"),  # of the prompt, with its group
    Column("runs", Integer, nullable=False),  # runs that ended without an outcome
    Column("failures", Integer, nullable=False),  # of those, how many were the fault of a site or the gateway
    Column("outcome", LargeBinary),  # the line of the output or error file, written once
    Column("failed", Boolean),
    Index("ix_batch_lines_place", "batch_id", "place"),
)

tuning_jobs = Table(
    "tuning_jobs",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, nullable=False, index=True),
    Column("key_id", String, nullable=False),
    Column("model", String, nullable=False),  # the base
    Column("training_file_id", String, nullable=False),
    Column("validation_file_id", String),
    Column("created_at", Double, nullable=False, index=True),
    Column("plan", JSON, nullable=False),
    Column("suffix", String, nullable=False),
    Column("about", JSON(none_as_null=True)),  # the client's metadata
    Column("status", String, nullable=False, index=True),
    Column("finished_at", Double),
    Column("error", JSON(none_as_null=True)),
    Column("rows", Integer, nullable=False),  # of the training file
    Column("revision", String, nullable=False),  # of the base, once a site has begun
    Column("run", String),  # the current run at a site: it fences
    Column("runs", Integer, nullable=False),  # without a step of progress between them
    Column("site", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("total_steps", Integer, nullable=False),
    Column("trained_tokens", BigInteger, nullable=False),
    Column("nano_usd", BigInteger, nullable=False),
    Column("tokens_per_s", Double, nullable=False),
    Column("result_file_id", String),
    Column("leased_by", String),  # one runner of one replica
    Column("leased_until", Double),
)

tuning_events = Table(
    "tuning_events",
    metadata,
    Column("job_id", String, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),  # from 1
    Column("at", Double, nullable=False),
    Column("level", String, nullable=False),
    Column("message", String, nullable=False),
    Column("data", JSON(none_as_null=True)),  # the figures of a step
)

tuning_content = Table(
    "tuning_content",
    metadata,
    Column("job_id", String, primary_key=True),
    Column("kind", String, primary_key=True),
    Column("step", Integer, primary_key=True, autoincrement=False),
    Column("sha256", String, nullable=False, index=True),
    Column("bytes", BigInteger, nullable=False),
    Column("file_id", String, nullable=False),
    Column("at", Double, nullable=False),
)

site_certificates = Table(
    "site_certificates",
    metadata,
    Column("site", String, primary_key=True),
    Column("serial", String),  # of the newest certificate, hex; null: none issued, or void
    Column("issued_at", Double),
    Column("expires_at", Double),
    Column("renewals", Integer, nullable=False),  # since the site enrolled
    Column("revoked_at", Double),  # everything issued until then is void
    Column("reason", String, nullable=False),  # of the revocation
)

ended_sessions = Table(
    "ended_sessions",
    metadata,
    Column("id", String, primary_key=True),  # hash of the session's claim
    Column("until", Double, nullable=False),  # it would have ended then
)
