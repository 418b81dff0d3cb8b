"""Backup during writes, and restore: complete or rejected, without data loss."""

import io
import json
import sqlite3
import stat
import tarfile
import threading
from contextlib import closing
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

from service import backup as module
from service.adapters.key_files import ensure_key
from service.adapters.sql.database import open_database
from service.adapters.sql.store import SqlJobStore
from service.backup import back_up, restore
from service.config.settings import Settings
from service.errors import BackupFailed, HomeInUse
from service.ports import JobQuery, Lease, NewJob
from tests.support.fakes.service import a_job
from trainshed.cli.main import app


def home(path: Path, *, jobs: int = 0) -> Settings:
    """Create a service home with an admin key, a database and `jobs` jobs."""
    settings = Settings(home=path)
    settings.make_home()
    ensure_key(settings.admin_key)
    engine = open_database(settings.database)
    for number in range(jobs):
        SqlJobStore(engine).add(NewJob(a_job(f"job-{number:04d}")))
    engine.dispose()
    return settings


def jobs_of(settings: Settings) -> list[str]:
    engine = open_database(settings.database)
    found = [job.id for job in SqlJobStore(engine).page(JobQuery(limit=10_000))]
    engine.dispose()
    return found[::-1]


@pytest.fixture
def used(tmp_path: Path) -> Settings:
    return home(tmp_path / "used", jobs=3)


def test_backup_during_writes_is_a_consistent_snapshot(used: Settings, tmp_path: Path) -> None:
    store, enough = SqlJobStore(open_database(used.database)), threading.Event()

    def write() -> None:
        for number in range(3, 10_000):
            store.add(NewJob(a_job(f"job-{number:04d}")))
            if enough.is_set() and number > 50:
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        made = back_up(used, tmp_path / "b.tar")
    finally:
        enough.set()
        writer.join()
    assert stat.S_IMODE((tmp_path / "b.tar").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    fresh = Settings(home=tmp_path / "fresh")
    assert restore(fresh, tmp_path / "b.tar", force=False).backup == made
    assert (tmp_path / "fresh" / "admin.key").read_text() == used.admin_key.read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in (fresh.admin_key, fresh.home / "trainshed.db")} == {0o600}
    found = jobs_of(fresh)
    assert len(found) >= 3
    assert found == [f"job-{number:04d}" for number in range(len(found))]


def test_restore_removes_leases_of_jobs_and_leader(used: Settings, tmp_path: Path) -> None:
    SqlJobStore(open_database(used.database)).claim("job-0000", Lease("dead", now=0.0, until=1e12))
    SqlJobStore(open_database(used.database)).lead(Lease("dead", now=0.0, until=1e12))
    back_up(used, tmp_path / "b.tar")
    fresh = Settings(home=tmp_path / "fresh")
    restore(fresh, tmp_path / "b.tar", force=False)
    store = SqlJobStore(open_database(fresh.database))
    assert store.claim("job-0000", Lease("me", now=1.0, until=2.0)) is not None
    assert store.lead(Lease("me", now=1.0, until=2.0))


def test_restore_over_existing_files_needs_force_and_keeps_them(used: Settings, tmp_path: Path) -> None:
    back_up(used, tmp_path / "b.tar")
    other = home(tmp_path / "other", jobs=1)
    key = other.admin_key.read_text()
    with pytest.raises(BackupFailed, match="exist; --force keeps them"):
        restore(other, tmp_path / "b.tar", force=False)
    with FileLock(other.home / "service.lock"), pytest.raises(HomeInUse, match="Another service uses"):
        restore(other, tmp_path / "b.tar", force=True)
    assert (jobs_of(other), other.admin_key.read_text()) == (["job-0000"], key)
    kept = restore(other, tmp_path / "b.tar", force=True).kept
    assert jobs_of(other) == ["job-0000", "job-0001", "job-0002"]
    aside = next(path for path in kept if "trainshed.db" in path)
    with closing(sqlite3.connect(aside)) as before:
        assert before.execute("SELECT id FROM jobs").fetchall() == [("job-0000",)]
    assert key in [Path(path).read_text() for path in kept if "admin.key" in path]


