"""Reason codes, stop requests, sizes and queue positions of jobs, leases, and keys that expire."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_AT_ONCE = 500
_HOLDING = ("STARTING", "RUNNING", "RECOVERING")


def _new() -> list[sa.Column[Any]]:
    return [
        sa.Column("priority", sa.Integer, nullable=False, server_default="0"),
        sa.Column("times", sa.Text, nullable=False, server_default="{}"),
        sa.Column("wish", sa.Text),
        sa.Column("scaling", sa.Text),
        sa.Column("size", sa.Text, nullable=False, server_default="{}"),
        sa.Column("holds", sa.Integer, nullable=False, server_default="0"),
        sa.Column("waits", sa.Integer, nullable=False, server_default="0"),
        sa.Column("since", sa.Float(53), nullable=False, server_default="0"),
    ]


def _old() -> list[sa.Column[Any]]:
    return [sa.Column("cancel_deadline", sa.Float(53)), sa.Column("cancel_checkpoint", sa.Integer)]


def upgrade() -> None:
    """Add the new columns, convert the existing rows, and drop the replaced columns."""
    op.create_table(
        "leases",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("owner", sa.String(255), nullable=False),
        sa.Column("until", sa.Float(53), nullable=False),
    )
    with op.batch_alter_table("idempotency_keys") as keys:
        keys.alter_column("job_id", existing_type=sa.String(64), nullable=True)
        keys.add_column(sa.Column("created_at", sa.Float(53), nullable=False, server_default="0"))
    # Keys now expire after a day. The age of an existing key is that of its job.
    op.execute(
        "UPDATE idempotency_keys SET created_at = (SELECT created_at FROM jobs WHERE jobs.id = idempotency_keys.job_id)"
    )
    op.create_index("idempotency_keys_by_age", "idempotency_keys", ["created_at"])
    for column in _new():
        op.add_column("jobs", column)
    _rewrite(_raise)
    for column in _old():
        op.drop_column("jobs", column.name)
    op.create_index("jobs_that_hold", "jobs", ["holds"])
    op.create_index("jobs_that_wait", "jobs", ["waits"])


def downgrade() -> None:
    """Restore 0001. It has no paused state: jobs paused by users become cancelled, preempted jobs queued."""
    op.drop_index("jobs_that_wait", "jobs")
    op.drop_index("jobs_that_hold", "jobs")
    for column in _old():
        op.add_column("jobs", column)
    _rewrite(_lower)
    for column in _new():
        op.drop_column("jobs", column.name)
    op.execute("DELETE FROM idempotency_keys WHERE job_id IS NULL")
    op.drop_index("idempotency_keys_by_age", "idempotency_keys")
    with op.batch_alter_table("idempotency_keys") as keys:
        keys.drop_column("created_at")
        keys.alter_column("job_id", existing_type=sa.String(64), nullable=False)
    op.drop_table("leases")


def _rewrite(change: Any) -> None:
    """Change every row of jobs in batches, in the order of their ids."""
    connection, after = op.get_bind(), ""
    table = sa.Table("jobs", sa.MetaData(), autoload_with=connection)
    while rows := connection.execute(
        sa.select(table).where(table.c.id > after).order_by(table.c.id).limit(_AT_ONCE)
    ).all():
        for row in rows:
            connection.execute(table.update().where(table.c.id == row.id).values(change(row)))
        after = rows[-1].id


def _raise(row: Any) -> dict[str, Any]:
    spec, attempts = json.loads(row.spec), json.loads(row.attempts)
    scaling = spec.get("scaling", {})
    for attempt in attempts:
        attempt["reason"] = _reason(attempt["reason"])
        attempt["workers"] = scaling.get("num_workers", 1)
    live = bool(attempts) and attempts[-1]["ended_at"] is None
    wish = None
    if row.cancel_deadline is not None:
        wish = {"mode": "cancel", "checkpoint": bool(row.cancel_checkpoint), "deadline": row.cancel_deadline}
    return {
        "priority": spec.get("priority", 0),
        "reason": json.dumps(_reason(row.reason)) if row.reason else None,
        "attempts": json.dumps(attempts),
        "times": json.dumps({"QUEUED": row.created_at, row.state: row.updated_at}),
        "wish": json.dumps(wish) if wish else None,
        "size": json.dumps(scaling),
        "holds": int(row.state in _HOLDING or (row.state == "CANCELLING" and live)),
        "waits": int(row.state == "QUEUED"),
        "since": attempts[-1]["started_at"] if attempts else 0.0,
    }


def _reason(said: str | None) -> dict[str, str] | None:
    return {"code": "worker_failure", "message": said} if said else None


def _lower(row: Any) -> dict[str, Any]:
    attempts, wish = json.loads(row.attempts), json.loads(row.wish) if row.wish else None
    for attempt in attempts:
        attempt["reason"] = attempt["reason"]["message"] if attempt["reason"] else None
        attempt.pop("workers", None)
        attempt.pop("step", None)
    state = {"PAUSING": "CANCELLING", "PAUSED": "CANCELLED"}.get(row.state, row.state)
    if row.state == "PAUSED" and wish and wish.get("by") == "preempted":
        state = "QUEUED"
    return {
        "state": state,
        "reason": json.loads(row.reason)["message"] if row.reason else None,
        "attempts": json.dumps(attempts),
        "cancel_deadline": wish["deadline"] if wish and state == "CANCELLING" else None,
        "cancel_checkpoint": int(wish["checkpoint"]) if wish and state == "CANCELLING" else None,
    }
