"""Settings of the service, read from environment variables with the prefix TRAINSHED_."""

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

from service.config.host_memory import host_memory
from service.config.logs import LogFormat
from service.domain.access.code import CodePolicy
from service.domain.access.oidc_claims import tamper_proof
from service.domain.access.rate_limit import Rate
from service.domain.access.roles import ANY, PROJECT_OR_ANY, Role
from service.domain.queue.policy import QueuePolicy, Quota
from service.domain.webhooks.ssrf import AllowList
from train_loop.run_dir import DEFAULT_SINKS, SINKS, ReadPolicy, SinkName, local_path, parse_sinks

_DATABASES = ("sqlite:///", "postgresql://", "postgresql+psycopg://")


class _Environment(EnvSettingsSource):
    """Environment source that reports invalid JSON as a validation error, together with all other errors."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: str) -> JsonValue:
        """Decode JSON; return the text itself if it is invalid."""
        try:
            decoded: JsonValue = super().decode_complex_value(field_name, field, value)
        except (ValueError, RecursionError):
            return value
        return decoded


def _none(value: object) -> object:
    """Convert the text `none` to None."""
    return None if value == "none" else value


def _rate(value: object) -> object:
    return Rate.parse(value) if isinstance(value, str) and value != "none" else _none(value)


_RANKS_PART = 0.85
"""Part of the memory for ranks and object store: the rest is for the service, Ray's daemons and the system."""
_LEAST_MEMORY = 1 << 28

Limit = Annotated[Rate | None, NoDecode, BeforeValidator(_rate)]