def test_restore_that_fails_half_way_changes_nothing(
    used: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_up(used, tmp_path / "b.tar")
    other = home(tmp_path / "other", jobs=1)
    key, before = other.admin_key.read_text(), {path.name for path in other.home.iterdir()}
    synced = iter([None])

    def sync_once(path: Path) -> None:
        if next(synced, 1):
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "sync", sync_once)
        with pytest.raises(OSError, match="No space left"):
            restore(other, tmp_path / "b.tar", force=True)
    assert {path.name for path in other.home.iterdir()} - before == {"service.lock", "trainshed.db.lock"}
    assert (jobs_of(other), other.admin_key.read_text()) == (["job-0000"], key)


def put_file(tar: Path, name: str, content: bytes) -> None:
    """Add or replace one file in a backup."""
    with tarfile.open(tar) as archive:
        files = {member.name: archive.extractfile(member) for member in archive}
        held = {known: file.read() for known, file in files.items() if file is not None} | {name: content}
    with tarfile.open(tar, "w") as archive:
        for known, content in held.items():
            member = tarfile.TarInfo(known)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_damaged_backup_is_rejected_and_restores_nothing(used: Settings, tmp_path: Path) -> None:
    fresh, tar = Settings(home=tmp_path / "fresh"), tmp_path / "b.tar"
    for name, message in (("trainshed.db", "wrong checksum of trainshed.db"), ("manifest.json", "cannot be restored")):
        tar.unlink(missing_ok=True)
        back_up(used, tar)
        put_file(tar, name, b"{}")
        with pytest.raises(BackupFailed, match=message):
            restore(fresh, tar, force=False)
    tar.write_bytes(b"no tar")
    with pytest.raises(BackupFailed, match="name a file that `trainshed backup` wrote"):
        restore(fresh, tar, force=False)
    assert {path.name for path in fresh.home.iterdir()} <= {"service.lock", "trainshed.db.lock"}


def test_backup_of_newer_schema_revision_fails(used: Settings, tmp_path: Path) -> None:
    with closing(sqlite3.connect(used.home / "trainshed.db")) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.commit()
    with pytest.raises(BackupFailed, match="at schema revision 9999"):
        back_up(used, tmp_path / "b.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_backup_of_damaged_database_fails(used: Settings, tmp_path: Path) -> None:
    (used.home / "trainshed.db").write_bytes(b"x" * 8192)
    with pytest.raises(BackupFailed, match="file is not a database"):
        back_up(used, tmp_path / "b.tar")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]


def test_backup_and_restore_commands_print_paths_and_exit_codes(
    used: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, tar = CliRunner(), tmp_path / "b.tar"
    monkeypatch.setenv("TRAINSHED_HOME", str(used.home))
    result = runner.invoke(app, ["backup", str(tar)])
    assert (result.exit_code, result.stdout) == (0, f"{tar}\n")
    assert f"next: trainshed restore {tar}" in result.stderr.replace("\n", "")
    again = runner.invoke(app, ["backup", str(tar)])
    assert (again.exit_code, again.stderr) == (1, f"trainshed: {tar} already exists; choose another file name\n")
    assert runner.invoke(app, ["backup"]).exit_code == 2
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path / "fresh"))
    missing = runner.invoke(app, ["restore", str(tmp_path / "none.tar")])
    assert missing.exit_code == 1
    assert "No such file" in missing.stderr
    result = runner.invoke(app, ["restore", str(tar), "--json"])
    assert (result.exit_code, json.loads(result.stdout)["kept"]) == (0, [])
    refused = runner.invoke(app, ["restore", str(tar)])
    assert (refused.exit_code, "--force" in refused.stderr) == (1, True)
    forced = runner.invoke(app, ["restore", str(tar), "--force"])
    assert (forced.exit_code, forced.stdout.count("kept ")) == (0, 2)
    assert runner.invoke(app, ["restore"]).exit_code == 2


def test_backup_command_on_postgres_suggests_pg_dump_without_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSHED_HOME", str(tmp_path))
    monkeypatch.setenv("TRAINSHED_DATABASE_URL", "postgresql+psycopg://shed:secret@db.example:5433/shed")
    result = CliRunner().invoke(app, ["backup", str(tmp_path / "b.dump")])
    assert result.exit_code == 1
    dump = f"pg_dump --format=custom --file={tmp_path / 'b.dump'} postgresql://shed@db.example:5433/shed"
    assert dump in result.stderr
    assert "secret" not in result.stderr
