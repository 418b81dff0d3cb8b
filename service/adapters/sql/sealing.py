"""Check and encryption of the database's secrets at startup."""

from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, insert, select, update

from service.adapters.key_files import ensure_key
from service.adapters.secret_box import SecretBox, read_secret_keys
from service.adapters.sql.database import Database, secret_key_beside
from service.adapters.sql.tables import secret_checks, webhooks

_CHECKED = "trainshed"
"""Plain text of the check row. The row verifies the key even without webhooks."""


def seal_secrets(database: Database, box: SecretBox, keys: Sequence[str], file: Path | None) -> int:
    """Set the keys of the box, and encrypt all secrets with the first key. Return the number of changed secrets.

    `file` holds further keys. Without any key, a SQLite database gets its own key file at the first start; on Postgres,
    secrets stay plain. Raises KeyUnusable if a key is invalid, SecretsUnreadable if no key decrypts the secrets.
    """
    own = secret_key_beside(database.url)
    more = read_secret_keys(file) if file is not None else ()
    known = [*keys, *more, *(read_secret_keys(own) if own is not None and own.exists() else ())]
    with database.engine.begin() as connection:
        check = connection.execute(select(secret_checks.c.token)).scalar()
        if not known and check is None and own is not None:
            known = [ensure_key(own, setting="TRAINSHED_SECRET_KEY_FILE")]
        box.use(known)
        if check is not None:
            box.open(check)
        if not box.encrypts:
            return 0
        token = box.seal(_CHECKED) if check is None else box.reseal(check)
        if check is None:
            connection.execute(insert(secret_checks).values(id=1, token=token))
        elif token != check:
            connection.execute(update(secret_checks).values(token=token))
        return sum(_seal(connection, box, name) for name in ("secret", "previous_secret"))


def _seal(connection: Connection, box: SecretBox, name: str) -> int:
    column, sealed = webhooks.c[name], 0
    for webhook_id, stored in connection.execute(select(webhooks.c.id, column).where(column.is_not(None))).all():
        if (new := box.reseal(stored)) != stored:
            # Another replica may have rotated the secret meanwhile.
            same = (webhooks.c.id == webhook_id) & (column == stored)
            sealed += connection.execute(update(webhooks).where(same).values({name: new})).rowcount
    return sealed
