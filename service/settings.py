"""What the process is told by its environment: one Settings, prefix TRAINSHED_."""

import json
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, JsonValue, SecretStr, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from service.domain.access import ANY, PROJECT_OR_ANY, Role
from service.domain.addresses import Allowed
from service.domain.rates import Rate
from service.domain.rules import Quota, Rules
from service.domain.token import tamper_proof
from service.logs import LogFormat
from train_loop.run_dir import DEFAULT_SINKS, SINKS, ReadPolicy, SinkName, local_path, parse_sinks

_DATABASES = ("sqlite:///", "postgresql://", "postgresql+psycopg://")


class _Environment(EnvSettingsSource):
    """The environment, in which what is no JSON is one problem among others and does not hide them."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: str) -> JsonValue:
        """What the text says, or the text."""
        try:
            decoded: JsonValue = super().decode_complex_value(field_name, field, value)
        except ValueError:
            return value
        return decoded


def _none(value: object) -> object:
    """Nothing, where it says so."""
    return None if value == "none" else value


def _rate(value: object) -> object:
    return Rate.parse(value) if isinstance(value, str) and value != "none" else _none(value)


Limit = Annotated[Rate | None, NoDecode, BeforeValidator(_rate)]


class Settings(BaseSettings):
    """Every knob of the service, with a default that runs on a laptop."""

    model_config = SettingsConfigDict(env_prefix="TRAINSHED_", env_ignore_empty=True, frozen=True)

    home: Path = Field(default=Path("~/.trainshed"), description="database, keys, default storage")
    admin_key_file: Path | None = Field(
        default=None, description="file with the operator's key; default: admin.key in home, created at the first start"
    )
    metrics_key_file: Path | None = Field(
        default=None, description="file with a key that opens GET /metrics and nothing else"
    )
    secret_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        description="keys of ≥ 32 characters for webhook secrets; the first encrypts, all decrypt",
    )
    secret_key_file: Path | None = Field(
        default=None, description="file with such keys, one a line; default: DATABASE.key beside a SQLite database"
    )
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0: the system chooses")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="names besides localhost and `host` by which callers may address the service"
    )
    database_url: str | None = Field(default=None, description="SQLAlchemy URL; default: SQLite in home")
    database_seconds: float = Field(default=600.0, gt=0, description="to wait at start for a database to answer")
    database_call_seconds: float = Field(
        default=10.0, gt=0, description="time limit of a statement, and of the wait for a connection or a lock"
    )
    storage_roots: Annotated[dict[str, tuple[str, ...]], NoDecode] = Field(
        default={},
        description="URIs below which specs may read, besides run directories of their project: a comma list, or by "
        'project, as JSON: {"nlp": ["s3://nlp/"], "*": ["file:///shared"]}',
    )
    runs: str | None = Field(default=None, description="URI below which run directories go; default: home/runs")
    cache: str | None = Field(
        default=None,
        description="folder for prepared data that all hosts see; default: _cache beside the run directories, or in "
        "home if these are on object storage",
    )
    storage_seconds: float = Field(
        default=300.0, ge=0, description="to retry storage that is unavailable before an attempt or a save fails"
    )
    sinks: Annotated[tuple[SinkName, ...], NoDecode] = Field(
        default=DEFAULT_SINKS, description=f"who shows metrics: {', '.join(SINKS)}, or none"
    )
    ray_address: str | None = Field(default=None, description="dashboard URL of a cluster; default: embedded Ray")
    dashboard_url: str | None = Field(
        default=None, description="where users open Ray's dashboard, if not at ray_address"
    )
    ray_cpus: int = Field(default_factory=lambda: max(2, os.cpu_count() or 1), ge=1, description="of embedded Ray")
    ray_object_store_bytes: int = Field(default=500_000_000, ge=80_000_000, description="of embedded Ray")
    reconcile_seconds: float = Field(default=0.5, gt=0)
    lease_seconds: float = Field(default=30.0, gt=0)
    retry_seconds: float = Field(default=5.0, ge=0, description="pause before attempt 2; doubles each time")
    retry_cap_seconds: float = Field(default=300.0, ge=0)
    cancel_grace_seconds: float = Field(default=60.0, ge=0)
    stop_seconds: float = Field(
        default=30.0, ge=0, description="for jobs of embedded Ray to save when the service is stopped"
    )
    pause_grace_seconds: float = Field(default=600.0, ge=0, description="to commit a checkpoint and to leave")
    quotas: dict[str, Quota] = Field(
        default={}, description='by project, as JSON: {"nlp": {"jobs": 4, "workers": 32, "gpus": 16}, "*": {"jobs": 1}}'
    )
    backfill: bool = Field(default=True, description="a job may pass one that waits for room, if it does not delay it")
    preemption: bool = Field(default=True, description="jobs make room for those of higher priority, and go on later")
    resize_seconds: float = Field(default=600.0, ge=0, description="an elastic job grows no more often")
    cluster_limit: dict[str, float] = Field(
        default={}, description='what an autoscaler may grow the cluster to, as JSON: {"GPU": 64, "CPU": 512}'
    )
    preflight_seconds: float = Field(default=120.0, gt=0, description="to check data and model of one spec")
    preflight_cpu_seconds: float = Field(default=30.0, ge=1, description="of CPU time that one check may use")
    preflight_memory_bytes: int = Field(default=2 << 30, ge=64 << 20, description="of memory that one check may take")
    preflight_checks: int = Field(
        default=32, ge=4, description="specs checked at once; a key gets a quarter of them, a project half"
    )
    verify_seconds: float = Field(default=600.0, gt=0, description="to read all of a checkpoint")
    webhook_allowed: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="CIDRs and host names of receivers that are not on the open internet"
    )
    max_body_bytes: int = Field(default=1 << 20, ge=1)
    connections: int = Field(default=2048, ge=16, description="open at once, as far as the system lets it open files")
    connections_per_address: int = Field(
        default=512, ge=1, description="open at once from one address, unless FORWARDED_ALLOW_IPS names it as a proxy"
    )
    head_seconds: float = Field(default=10.0, gt=0, description="for the head of a request to arrive")
    body_bytes_per_second: float = Field(
        default=4096.0,
        gt=0,
        description="a body that arrives more slowly is cut off, after 10 s at the earliest",
    )
    logs: LogFormat = Field(default="console", description="lines for people, or JSON for machines; on stderr")
    reads_per_key: Limit = Field(
        default=Rate(6000, "minute"), description="calls that change nothing; none: any number"
    )
    writes_per_key: Limit = Field(default=Rate(600, "minute"), description="all others")
    strangers_per_address: Limit = Field(default=Rate(600, "minute"), description="calls that no key comes with")
    streams_per_key: Annotated[int | None, BeforeValidator(_none)] = Field(
        default=200, ge=1, description="open at once; none: any number"
    )
    oidc_issuer: str | None = Field(default=None, description="URL of an OpenID Connect issuer whose tokens open, too")
    oidc_audience: str | None = Field(default=None, description="what its tokens must be issued for")
    oidc_groups_claim: str = Field(default="groups", description="claim with the names of the groups of a caller")
    oidc_groups: dict[str, dict[str, Role]] = Field(
        default={}, description='by group, roles by project, as JSON: {"nlp-team": {"nlp": "editor"}}'
    )

    @field_validator("storage_roots", mode="before")
    @classmethod
    def _by_project(cls, value: object) -> object:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                return json.loads(value)
            except ValueError as error:
                raise ValueError(f"it is not valid JSON: {error}") from error
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.split(",") if part.strip())
        return {ANY: value} if isinstance(value, tuple | list) and value else value or {}

    @field_validator("storage_roots")
    @classmethod
    def _known_projects(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for project, roots in value.items():
            if not re.fullmatch(PROJECT_OR_ANY, project):
                raise ValueError(f"{project!r} is not a project's name; expected a-z, 0-9 and -, or {ANY} for all")
            for root in roots:
                if root.startswith("file:"):
                    local_path(root)
        return value

    @field_validator("allowed_hosts", "webhook_allowed", mode="before")
    @classmethod
    def _comma_list(cls, value: str | tuple[str, ...]) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(part.strip() for part in parts if part.strip())

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What the caller says, then the environment; no files."""
        return named["init_settings"], _Environment(settings_cls)

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(_DATABASES):
            raise ValueError(f"must begin with {', '.join(_DATABASES[:-1])} or {_DATABASES[-1]}")
        return value

    @field_validator("ray_address", "dashboard_url")
    @classmethod
    def _dashboard_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must be the URL of the cluster's dashboard, http://HOST:8265")
        return None if value is None else value.rstrip("/")

    @field_validator("cache")
    @classmethod
    def _folder(cls, value: str | None) -> str | None:
        # Samples are read from it by their place in a file.
        if value is None or value.startswith("/"):
            return value
        if not value.startswith("file:"):
            raise ValueError("must be a folder that all hosts see, /PATH or file:///PATH: no object storage")
        return str(local_path(value))

    @field_validator("runs")
    @classmethod
    def _absolute_uri(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("file:"):
            local_path(value)
        return value

    @field_validator("sinks", mode="before")
    @classmethod
    def _sinks(cls, value: str | tuple[SinkName, ...]) -> tuple[SinkName, ...]:
        return parse_sinks(value) if isinstance(value, str) else value

    @field_validator("oidc_issuer")
    @classmethod
    def _issuer(cls, value: str | None) -> str | None:
        if value is not None and not tamper_proof(value):
            raise ValueError(f"{value!r} does not begin with https://; only an issuer on this machine may do without")
        return value

    @model_validator(mode="after")
    def _whole_oidc(self) -> "Settings":
        if self.oidc_issuer is not None and (self.oidc_audience is None or not self.oidc_groups):
            raise ValueError(
                "TRAINSHED_OIDC_ISSUER alone lets nobody in; set TRAINSHED_OIDC_AUDIENCE and TRAINSHED_OIDC_GROUPS, too"
            )
        return self

    @field_validator("secret_key", mode="before")
    @classmethod
    def _secret_keys(cls, value: str | tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        keys = tuple(SecretStr(key) for key in value.split(",")) if isinstance(value, str) else value
        if any(len(key.get_secret_value().strip()) < 32 for key in keys):
            raise ValueError("a key must have at least 32 characters; `openssl rand -hex 32` writes one")
        return tuple(SecretStr(key.get_secret_value().strip()) for key in keys)

    @field_validator("webhook_allowed")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        Allowed.parse(value)
        return value

    @field_validator("home", "admin_key_file", "metrics_key_file", "secret_key_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else Path(os.path.abspath(value.expanduser()))

    def make_home(self) -> None:
        """Create home, open to its owner alone; one that is there stays as it is."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def rules(self) -> Rules:
        """How the queue is gone through."""
        return Rules(self.quotas, self.backfill, self.preemption, self.resize_seconds)

    @property
    def receivers(self) -> Allowed:
        """Where webhooks may go besides the open internet."""
        return Allowed.parse(self.webhook_allowed)

    @property
    def default_root(self) -> str:
        """Where run directories go."""
        return self.runs or self.own_root

    @property
    def own_root(self) -> str:
        """The storage root that is always there."""
        return (self.home / "runs").as_uri()

    @property
    def roots_file(self) -> Path:
        """The file with the storage roots that this service has used, and the ids of their markers."""
        return self.home / "roots.json"

    @property
    def all_roots(self) -> tuple[str, ...]:
        """Return the storage roots of all projects, without those of run directories."""
        return tuple(dict.fromkeys(root for roots in self.storage_roots.values() for root in roots))

    def read_policy(self, project: str) -> ReadPolicy:
        """Return what the jobs of a project may read."""
        runs = tuple(dict.fromkeys((self.default_root, self.own_root)))
        roots = (*self.storage_roots.get(project, ()), *self.storage_roots.get(ANY, ()))
        caches = [f"{root.rstrip('/')}/_cache" for root in runs if root.startswith(("file:", "/"))]
        if self.cache is not None:
            caches.append(self.cache)
        return ReadPolicy(project=project, roots=tuple(dict.fromkeys((*runs, *roots))), runs=runs, caches=tuple(caches))

    @property
    def database(self) -> str:
        """The SQLAlchemy URL in use."""
        return self.database_url or f"sqlite:///{self.home / 'trainshed.db'}"

    @property
    def admin_key(self) -> Path:
        """The file with the admin key."""
        return self.admin_key_file or self.home / "admin.key"

    @property
    def address_file(self) -> Path:
        """The file that says where the running service listens."""
        return self.home / "service.json"
