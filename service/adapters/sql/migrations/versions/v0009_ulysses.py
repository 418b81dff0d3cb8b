"""The Ulysses size of each job, which admission needs to place its workers."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Add the column, and fill it from the jobs' specs."""
    op.add_column("jobs", sa.Column("ulysses", sa.Integer, nullable=False, server_default="1"))
    jobs = sa.table("jobs", sa.column("id", sa.String), sa.column("spec", sa.Text), sa.column("ulysses", sa.Integer))
    connection = op.get_bind()
    for row in connection.execute(sa.select(jobs.c.id, jobs.c.spec)).all():
        size = json.loads(row.spec).get("strategy", {}).get("ulysses_size", 1)
        if size != 1:
            connection.execute(jobs.update().where(jobs.c.id == row.id).values(ulysses=size))


def downgrade() -> None:
    """Remove the column."""
    op.drop_column("jobs", "ulysses")
