"""The settings of a running service, compared with those of a command."""

import json

import pytest

from service.config.environment import read_settings
from service.config.running import SettingsRecord, variable
from service.config.settings import Settings

KEY = "k" * 40
OTHER = {
    "admin_key_file": "/keys/admin",
    "metrics_key_file": "/keys/metrics",
    "secret_key": KEY,
    "secret_key_file": "/keys/secret",
    "host": "0.0.0.0",
    "allowed_hosts": "trainshed.example",
    "database_url": "postgresql://ann:hush@db/trainshed?password=quiet",
    "storage_roots": "file:///data,s3://ann:hush@bucket",
    "runs": "file:///runs",
    "cache": "/cache",
    "sinks": "none",
    "ray_address": "http://ann:hush@ray:8265",
    "ray_cluster": "trainshed",
    "ray_pod_digests": "abc,def",
    "ray_memory_bytes": "9000000000",
    "max_priority": "7",
    "dashboard_url": "http://dash:8265",
    "quotas": '{"nlp": {"jobs": 4}}',
    "allow_code": "nlp,vision",
    "backfill": "false",
    "preemption": "false",
    "cluster_limit": '{"GPU": 64}',
    "webhook_allowed": "10.0.0.0/8",
    "logs": "json",
    "reads_per_key": "7/second",
    "writes_per_key": "none",
    "strangers_per_address": "8/hour",
    "streams_per_key": "none",
    "oidc_groups_claim": "teams",
}
NUMBERS = [name for name, field in Settings.model_fields.items() if field.annotation in (int, float)]
OIDC = {"oidc_issuer": "https://issuer", "oidc_audience": "jobs", "oidc_groups": '{"team": {"nlp": "editor"}}'}


def settings(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> Settings:
    with monkeypatch.context() as patch:
        for name, value in values.items():
            patch.setenv(variable(name), value)
        return read_settings()


def test_every_setting_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {*OTHER, *NUMBERS, *OIDC, "home"} == Settings.model_fields.keys()
    base = settings(monkeypatch, {})
    numbers = {name: str(getattr(base, name) + 1) for name in NUMBERS}
    changed = settings(monkeypatch, OTHER | numbers | OIDC)
    record = SettingsRecord.of(base)
    assert record.differences(base) == []
    assert [line.partition(":")[0] for line in record.differences(changed)] == sorted(record.values, key=str.lower)
    assert [line.partition(":")[0] for line in SettingsRecord.of(changed).differences(base)] == sorted(
        record.values, key=str.lower
    )
    assert "TRAINSHED_PORT: the service has 8000, this command has 8001" in record.differences(changed)


def test_record_has_no_secrets_and_reports_their_change(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SettingsRecord.of(settings(monkeypatch, OTHER))
    text = record.model_dump_json()
    assert [secret for secret in ("hush", "quiet", KEY) if secret in text] == []
    for name, value in {
        "database_url": "postgresql://ann:other@db/trainshed?password=quiet",
        "secret_key": "m" * 40,
        "ray_address": "http://ann:other@ray:8265",
    }.items():
        (line,) = record.differences(settings(monkeypatch, OTHER | {name: value}))
        assert line.startswith(f"{variable(name)}: the service has ")
        assert "other" not in line
    (line,) = record.differences(settings(monkeypatch, OTHER | {"database_url": OTHER["database_url"] + "2"}))
    assert "postgresql://***@db/trainshed?password=*** (digest " in line
    assert SettingsRecord.model_validate_json(text).differences(settings(monkeypatch, OTHER)) == []


def test_settings_that_an_older_service_did_not_record_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SettingsRecord.of(settings(monkeypatch, {}))
    older = json.loads(record.model_dump_json())
    del older["values"]["TRAINSHED_PORT"]
    changed = settings(monkeypatch, {"port": "1", "host": "::1"})
    assert SettingsRecord(**older).differences(changed) == [
        "TRAINSHED_HOST: the service has 127.0.0.1, this command has ::1"
    ]
    assert SettingsRecord().differences(changed) == []
