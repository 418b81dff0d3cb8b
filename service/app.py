"""create_app(settings): the only place where ports meet adapters."""

import hashlib
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from ulid import ULID

from service.access import Access
from service.adapters.checkpoint_tools import HelperTools
from service.adapters.embedded_ray import EmbeddedRay
from service.adapters.keys import ensure_key
from service.adapters.preflight import HelperPreflight
from service.adapters.ray_jobs import RayAddress, RayJobs
from service.adapters.run_dirs import LocalRunDirs
from service.adapters.sql.access import SqlKeyStore
from service.adapters.sql.database import open_database, sqlite_file
from service.adapters.sql.store import SqlJobStore
from service.api.build import build_api
from service.api.guard import Guard
from service.domain.board import Board
from service.domain.decide import Retry
from service.ledger import Ledger
from service.ports import Cluster, KeyStore
from service.reconcile import Pace, Reconciler
from service.settings import Settings
from service.use_cases import Grace, Jobs
from train_loop.run_dir import SINKS_VARIABLE, format_sinks


def create_app(settings: Settings) -> FastAPI:
    """The whole service as an ASGI app; while it runs, so do the reconciler and, unless there is another, Ray."""
    settings.make_home()
    engine = open_database(settings.database)
    store, run_dirs, board = SqlJobStore(engine), LocalRunDirs(), Board()
    if sqlite_file(settings.database) is not None:
        # The lock on it says that there is nobody else.
        store.forget_requests()
    embedded = _embedded(settings)
    cluster = _cluster(settings, embedded)
    preflight = HelperPreflight(roots=settings.roots, timeout=settings.preflight_seconds)
    jobs = Jobs(
        store=store,
        cluster=cluster,
        run_dirs=run_dirs,
        preflight=preflight,
        board=board,
        default_root=settings.default_root,
        grace=Grace(settings.cancel_grace_seconds, settings.pause_grace_seconds),
        clock=time.time,
        new_id=lambda: f"job-{_new_number()}",
    )
    key_store = SqlKeyStore(engine)
    reconciler = Reconciler(
        store, cluster, run_dirs, time.time, _owner(settings), _pace(settings), settings.rules, board
    )

    background = _Background(reconciler, settings.reconcile_seconds, preflight, embedded, engine.dispose)
    hosts = (settings.host, *settings.allowed_hosts)
    ledger = Ledger(jobs, run_dirs, HelperTools(timeout=settings.verify_seconds), key_store, time.time)
    return build_api(ledger, _guard(settings, key_store), hosts=hosts, lifespan=background.lifespan)


@dataclass(frozen=True)
class _Background:
    """What goes on beside the answers, for as long as the app runs."""

    reconciler: Reconciler
    interval: float
    preflight: HelperPreflight
    embedded: EmbeddedRay | None
    close_database: Callable[[], None]

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Start all of it, and end it."""
        # Seconds until it answers: the first who asks should not have to wait for all of them.
        self.preflight.start()
        stop_reconciler = _in_background(self.reconciler, interval=self.interval)
        if self.embedded is not None:
            self.embedded.start()
        try:
            yield
        finally:
            await run_in_threadpool(stop_reconciler)
            self.preflight.stop()
            if self.embedded is not None:
                await run_in_threadpool(self.embedded.stop)
            self.close_database()


def _embedded(settings: Settings) -> EmbeddedRay | None:
    if settings.ray_address is not None:
        return None
    return EmbeddedRay(settings.home, cpus=settings.ray_cpus, object_store_bytes=settings.ray_object_store_bytes)


def _cluster(settings: Settings, embedded: EmbeddedRay | None) -> Cluster:
    told = {SINKS_VARIABLE: format_sinks(settings.sinks)}
    if embedded is not None:
        return RayJobs(embedded.address, python=sys.executable, environment=told)
    address = RayAddress(settings.ray_address or "", token=None)
    return RayJobs(lambda: address, python="python", limit=settings.cluster_limit, environment=told)


def _guard(settings: Settings, keys: KeyStore) -> Guard:
    operator = hashlib.sha256(ensure_key(settings.admin_key).encode()).hexdigest()
    return Guard(Access(keys, operator, time.time, _new_number), settings.max_body_bytes)


def _pace(settings: Settings) -> Pace:
    retry = Retry(settings.retry_seconds, settings.retry_cap_seconds)
    return Pace(settings.lease_seconds, retry, room=settings.pause_grace_seconds)


def _owner(settings: Settings) -> str:
    # The lock on the home lets one service at a time be this owner, so a restarted one goes on with its own leases.
    return f"{socket.gethostname()}:{settings.home}"[:255]


def _new_number() -> str:
    return str(ULID()).lower()


def _in_background(reconciler: Reconciler, *, interval: float) -> Callable[[], None]:
    """Run the reconciler in a thread; what is returned stops it."""
    stopped = threading.Event()
    thread = threading.Thread(
        target=reconciler.run, args=(stopped,), kwargs={"interval": interval}, name="reconcile", daemon=True
    )
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join()

    return stop
