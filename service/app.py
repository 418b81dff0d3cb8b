"""Composition root: `create_app(settings)` connects the ports to their adapters."""

import hashlib
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import structlog
from fastapi import FastAPI
from ulid import ULID

from service.adapters.helper_processes.checkpoints import HelperTools
from service.adapters.helper_processes.preflight import HelperPreflight
from service.adapters.helper_processes.preflight import Limits as PreflightLimits
from service.adapters.key_files import ensure_key, read_key
from service.adapters.oidc import OidcVerifier
from service.adapters.prometheus import PrometheusMetrics
from service.adapters.ray.embedded import EmbeddedRay
from service.adapters.ray.jobs import RayAddress, RayJobs
from service.adapters.ray.probe import RayProbe
from service.adapters.secret_box import SecretBox
from service.adapters.sql.access import SqlKeyStore
from service.adapters.sql.database import Database
from service.adapters.sql.outbox import SqlOutbox
from service.adapters.sql.queries import SqlJobCounts
from service.adapters.sql.sealing import seal_secrets
from service.adapters.sql.store import SqlJobStore
from service.adapters.sql.webhooks import SqlWebhookStore
from service.adapters.storage.probe import RunsProbe
from service.adapters.storage.roots import StorageRoots
from service.adapters.storage.run_dirs import LocalRunDirs
from service.adapters.storage.run_dirs_with_timeouts import GuardedRunDirs
from service.adapters.storage.timeouts import StorageGuard
from service.adapters.traces import AppTraces, open_traces
from service.adapters.webhook_sender import WebhookSender
from service.api.authentication import Guard
from service.api.build import Parts, build_api
from service.config.settings import Settings
from service.domain.access.oidc_claims import TokenRules
from service.domain.jobs.decide import Retry
from service.domain.queue.snapshot import QueueSnapshot
from service.lifecycle.connection_limits import max_connections
from service.lifecycle.lifespan import Background, Part, looping
from service.lifecycle.shutdown import Shutdown
from service.lifecycle.startup import DatabaseStartup
from service.ports import JobQuery, KeyStore
from service.use_cases.access.access import Access, Tokens
from service.use_cases.access.rate_limits import Kind, Limits, Rates
from service.use_cases.checkpoints import CheckpointActions
from service.use_cases.doctor.doctor import Doctor
from service.use_cases.jobs.jobs import Grace, Jobs
from service.use_cases.jobs.reconcile import Reconciler, ReconcileTimings
from service.use_cases.jobs.submit import Submitter
from service.use_cases.metrics import ServiceMetrics
from service.use_cases.webhooks.delivery_loop import Deliverer
from service.use_cases.webhooks.webhooks import Webhooks
from train_loop.plan import AUTOSCALED_VARIABLE
from train_loop.run_dir import (
    CACHE_VARIABLE,
    SERVICE_VERSION_VARIABLE,
    SINKS_VARIABLE,
    STORAGE_SECONDS_VARIABLE,
    format_sinks,
    own_version,
    versions_here,
)

log = structlog.get_logger(__name__)
_MORE_SECONDS = 2.0
"""Time in addition to TRAINSHED_STOP_SECONDS, for the last pass over jobs that did not save."""


@dataclass(frozen=True)
class _World:
    """The adapters of this service."""

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


def create_app(settings: Settings) -> FastAPI:
    """Return the service as an ASGI app. It runs the reconciler and, without TRAINSHED_RAY_ADDRESS, Ray."""
    settings.make_home()
    world = _world(settings)
    shutdown = Shutdown(more_seconds=settings.stop_seconds + _MORE_SECONDS if world.embedded is not None else 0.0)
    startup = DatabaseStartup(partial(_open, settings, world), retry_seconds=settings.database_seconds)
    background = Background(
        parts=list(_parts(world)),
        with_database=list(_parts_with_database(settings, world, shutdown)),
        startup=startup,
        shutdown=shutdown,
    )
    submitter = _submitter(settings, world)
    app = build_api(
        Parts(
            submitter=submitter,
            checkpoints=_checkpoints(settings, world, submitter.jobs),
            guard=_guard(settings, world.keys),
            service_metrics=_service_metrics(world),
            webhooks=_webhooks(settings, world),
            doctor=_doctor(settings, world),
            hosts=(settings.host, *settings.allowed_hosts),
            lifespan=background.lifespan,
            startup=startup,
            shutdown=shutdown,
            checks=settings.preflight_checks,
        )
    )
    world.traces.instrument(app)
    return app


