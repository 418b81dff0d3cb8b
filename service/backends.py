"""The systems behind the service, as its settings choose them: database, cluster, storage, webhook receivers."""

import os
import sys
from dataclasses import dataclass
from functools import partial

from service.adapters.helper_processes.preflight import HelperPreflight
from service.adapters.helper_processes.preflight import Limits as PreflightLimits
from service.adapters.prometheus import PrometheusMetrics
from service.adapters.ray.embedded import EmbeddedRay
from service.adapters.ray.environment import environment_of_jobs
from service.adapters.ray.head import HeadSettings
from service.adapters.ray.jobs import RayJobs
from service.adapters.ray.session import RayAddress
from service.adapters.secret_box import SecretBox
from service.adapters.sql.access import SqlKeyStore
from service.adapters.sql.database import Database
from service.adapters.sql.store import SqlJobStore
from service.adapters.storage.roots import StorageRoots
from service.adapters.storage.run_dirs import LocalRunDirs
from service.adapters.storage.run_dirs_with_timeouts import GuardedRunDirs
from service.adapters.storage.timeouts import StorageGuard
from service.adapters.traces import AppTraces, open_traces
from service.adapters.webhook_sender import WebhookSender
from service.config.settings import Settings
from service.domain.queue.snapshot import QueueSnapshot
from service.ports import JobQuery
from train_loop.plan import AUTOSCALED_VARIABLE, NodeRoom
from train_loop.run_dir import (
    CACHE_VARIABLE,
    SERVICE_VERSION_VARIABLE,
    SINKS_VARIABLE,
    STORAGE_SECONDS_VARIABLE,
    format_sinks,
    own_version,
)


@dataclass(frozen=True)
class Backends:
    """The systems that this service uses, each behind its adapter."""

    database: Database
    store: SqlJobStore
    keys: SqlKeyStore
    roots: StorageRoots
    guard: StorageGuard
    run_dirs: GuardedRunDirs
    own_run_dirs: GuardedRunDirs
    """The run directories as the reconciler uses them."""
    preflight: HelperPreflight
    embedded: EmbeddedRay | None
    cluster: RayJobs
    queue: QueueSnapshot
    metrics: PrometheusMetrics
    traces: AppTraces
    sender: WebhookSender
    box: SecretBox


def build_backends(settings: Settings) -> Backends:
    """Build the adapters that the settings choose. None of them connects yet."""
    database, embedded = Database(settings.database, seconds=settings.database_call_seconds), _embedded(settings)
    store = SqlJobStore(database.engine)
    roots = StorageRoots(settings.roots_file, used=partial(_has_run_below, store))
    run_dirs, guard = LocalRunDirs(roots), StorageGuard(partial(roots.check, max_age=0.0))
    return Backends(
        database=database,
        store=store,
        keys=SqlKeyStore(database.engine),
        roots=roots,
        guard=guard,
        run_dirs=GuardedRunDirs(run_dirs, guard),
        own_run_dirs=GuardedRunDirs(run_dirs, guard, inline=True),
        preflight=HelperPreflight(read_policy=settings.read_policy, limits=_preflight_limits(settings)),
        embedded=embedded,
        cluster=_cluster(settings, embedded),
        queue=QueueSnapshot(),
        metrics=PrometheusMetrics(own_version()),
        traces=open_traces(os.environ),
        sender=WebhookSender(settings.receivers),
        box=SecretBox(),
    )


def _preflight_limits(settings: Settings) -> PreflightLimits:
    return PreflightLimits(
        seconds=settings.preflight_seconds,
        cpu_seconds=settings.preflight_cpu_seconds,
        memory_bytes=settings.preflight_memory_bytes,
    )


def _has_run_below(store: SqlJobStore, root: str) -> bool:
    newest = store.page(JobQuery(limit=50))
    return any(job.attempts and job.run_dir.startswith(f"{root.rstrip('/')}/") for job in newest)


def _embedded(settings: Settings) -> EmbeddedRay | None:
    if settings.ray_address is not None:
        return None
    roots = (settings.default_root, *settings.all_roots)
    head = HeadSettings(
        cpus=settings.ray_cpus,
        object_store_bytes=settings.ray_object_store_bytes,
        memory_bytes=settings.embedded_memory_bytes,
        environment=environment_of_jobs(os.environ, roots=roots, sinks=settings.sinks),
    )
    return EmbeddedRay(settings.home, head)


def _cluster(settings: Settings, embedded: EmbeddedRay | None) -> RayJobs:
    environment = {
        SINKS_VARIABLE: format_sinks(settings.sinks),
        STORAGE_SECONDS_VARIABLE: f"{settings.storage_seconds:g}",
        SERVICE_VERSION_VARIABLE: own_version(),
    }
    if settings.cache is not None:
        environment[CACHE_VARIABLE] = settings.cache
    if embedded is not None:
        return RayJobs(
            embedded.address,
            python=sys.executable,
            room=NodeRoom({"CPU": float(settings.ray_cpus)}, settings.embedded_memory_bytes, limited=True),
            shown_at=settings.dashboard_url,
            environment=environment,
            read_policy=settings.read_policy,
        )
    if settings.cluster_limit:
        environment[AUTOSCALED_VARIABLE] = "1"
    address = RayAddress(settings.ray_address or "", token=None)
    return RayJobs(
        lambda: address,
        python="python",
        limit=settings.cluster_limit,
        shown_at=settings.dashboard_url,
        environment=environment,
        read_policy=settings.read_policy,
    )
