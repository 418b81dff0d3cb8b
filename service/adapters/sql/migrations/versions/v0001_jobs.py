"""Jobs, their labels, and idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the first tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("project", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("run_dir", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sa.Column("started_at", sa.Float(53)),
        sa.Column("finished_at", sa.Float(53)),
        sa.Column("attempts", sa.Text, nullable=False),
        sa.Column("next_attempt_at", sa.Float(53)),
        sa.Column("cancel_deadline", sa.Float(53)),
        sa.Column("cancel_checkpoint", sa.Integer),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("lease_owner", sa.String(255)),
        sa.Column("lease_until", sa.Float(53)),
    )
    op.create_index("jobs_by_state", "jobs", ["state"])
    op.create_index("jobs_by_project", "jobs", ["project"])
    _create_satellites()


def _create_satellites() -> None:
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("key", sa.String(64), primary_key=True),
        sa.Column("value", sa.String(512), nullable=False),
    )
    op.create_index("job_labels_by_value", "job_labels", ["key", "value"])
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("body", sa.String(64), nullable=False),
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    )
