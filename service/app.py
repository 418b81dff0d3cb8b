"""Composition root: `create_app(settings)` connects the ports to their adapters."""

import hashlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import structlog
from fastapi import FastAPI
from ulid import ULID

from service.adapters.helper_processes.checkpoints import HelperTools
from service.adapters.key_files import ensure_key, read_key
from service.adapters.oidc import OidcVerifier
from service.adapters.ray.probe import RayProbe
from service.adapters.sql.outbox import SqlOutbox
from service.adapters.sql.queries import SqlJobCounts
from service.adapters.sql.sealing import seal_secrets
from service.adapters.sql.webhooks import SqlWebhookStore
from service.adapters.storage.probe import RunsProbe
from service.api.authentication import Guard
from service.api.build import Parts, build_api
from service.backends import Backends, build_backends
from service.config.settings import Settings
from service.domain.access.oidc_claims import TokenRules
from service.domain.doctor.measurements import RayPods
from service.domain.jobs.decision import Retry
from service.domain.queue.policy import PriorityLimits
from service.lifecycle.connection_limits import max_connections
from service.lifecycle.lifespan import Background, Part, looping
from service.lifecycle.shutdown import Shutdown
from service.lifecycle.startup import DatabaseStartup
from service.ports import KeyStore
from service.use_cases.access.access import Access, Tokens
from service.use_cases.access.rate_limits import Kind, Limits, Rates
from service.use_cases.checkpoints import CheckpointActions
from service.use_cases.doctor.doctor import Doctor
from service.use_cases.jobs.first_view import FirstView
from service.use_cases.jobs.jobs import Grace, Jobs
from service.use_cases.jobs.reconcile import Reconciler, ReconcileTimings
from service.use_cases.jobs.submit import Submitter
from service.use_cases.metrics import ServiceMetrics
from service.use_cases.webhooks.delivery_loop import Deliverer
from service.use_cases.webhooks.webhooks import Webhooks
from train_loop.run_dir import versions_here

log = structlog.get_logger(__name__)
_RAY_START_SECONDS = 60.0
"""Maximum time for which a service is not ready because its embedded Ray starts."""
_MORE_SECONDS = 2.0
"""Time in addition to TRAINSHED_STOP_SECONDS, for the last pass over jobs that did not save."""


def create_app(settings: Settings) -> FastAPI:
    """Return the service as an ASGI app. It runs the reconciler and, without TRAINSHED_RAY_ADDRESS, Ray."""
    settings.make_home()
    backends = build_backends(settings)
    shutdown = Shutdown(more_seconds=settings.stop_seconds + _MORE_SECONDS if backends.embedded is not None else 0.0)
    first_view = FirstView()
    startup = DatabaseStartup(partial(_open, settings, backends), retry_seconds=settings.database_seconds)
    background = Background(
        parts=list(_parts(backends, first_view, shutdown)),
        with_database=list(_parts_with_database(settings, backends, shutdown)),
        startup=startup,
        shutdown=shutdown,
    )
    submitter = _submitter(settings, backends, first_view)
    app = build_api(
        Parts(
            submitter=submitter,
            checkpoints=_checkpoints(settings, backends, submitter.jobs),
            guard=_guard(settings, backends.keys),
            service_metrics=_service_metrics(backends),
            webhooks=_webhooks(settings, backends),
            doctor=_doctor(settings, backends),
            results=backends.preflight,
            hosts=(settings.host, *settings.allowed_hosts),
            lifespan=background.lifespan,
            startup=startup,
            shutdown=shutdown,
            checks=settings.preflight_checks,
        )
    )
    backends.traces.instrument(app)
    return app


def _open(settings: Settings, backends: Backends) -> None:
    """Migrate the database, and encrypt the secrets in it with the current key.

    Raises DatabaseUnreachable, DatabaseUnusable, KeyUnusable, SecretsUnreadable.
    """
    backends.database.bring_up_to_date()
    keys = [key.get_secret_value() for key in settings.secret_key]
    seal_secrets(backends.database, backends.box, keys, settings.secret_key_file)
    if not backends.box.encrypts:
        log.warning("webhook_secrets_are_plain", remedy="set TRAINSHED_SECRET_KEY: openssl rand -hex 32")


def _begin_root(root: str, backends: Backends) -> None:
    """Create the storage root and its marker once, in a thread because storage may hang."""

    def begin() -> None:
        try:
            backends.guard.call(root, lambda: backends.roots.open(root), seconds=60.0)
        except Exception as error:
            log.warning("storage_root_not_opened", root=root, error=str(error))

    threading.Thread(target=begin, name="storage root", daemon=True).start()


