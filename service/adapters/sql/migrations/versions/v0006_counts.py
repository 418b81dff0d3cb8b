"""An index by state and project, so that jobs are counted without reading their rows."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Replace the index by state instead of adding an index: storing a job costs no more."""
    op.drop_index("jobs_by_state", "jobs")
    op.create_index("jobs_by_state", "jobs", ["state", "project"])


def downgrade() -> None:
    """Restore the index by state alone."""
    op.drop_index("jobs_by_state", "jobs")
    op.create_index("jobs_by_state", "jobs", ["state"])
