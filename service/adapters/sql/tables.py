"""The database tables. A job is one row, so that one guarded UPDATE changes all of it."""

from sqlalchemy import BigInteger, Column, Date, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("project", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("reason", Text),
    Column("spec", Text, nullable=False),
    Column("run_dir", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("attempts", Text, nullable=False),
    Column("next_attempt_at", Float(53)),
    Column("times", Text, nullable=False),
    Column("wish", Text),
    Column("scaling", Text),
    Column("parent", Text),
    Column("sizes", Text, nullable=False),
    Column("memory", Text, nullable=False, server_default="{}"),
    Column("granted", Integer),
    Column("size", Text, nullable=False),
    Column("holds", Integer, nullable=False),
    Column("waits", Integer, nullable=False),
    Column("since", Float(53), nullable=False),
    Column("ulysses", Integer, nullable=False, server_default="1"),
    Column("version", Integer, nullable=False),
    Column("lease_owner", String(255)),
    Column("lease_until", Float(53)),
    Index("jobs_by_state", "state", "project"),
    Index("jobs_by_project", "project"),
    Index("jobs_that_hold", "holds"),
    Index("jobs_that_wait", "waits"),
)

leases = Table(
    "leases",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("owner", String(255), nullable=False),
    Column("until", Float(53), nullable=False),
)

labels = Table(
    "job_labels",
    metadata,
    Column("job_id", String(64), ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("key", String(64), primary_key=True),
    Column("value", String(512), nullable=False),
    Index("job_labels_by_value", "key", "value"),
)

deleted_usage = Table(
    "deleted_usage",
    metadata,
    Column("job_id", String(64), primary_key=True),
    Column("day", Date, primary_key=True),
    Column("project", String(64), nullable=False),
    Column("worker_hours", Float(53), nullable=False),
    Column("cpu_hours", Float(53), nullable=False),
    Column("gpu_hours", Float(53), nullable=False),
    Index("deleted_usage_by_day", "day"),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("key", String(320), primary_key=True),
    Column("body", String(64), nullable=False),
    Column("job_id", String(64), ForeignKey("jobs.id", ondelete="CASCADE")),
    Column("created_at", Float(53), nullable=False),
    Index("idempotency_keys_by_age", "created_at"),
)

keys = Table(
    "keys",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("roles", Text, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("created_by", String(320), nullable=False),
    Column("expires_at", Float(53)),
    Column("revoked_at", Float(53)),
)

audit_log = Table(
    "deeds",
    metadata,
    # SQLite generates values only for an INTEGER primary key.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("time", Float(53), nullable=False),
    Column("key_id", String(320), nullable=False),
    Column("key_name", String(64), nullable=False),
    Column("request_id", String(64), nullable=False),
    Column("action", String(64), nullable=False),
    Column("project", String(64), nullable=False),
    Column("target", String(64), nullable=False),
    Column("before", Text, nullable=False),
    Column("after", Text, nullable=False),
    Index("deeds_by_project", "project", "number"),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("project", String(64), nullable=False),
    Column("place", Integer, nullable=False),
    Column("url", Text, nullable=False),
    Column("states", Text, nullable=False),
    Column("secret", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("created_by", String(320), nullable=False),
    Column("previous_secret", Text),
    Column("previous_until", Float(53)),
    Column("disabled_at", Float(53)),
    Column("disabled_because", Text),
    Column("lease_owner", String(255)),
    Column("lease_until", Float(53), nullable=False),
    # Each webhook takes one of the numbered places of its project: of two for the last place, the database rejects one.
    Index("webhooks_by_place", "project", "place", unique=True),
)

secret_checks = Table(
    "secret_checks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("token", Text, nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    # No foreign key: a job's change must not fail because a webhook is deleted at the same moment.
    Column("webhook_id", String(64), nullable=False),
    Column("message_id", String(96), nullable=False),
    Column("event", String(64), nullable=False),
    Column("job_id", String(64), nullable=False),
    Column("body", Text, nullable=False),
    Column("time", Float(53), nullable=False),
    Column("since", Float(53), nullable=False),
    Column("next_at", Float(53)),
    Column("attempts", Integer, nullable=False),
    Column("status", Integer),
    Column("error", Text),
    Column("delivered_at", Float(53)),
    Index("deliveries_by_webhook", "webhook_id", "number"),
    Index("deliveries_by_job", "job_id", "webhook_id"),
    Index("deliveries_that_wait", "webhook_id", "next_at"),
)
