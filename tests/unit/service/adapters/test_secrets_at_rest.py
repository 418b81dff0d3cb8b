"""Encryption of webhook secrets in the database: new secrets, secrets of older versions, and key rotation."""

import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import select

from service.adapters.key_files import ensure_key
from service.adapters.secret_box import SecretBox, read_secret_keys
from service.adapters.sql.database import Database
from service.adapters.sql.outbox import SqlOutbox
from service.adapters.sql.sealing import seal_secrets
from service.adapters.sql.store import SqlJobStore
from service.adapters.sql.tables import metadata, webhooks
from service.adapters.sql.webhooks import SqlWebhookStore
from service.backup import back_up, restore
from service.config.environment import BadSettings, read_settings
from service.config.settings import Settings
from service.domain.access.roles import OPERATOR, AuditEntry
from service.domain.jobs.job import JobState
from service.domain.webhooks.delivery import Webhook
from service.errors import KeyUnusable, SecretsUnreadable
from service.ports import Lease, NewJob
from tests.support.fakes.service import a_job
from tests.support.servers.databases import database_url

ENTRY = AuditEntry(1.0, OPERATOR, "webhook.create", "default", "hook-1")
SECRET, NEXT = "whsec_" + "QUJD" * 11, "whsec_" + "REVG" * 11
OLD_KEY, NEW_KEY, OTHER_KEY = "a" * 32, "b" * 64, "c" * 32
HOOK = Webhook("hook-1", "default", "https://x/", tuple(JobState), SECRET, 1.0, "operator")


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    url = database_url(request, tmp_path)
    database = Database(url)
    database.bring_up_to_date()
    yield database
    with database.engine.begin() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(table.delete())
    database.close()


def stored(database: Database) -> str:
    """Return the content of the secret columns."""
    with database.engine.connect() as connection:
        return str(connection.execute(select(webhooks.c.secret, webhooks.c.previous_secret)).all())


def open_box(database: Database, *keys: str) -> SecretBox:
    """Return the secret box of a service that starts with `keys`."""
    box = SecretBox()
    seal_secrets(database, box, keys, None)
    return box


def test_secrets_are_encrypted_in_the_database_and_sign_messages(database: Database) -> None:
    box = open_box(database, OLD_KEY)
    store = SqlWebhookStore(database.engine, box)
    store.add(HOOK, ENTRY)
    rotated = store.rotate("hook-1", NEXT, until=1e12, entry=ENTRY)
    assert rotated is not None
    assert rotated.secrets(2.0) == (NEXT, SECRET)
    assert "whsec_" not in stored(database)
    SqlJobStore(database.engine).add(NewJob(a_job()))
    batch = SqlOutbox(database.engine, box).claim(Lease("me", now=1e9, until=1e9 + 1))
    assert batch is not None
    assert batch.webhook.secrets(2.0) == (NEXT, SECRET)


def test_secrets_of_an_older_version_are_encrypted_at_startup(database: Database) -> None:
    store = SqlWebhookStore(database.engine)
    store.add(HOOK, ENTRY)
    store.rotate("hook-1", NEXT, until=1e12, entry=ENTRY)
    assert stored(database).count("whsec_") == 2
    box = open_box(database, OLD_KEY)
    assert "whsec_" not in stored(database)
    found = SqlWebhookStore(database.engine, box).get("hook-1")
    assert found is not None
    assert found.secrets(2.0) == (NEXT, SECRET)


def test_key_rotation_re_encrypts_and_the_old_key_is_not_needed_afterwards(database: Database) -> None:
    SqlWebhookStore(database.engine, open_box(database, OLD_KEY)).add(HOOK, ENTRY)
    before = stored(database)
    open_box(database, OLD_KEY)
    assert stored(database) == before
    open_box(database, NEW_KEY, OLD_KEY)
    assert stored(database) != before
    assert SqlWebhookStore(database.engine, open_box(database, NEW_KEY)).get("hook-1") == HOOK
    with pytest.raises(SecretsUnreadable):
        open_box(database, OLD_KEY)


