"""Alembic environment: migrations on the connection that the service passes, in one transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