def _world(settings: Settings) -> _World:
    database, embedded = Database(settings.database, seconds=settings.database_call_seconds), _embedded(settings)
    store = SqlJobStore(database.engine)
    roots = StorageRoots(settings.roots_file, used=partial(_has_run_below, store))
    run_dirs, guard = LocalRunDirs(roots), StorageGuard(partial(roots.check, max_age=0.0))
    return _World(
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


def _open(settings: Settings, world: _World) -> None:
    """Migrate the database, and encrypt the secrets in it with the current key.

    Raises DatabaseUnreachable, DatabaseUnusable, KeyUnusable, SecretsUnreadable.
    """
    world.database.bring_up_to_date()
    keys = [key.get_secret_value() for key in settings.secret_key]
    seal_secrets(world.database, world.box, keys, settings.secret_key_file)
    if not world.box.encrypts:
        log.warning("webhook_secrets_are_plain", remedy="set TRAINSHED_SECRET_KEY: openssl rand -hex 32")


def _begin_root(root: str, world: _World) -> None:
    """Create the storage root and its marker once, in a thread because storage may hang."""

    def begin() -> None:
        try:
            world.guard.call(root, lambda: world.roots.open(root), seconds=60.0)
        except Exception as error:
            log.warning("storage_root_not_opened", root=root, error=str(error))

    threading.Thread(target=begin, name="storage root", daemon=True).start()


def _has_run_below(store: SqlJobStore, root: str) -> bool:
    newest = store.page(JobQuery(limit=50))
    return any(job.attempts and job.run_dir.startswith(f"{root.rstrip('/')}/") for job in newest)


def _submitter(settings: Settings, world: _World) -> Submitter:
    jobs = Jobs(
        store=world.store,
        cluster=world.cluster,
        run_dirs=world.run_dirs,
        preflight=world.preflight,
        queue=world.queue,
        grace=Grace(cancel=settings.cancel_grace_seconds, pause=settings.pause_grace_seconds),
        clock=time.time,
    )
    return Submitter(jobs, settings.default_root, new_id=lambda: f"job-{_new_number()}")


def _checkpoints(settings: Settings, world: _World, jobs: Jobs) -> CheckpointActions:
    return CheckpointActions(
        jobs=jobs,
        run_dirs=world.run_dirs,
        tools=HelperTools(timeout=settings.verify_seconds),
        audit=world.keys,
        clock=time.time,
    )


def _service_metrics(world: _World) -> ServiceMetrics:
    return ServiceMetrics(
        counts=SqlJobCounts(world.database.engine),
        store=world.store,
        run_dirs=world.run_dirs,
        metrics=world.metrics,
        clock=time.time,
        queue=world.queue,
    )


def _parts(world: _World) -> Iterator[Part]:
    """Return the background parts in start order; they stop in reverse order."""
    # One second: a collector that does not answer must not delay the shutdown.
    yield Part("traces", _nothing, world.traces.close, seconds=1.0)
    yield Part("database", _nothing, world.database.close, seconds=1.0)
    # The helper takes seconds to start: starting it now shortens the wait of the first submit.
    yield Part("preflight", world.preflight.start, world.preflight.stop, seconds=1.0)
    if world.embedded is not None:
        yield Part("embedded Ray", world.embedded.start, world.embedded.stop, seconds=3.0)


def _parts_with_database(settings: Settings, world: _World, shutdown: Shutdown) -> Iterator[Part]:
    """Return the background parts that need the database, in start order."""
    yield Part("storage root", partial(_begin_root, settings.default_root, world), _nothing, seconds=1.0)
    # Stopped after the parts that use leases, so that another service takes over at once.
    yield Part("leases", _nothing, partial(world.store.give_up_leases, _owner(settings)), seconds=1.0)
    reconciler = _reconciler(settings, world)
    if world.embedded is not None:
        # Stopped after the reconciler and before Ray, whose end kills all jobs.
        stop = partial(reconciler.stop_jobs, seconds=settings.stop_seconds)
        yield Part("running jobs", _nothing, stop, seconds=settings.stop_seconds + _MORE_SECONDS)
    run = partial(reconciler.run, interval=settings.reconcile_seconds)
    yield looping("reconciler", run, shutdown, seconds=1.5)
    deliverer = Deliverer(
        outbox=SqlOutbox(world.database.engine, world.box),
        sender=world.sender,
        clock=time.time,
        jitter=random.random,
        owner=_owner(settings),
    )
    yield Part("webhooks", deliverer.start, deliverer.stop, seconds=1.5)


def _webhooks(settings: Settings, world: _World) -> Webhooks:
    store = SqlWebhookStore(world.database.engine, world.box)
    return Webhooks(store=store, sender=world.sender, allowed=settings.receivers, clock=time.time, new_id=_new_number)


def _reconciler(settings: Settings, world: _World) -> Reconciler:
    return Reconciler(
        store=world.store,
        cluster=world.cluster,
        run_dirs=world.own_run_dirs,
        clock=time.time,
        owner=_owner(settings),
        timings=_timings(settings),
        rules=settings.rules,
        queue=world.queue,
        metrics=world.metrics,
        traces=world.traces,
    )


def _embedded(settings: Settings) -> EmbeddedRay | None:
    if settings.ray_address is not None:
        return None
    return EmbeddedRay(settings.home, cpus=settings.ray_cpus, object_store_bytes=settings.ray_object_store_bytes)


def _cluster(settings: Settings, embedded: EmbeddedRay | None) -> RayJobs:
    told = {
        SINKS_VARIABLE: format_sinks(settings.sinks),
        STORAGE_SECONDS_VARIABLE: f"{settings.storage_seconds:g}",
        SERVICE_VERSION_VARIABLE: own_version(),
    }
    if settings.cache is not None:
        told[CACHE_VARIABLE] = settings.cache
    if embedded is not None:
        return RayJobs(
            embedded.address,
            python=sys.executable,
            shown_at=settings.dashboard_url,
            environment=told,
            read_policy=settings.read_policy,
        )
    if settings.cluster_limit:
        told[AUTOSCALED_VARIABLE] = "1"
    address = RayAddress(settings.ray_address or "", token=None)
    return RayJobs(
        lambda: address,
        python="python",
        limit=settings.cluster_limit,
        shown_at=settings.dashboard_url,
        environment=told,
        read_policy=settings.read_policy,
    )


def _guard(settings: Settings, keys: KeyStore) -> Guard:
    scraper = None
    if settings.metrics_key_file is not None:
        scraper = _sha256(read_key(settings.metrics_key_file, setting="TRAINSHED_METRICS_KEY_FILE"))
    access = Access(
        store=keys,
        operator_sha256=_sha256(_admin_key(settings)),
        clock=time.time,
        new_id=_new_number,
        tokens=_tokens(settings),
        scraper_sha256=scraper,
    )
    return Guard(access, Rates(_limits(settings), time.monotonic), max_body_bytes=settings.max_body_bytes)


def _admin_key(settings: Settings) -> str:
    if settings.admin_key_file is not None:
        return read_key(settings.admin_key_file, setting="TRAINSHED_ADMIN_KEY_FILE")
    return ensure_key(settings.admin_key)


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _tokens(settings: Settings) -> Tokens | None:
    if settings.oidc_issuer is None or settings.oidc_audience is None:
        return None
    verifier = OidcVerifier(settings.oidc_issuer, settings.oidc_audience)
    return Tokens(verifier, TokenRules(settings.oidc_groups_claim, settings.oidc_groups))


def _limits(settings: Settings) -> Limits:
    rates = {kind: getattr(settings, kind) for kind in Kind}
    return Limits({kind: rate for kind, rate in rates.items() if rate is not None}, settings.streams_per_key)


def _doctor(settings: Settings, world: _World) -> Doctor:
    # The cluster needs to see the home only if it contains run directories.
    roots = [root for root in settings.all_roots if root != settings.default_root]
    storage = RunsProbe(settings.default_root, roots, open_root=world.roots.open)
    return Doctor(
        cluster=RayProbe(world.cluster, roots=roots),
        storage=storage,
        versions=versions_here(),
        connections=(max_connections(), settings.connections),
    )


def _timings(settings: Settings) -> ReconcileTimings:
    retry = Retry(base=settings.retry_seconds, cap=settings.retry_cap_seconds)
    return ReconcileTimings(lease=settings.lease_seconds, retry=retry, stop_seconds=settings.pause_grace_seconds)


def _owner(settings: Settings) -> str:
    # The lock on the home makes this owner unique, so a restarted service keeps its leases.
    return f"{socket.gethostname()}:{settings.home}"[:255]


def _new_number() -> str:
    return str(ULID()).lower()


def _nothing() -> None:
    """Do nothing: the start or stop of a part that has none."""