@pytest.mark.parametrize("hooks", [0, 1])
def test_service_with_another_key_or_without_key_is_rejected(database: Database, hooks: int) -> None:
    box = open_box(database, OLD_KEY)
    if hooks:
        SqlWebhookStore(database.engine, box).add(HOOK, ENTRY)
    for keys in ((OTHER_KEY,), ()):
        with pytest.raises(SecretsUnreadable, match="TRAINSHED_SECRET_KEY to the key of the service that encrypted"):
            open_box(database, *keys)


def test_sqlite_creates_a_key_file_and_postgres_without_key_stores_plain_text(database: Database) -> None:
    box = open_box(database)
    SqlWebhookStore(database.engine, box).add(HOOK, ENTRY)
    file = Path(database.engine.url.database or "").with_suffix(".db.key")
    if database.engine.dialect.name == "postgresql":
        assert (box.encrypts, SECRET in stored(database)) == (False, True)
        return
    assert (box.encrypts, SECRET in stored(database)) == (True, False)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert all(b"whsec_" not in path.read_bytes() for path in file.parent.iterdir())
    # The operator's key replaces the key file, which can then be deleted.
    open_box(database, NEW_KEY)
    file.unlink()
    assert SqlWebhookStore(database.engine, open_box(database, NEW_KEY)).get("hook-1") == HOOK


def test_insecure_or_invalid_key_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{NEW_KEY}\n{OLD_KEY}\n")
    file.chmod(0o600)
    assert read_secret_keys(file) == (NEW_KEY, OLD_KEY)
    # Compose mounts a secret with this mode if the service runs as another user.
    file.chmod(0o444)
    read_secret_keys(file)
    file.chmod(0o646)
    with pytest.raises(KeyUnusable, match=r"other users may write to it \(0646\); chmod 600"):
        read_secret_keys(file)
    file.chmod(0o600)
    for content in ("", "short"):
        file.write_text(content)
        with pytest.raises(KeyUnusable, match="at least 32 characters"):
            read_secret_keys(file)
    with pytest.raises(KeyUnusable, match="No such file"):
        read_secret_keys(tmp_path / "none")


def test_short_secret_key_is_rejected_and_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSHED_SECRET_KEY", f"{NEW_KEY}, {OLD_KEY}")
    assert [key.get_secret_value() for key in read_settings().secret_key] == [NEW_KEY, OLD_KEY]
    monkeypatch.setenv("TRAINSHED_SECRET_KEY", f"{NEW_KEY},short-one")
    with pytest.raises(BadSettings, match=r"TRAINSHED_SECRET_KEY=.*at least 32 characters") as refused:
        read_settings()
    assert "short-one" not in str(refused.value)
    assert NEW_KEY not in str(refused.value)


@pytest.mark.parametrize("own", [True, False])
def test_backup_records_whether_it_holds_the_secret_key(tmp_path: Path, own: bool) -> None:
    used, fresh = Settings(home=tmp_path / "used"), Settings(home=tmp_path / "fresh")
    used.make_home()
    ensure_key(used.admin_key)
    database = Database(used.database)
    database.bring_up_to_date()
    keys = () if own else (NEW_KEY,)
    SqlWebhookStore(database.engine, open_box(database, *keys)).add(HOOK, ENTRY)
    database.close()
    made = back_up(used, tmp_path / "b.tar")
    assert made.holds_secret_key is own
    assert f'"holds_secret_key":{str(own).lower()}' in made.model_dump_json()
    assert restore(fresh, tmp_path / "b.tar", force=False).backup == made
    restored = Database(fresh.database)
    restored.bring_up_to_date()
    assert SqlWebhookStore(restored.engine, open_box(restored, *keys)).get("hook-1") == replace(HOOK)
    restored.close()
