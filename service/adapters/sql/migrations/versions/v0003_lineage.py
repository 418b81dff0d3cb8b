"""What a job was cloned from, and the numbers of workers that an elastic one may have."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add what is new; nothing that was there has any of it."""
    op.add_column("jobs", sa.Column("parent", sa.Text))
    op.add_column("jobs", sa.Column("sizes", sa.Text, nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("granted", sa.Integer))


def downgrade() -> None:
    """Back to what 0002 knows: an elastic job stays at the most workers that it asked for, a clone forgets its parent.

    The parent's checkpoint is named in the run directory, too, from which the job goes on.
    """
    connection = op.get_bind()
    table = sa.Table("jobs", sa.MetaData(), autoload_with=connection)
    for row in connection.execute(sa.select(table)).all():
        spec, sizes = json.loads(row.spec), json.loads(row.sizes)
        spec["scaling"] = _fixed(spec["scaling"], sizes)
        scaling = None if row.scaling is None else json.dumps(_fixed(json.loads(row.scaling), sizes))
        fixed = {"spec": json.dumps(spec), "scaling": scaling, "size": scaling or json.dumps(spec["scaling"])}
        connection.execute(table.update().where(table.c.id == row.id).values(fixed))
    op.drop_column("jobs", "granted")
    op.drop_column("jobs", "sizes")
    op.drop_column("jobs", "parent")


def _fixed(scaling: dict[str, Any], sizes: list[int]) -> dict[str, Any]:
    """A size without a range: the most workers that it can run with, or may have where that is another size's range."""
    workers = scaling["num_workers"]
    if not isinstance(workers, dict):
        return scaling
    possible = [size for size in sizes if workers["min"] <= size <= workers["max"]]
    return scaling | {"num_workers": max(possible, default=workers["max"])}