class Settings(BaseSettings):
    """All settings of the service; the defaults run on a laptop."""

    model_config = SettingsConfigDict(env_prefix="TRAINSHED_", env_ignore_empty=True, frozen=True)

    home: Path = Field(default=Path("~/.trainshed"), description="database, keys, default storage")
    admin_key_file: Path | None = Field(
        default=None, description="file with the operator's key; default: admin.key in home, created at the first start"
    )
    metrics_key_file: Path | None = Field(
        default=None, description="file with a key that is valid for GET /metrics only"
    )
    secret_key: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(),
        description="keys of ≥ 32 characters that encrypt webhook secrets: the first encrypts, all decrypt",
    )
    secret_key_file: Path | None = Field(
        default=None, description="file with these keys, one per line; default: DATABASE.key next to a SQLite database"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on; :: for all, IPv4 and IPv6")
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="accepted names in the Host header, in addition to localhost and `host`"
    )
    database_url: str | None = Field(default=None, description="SQLAlchemy URL; default: SQLite in home")
    database_seconds: float = Field(default=600.0, gt=0, description="timeout of the database at startup")
    database_call_seconds: float = Field(
        default=10.0, gt=0, description="timeout of a statement, and of the wait for a connection or a lock"
    )
    storage_roots: Annotated[dict[str, tuple[str, ...]], NoDecode] = Field(
        default={},
        description="URIs below which specs may read, in addition to run directories of their project: a comma list, "
        'or by project, as JSON: {"nlp": ["s3://nlp/"], "*": ["file:///shared"]}',
    )
    runs: str | None = Field(default=None, description="URI of the folder of run directories; default: home/runs")
    cache: str | None = Field(
        default=None,
        description="shared folder for prepared data, visible to all hosts; default: _cache next to the run "
        "directories, or in home if these are on object storage",
    )
    storage_seconds: float = Field(
        default=300.0, ge=0, description="how long to retry unavailable storage before an attempt or a save fails"
    )
    sinks: Annotated[tuple[SinkName, ...], NoDecode] = Field(
        default=DEFAULT_SINKS, description=f"metrics sinks: {', '.join(SINKS)}, or none"
    )
    ray_address: str | None = Field(default=None, description="dashboard URL of a cluster; default: embedded Ray")
    dashboard_url: str | None = Field(
        default=None, description="URL of Ray's dashboard for users, if it differs from ray_address"
    )
    ray_cluster: str | None = Field(default=None, description="name of KubeRay's RayCluster, for commands in remedies")
    ray_pod_digests: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="digests of the Ray pods' specifications; doctor names pods that have another one"
    )
    ray_cpus: int = Field(
        default_factory=lambda: max(2, os.cpu_count() or 1), ge=1, description="number of CPUs of embedded Ray"
    )
    ray_object_store_bytes: int = Field(
        default=500_000_000, ge=80_000_000, description="object store size of embedded Ray"
    )
    ray_memory_bytes: int | None = Field(
        default=None,
        ge=_LEAST_MEMORY,
        description="memory that all jobs on embedded Ray may reserve together; default: 85 % of the memory of "
        "the host or its container, without the object store",
    )
    reconcile_seconds: float = Field(default=0.5, gt=0)
    lease_seconds: float = Field(default=30.0, gt=0)
    retry_seconds: float = Field(default=5.0, ge=0, description="delay before attempt 2; doubles each time")
    retry_cap_seconds: float = Field(default=300.0, ge=0)
    cancel_grace_seconds: float = Field(default=60.0, ge=0)
    stop_seconds: float = Field(
        default=30.0, ge=0, description="time for jobs of embedded Ray to save when the service stops"
    )
    pause_grace_seconds: float = Field(default=600.0, ge=0, description="time to commit a checkpoint and stop")
    quotas: dict[str, Quota] = Field(
        default={}, description='by project, as JSON: {"nlp": {"jobs": 4, "workers": 32, "gpus": 16}, "*": {"jobs": 1}}'
    )
    max_priority: dict[Annotated[str, Field(pattern=PROJECT_OR_ANY)], Annotated[int, Field(ge=-1000, le=1000)]] = Field(
        default={ANY: 0},
        description="maximum priority of jobs that callers other than admins of all projects submit: a number, or by "
        'project, as JSON: {"nlp": 10, "*": 0}',
    )
    allow_code: Annotated[tuple[Annotated[str, Field(pattern=PROJECT_OR_ANY)], ...], NoDecode] = Field(
        default=(),
        description="projects whose jobs may run their own code (spec field code), a comma list; *: all. The code has "
        "the rights of the workers, and of the service while it is checked",
    )
    backfill: bool = Field(default=True, description="let a job start before a blocked job that it does not delay")
    preemption: bool = Field(default=True, description="pause jobs of lower priority for others, and resume them later")
    resize_seconds: float = Field(default=600.0, ge=0, description="minimum time before an elastic job grows")
    cluster_limit: dict[str, float] = Field(
        default={}, description='maximum resources of an autoscaled cluster, as JSON: {"GPU": 64, "CPU": 512}'
    )
    preflight_seconds: float = Field(default=120.0, gt=0, description="timeout of the check of one spec")
    preflight_cpu_seconds: float = Field(default=30.0, ge=1, description="maximum CPU time of one check")
    preflight_memory_bytes: int = Field(default=2 << 30, ge=64 << 20, description="maximum memory of one check")
    preflight_checks: int = Field(
        default=32, ge=4, description="maximum concurrent checks of specs; a quarter per key, half per project"
    )
    verify_seconds: float = Field(
        default=600.0, gt=0, description="timeout of verifying a checkpoint or computing its digests"
    )
    webhook_allowed: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="CIDRs and host names of receivers that are not on the public internet"
    )
    max_body_bytes: int = Field(default=1 << 20, ge=1)
    connections: int = Field(
        default=2048, ge=16, description="maximum open connections, within the system's limit of open files"
    )
    connections_per_address: int = Field(
        default=512,
        ge=1,
        description="maximum open connections from one address (IPv6: one /64); a new one replaces the oldest without "
        "a key; proxies in FORWARDED_ALLOW_IPS are exempt",
    )
    head_seconds: float = Field(default=10.0, gt=0, description="timeout of a request's head")
    body_bytes_per_second: float = Field(
        default=4096.0,
        gt=0,
        description="minimum rate of a request body, and of an answer that waits to be read; slower connections are "
        "closed after 10 s or more",
    )
    logs: LogFormat = Field(default="console", description="log format on stderr: text lines, or JSON")
    reads_per_key: Limit = Field(default=Rate(6000, "minute"), description="rate limit of reads; none: unlimited")
    writes_per_key: Limit = Field(default=Rate(600, "minute"), description="rate limit of all other calls")
    strangers_per_address: Limit = Field(default=Rate(600, "minute"), description="rate limit of unauthenticated calls")
    streams_per_key: Annotated[int | None, BeforeValidator(_none)] = Field(
        default=200, ge=1, description="maximum open streams; none: unlimited"
    )
    oidc_issuer: str | None = Field(
        default=None, description="URL of an OpenID Connect issuer whose tokens are accepted"
    )
    oidc_audience: str | None = Field(default=None, description="required audience of its tokens")
    oidc_groups_claim: str = Field(default="groups", description="claim with the group names of a caller")
    oidc_groups: dict[str, dict[str, Role]] = Field(
        default={}, description='roles per project for each group, as JSON: {"nlp-team": {"nlp": "editor"}}'
    )

    @field_validator("max_priority", mode="before")
    @classmethod
    def _for_all(cls, value: object) -> object:
        return {ANY: value} if isinstance(value, int) else value

    @field_validator("storage_roots", mode="before")
    @classmethod
    def _by_project(cls, value: object) -> object:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                return json.loads(value)
            except (ValueError, RecursionError) as error:
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

    @field_validator("allow_code", "allowed_hosts", "webhook_allowed", "ray_pod_digests", mode="before")
    @classmethod
    def _comma_list(cls, value: str | tuple[str, ...]) -> tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        return tuple(part.strip() for part in parts if part.strip())

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources: arguments, then the environment; no files."""
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
        # Samples are read by their offset in a file.
        if value is None or value.startswith("/"):
            return value
        if not value.startswith("file:"):
            raise ValueError("must be a folder visible to all hosts, /PATH or file:///PATH, not object storage")
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
            raise ValueError(f"{value!r} does not begin with https://, which only an issuer on this machine may omit")
        return value

    @model_validator(mode="after")
    def _whole_oidc(self) -> "Settings":
        if self.oidc_issuer is not None and (self.oidc_audience is None or not self.oidc_groups):
            raise ValueError(
                "TRAINSHED_OIDC_ISSUER alone grants no access; set TRAINSHED_OIDC_AUDIENCE and TRAINSHED_OIDC_GROUPS"
            )
        return self

    @field_validator("secret_key", mode="before")
    @classmethod
    def _secret_keys(cls, value: str | tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        keys = tuple(SecretStr(key) for key in value.split(",")) if isinstance(value, str) else value
        if any(len(key.get_secret_value().strip()) < 32 for key in keys):
            raise ValueError("a key must have at least 32 characters; create one with `openssl rand -hex 32`")
        return tuple(SecretStr(key.get_secret_value().strip()) for key in keys)

    @field_validator("webhook_allowed")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        AllowList.parse(value)
        return value

    @field_validator("home", "admin_key_file", "metrics_key_file", "secret_key_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else Path(os.path.abspath(value.expanduser()))

    def make_home(self) -> None:
        """Create the home, accessible to its owner only; leave an existing one unchanged."""
        self.home.mkdir(parents=True, exist_ok=True, mode=0o700)

    @property
    def embedded_memory_bytes(self) -> int:
        """Return the memory that all jobs on embedded Ray may reserve together, in bytes."""
        default = int(_RANKS_PART * host_memory()) - self.ray_object_store_bytes
        return self.ray_memory_bytes or max(default, _LEAST_MEMORY)

    @property
    def rules(self) -> QueuePolicy:
        """Return the queue policy."""
        return QueuePolicy(self.quotas, self.backfill, self.preemption, self.resize_seconds)

    @property
    def receivers(self) -> AllowList:
        """Return the allowed webhook receivers that are not on the public internet."""
        return AllowList.parse(self.webhook_allowed)

    @property
    def default_root(self) -> str:
        """Return the storage root of run directories."""
        return self.runs or self.own_root

    @property
    def own_root(self) -> str:
        """Return the default storage root, in the home."""
        return (self.home / "runs").as_uri()

    @property
    def roots_file(self) -> Path:
        """Return the file with the storage roots that this service has used, and the ids of their markers."""
        return self.home / "roots.json"

    @property
    def all_roots(self) -> tuple[str, ...]:
        """Return the storage roots of all projects, without the roots of run directories."""
        return tuple(dict.fromkeys(root for roots in self.storage_roots.values() for root in roots))

    def read_policy(self, project: str) -> ReadPolicy:
        """Return the paths that the jobs of a project may read."""
        runs = tuple(dict.fromkeys((self.default_root, self.own_root)))
        roots = (*self.storage_roots.get(project, ()), *self.storage_roots.get(ANY, ()))
        caches = [f"{root.rstrip('/')}/_cache" for root in runs if root.startswith(("file:", "/"))]
        if self.cache is not None:
            caches.append(self.cache)
        return ReadPolicy(
            project=project,
            roots=tuple(dict.fromkeys((*runs, *roots))),
            runs=runs,
            caches=tuple(caches),
            code=self.code_policy.allows(project),
        )

    @property
    def code_policy(self) -> CodePolicy:
        """Return the projects that may run their own code."""
        return CodePolicy(frozenset(self.allow_code))

    @property
    def database(self) -> str:
        """Return the SQLAlchemy URL in use."""
        return self.database_url or f"sqlite:///{self.home / 'trainshed.db'}"

    @property
    def admin_key(self) -> Path:
        """Return the file with the admin key."""
        return self.admin_key_file or self.home / "admin.key"

    @property
    def address_file(self) -> Path:
        """Return the file with the URL of the running service."""
        return self.home / "service.json"