def _submitter(settings: Settings, backends: Backends, first_view: FirstView) -> Submitter:
    jobs = Jobs(
        store=backends.store,
        cluster=backends.cluster,
        run_dirs=backends.run_dirs,
        preflight=backends.preflight,
        queue=backends.queue,
        grace=Grace(cancel=settings.cancel_grace_seconds, pause=settings.pause_grace_seconds),
        clock=time.time,
        first_view=first_view,
    )
    return Submitter(
        jobs,
        settings.default_root,
        new_id=lambda: f"job-{_new_number()}",
        priorities=PriorityLimits(settings.max_priority),
        code=settings.code_policy,
    )


def _checkpoints(settings: Settings, backends: Backends, jobs: Jobs) -> CheckpointActions:
    return CheckpointActions(
        jobs=jobs,
        run_dirs=backends.run_dirs,
        tools=HelperTools(timeout=settings.verify_seconds, read_policy=settings.read_policy),
        audit=backends.keys,
        clock=time.time,
    )


def _service_metrics(backends: Backends) -> ServiceMetrics:
    return ServiceMetrics(
        counts=SqlJobCounts(backends.database.engine),
        store=backends.store,
        run_dirs=backends.run_dirs,
        metrics=backends.metrics,
        clock=time.time,
        queue=backends.queue,
    )


def _parts(backends: Backends, first_view: FirstView, shutdown: Shutdown) -> Iterator[Part]:
    """Return the background parts in start order; they stop in reverse order."""
    # One second: a collector that does not answer must not delay the shutdown.
    yield Part("traces", _nothing, backends.traces.close, seconds=1.0)
    yield Part("database", _nothing, backends.database.close, seconds=1.0)
    # The helper takes seconds to start: starting it now shortens the wait of the first submit.
    yield Part("preflight", backends.preflight.start, backends.preflight.stop, seconds=1.0)
    if backends.embedded is not None:
        yield Part("embedded Ray", backends.embedded.start, backends.embedded.stop, seconds=3.0)
    # A cluster of others is asked once: it is up already, or may be away for long.
    seconds = _RAY_START_SECONDS if backends.embedded is not None else 0.0
    wait = partial(first_view.wait, known=backends.cluster.capacity, seconds=seconds)
    yield looping("first view", wait, shutdown, seconds=1.0)


def _parts_with_database(settings: Settings, backends: Backends, shutdown: Shutdown) -> Iterator[Part]:
    """Return the background parts that need the database, in start order."""
    yield Part("storage root", partial(_begin_root, settings.default_root, backends), _nothing, seconds=1.0)
    # Stopped after the parts that use leases, so that another service takes over at once.
    yield Part("leases", _nothing, partial(backends.store.give_up_leases, _owner(settings)), seconds=1.0)
    reconciler = _reconciler(settings, backends)
    if backends.embedded is not None:
        # Stopped after the reconciler and before Ray, whose end kills all jobs.
        stop = partial(reconciler.stop_jobs, seconds=settings.stop_seconds)
        yield Part("running jobs", _nothing, stop, seconds=settings.stop_seconds + _MORE_SECONDS)
    run = partial(reconciler.run, interval=settings.reconcile_seconds)
    yield looping("reconciler", run, shutdown, seconds=1.5)
    deliverer = Deliverer(
        outbox=SqlOutbox(backends.database.engine, backends.box),
        sender=backends.sender,
        clock=time.time,
        jitter=random.random,
        owner=_owner(settings),
    )
    yield Part("webhooks", deliverer.start, deliverer.stop, seconds=1.5)


def _webhooks(settings: Settings, backends: Backends) -> Webhooks:
    store = SqlWebhookStore(backends.database.engine, backends.box)
    return Webhooks(
        store=store, sender=backends.sender, allowed=settings.receivers, clock=time.time, new_id=_new_number
    )


def _reconciler(settings: Settings, backends: Backends) -> Reconciler:
    return Reconciler(
        store=backends.store,
        cluster=backends.cluster,
        run_dirs=backends.own_run_dirs,
        clock=time.time,
        owner=_owner(settings),
        timings=_timings(settings),
        rules=settings.rules,
        queue=backends.queue,
        metrics=backends.metrics,
        traces=backends.traces,
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


def _doctor(settings: Settings, backends: Backends) -> Doctor:
    # The cluster needs to see the home only if it contains run directories.
    roots = [root for root in settings.all_roots if root != settings.default_root]
    storage = RunsProbe(settings.default_root, roots, open_root=backends.roots.open)
    return Doctor(
        cluster=RayProbe(backends.cluster, roots=roots),
        storage=storage,
        versions=versions_here(),
        connections=(max_connections(), settings.connections),
        pods=RayPods(
            settings.ray_cluster,
            frozenset(settings.ray_pod_digests),
            lost_node=lambda: backends.queue.lost_node(time.time()),
        ),
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
