"""create_app(settings): the only place where ports meet adapters."""

import hashlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from ulid import ULID

from service.access import Access
from service.adapters.checkpoint_tools import HelperTools
from service.adapters.embedded_ray import EmbeddedRay
from service.adapters.keys import ensure_key
from service.adapters.preflight import HelperPreflight
from service.adapters.prometheus import PrometheusWatch
from service.adapters.ray_jobs import RayAddress, RayJobs
from service.adapters.ray_probe import RayProbe
from service.adapters.run_dirs import LocalRunDirs
from service.adapters.sql.access import SqlKeyStore
from service.adapters.sql.counts import SqlJobCounts
from service.adapters.sql.database import Database, sqlite_file
from service.adapters.sql.store import SqlJobStore
from service.adapters.storage_probe import RunsProbe
from service.api.build import Parts, build_api
from service.api.guard import Guard
from service.background import Background, Part, looping
from service.doctor import Doctor
from service.domain.board import Board
from service.domain.decide import Retry
from service.leaving import Leaving
from service.ledger import Ledger
from service.ports import KeyStore
from service.reconcile import Pace, Reconciler
from service.settings import Settings
from service.traces import AppTraces, open_traces
from service.use_cases import Grace, Jobs
from service.watch import Watching
from train_loop.run_dir import SINKS_VARIABLE, format_sinks, versions_here


@dataclass(frozen=True)
class _World:
    """The adapters: what the ports are here."""

    database: Database
    store: SqlJobStore
    keys: SqlKeyStore
    run_dirs: LocalRunDirs
    preflight: HelperPreflight
    embedded: EmbeddedRay | None
    cluster: RayJobs
    board: Board
    watch: PrometheusWatch
    traces: AppTraces


def create_app(settings: Settings) -> FastAPI:
    """The whole service as an ASGI app; while it runs, so do the reconciler and, unless there is another, Ray."""
    settings.make_home()
    world, leaving = _world(settings), Leaving()
    ledger = Ledger(
        _jobs(settings, world), world.run_dirs, HelperTools(timeout=settings.verify_seconds), world.keys, time.time
    )
    app = build_api(
        Parts(
            ledger,
            _guard(settings, world.keys),
            _watching(world),
            _doctor(settings, world),
            hosts=(settings.host, *settings.allowed_hosts),
            lifespan=Background(list(_parts(settings, world)), leaving).lifespan,
            leaving=leaving,
        )
    )
    world.traces.instrument(app)
    return app


def _world(settings: Settings) -> _World:
    database, embedded = Database(settings.database), _embedded(settings)
    database.bring_up_to_date()
    store = SqlJobStore(database.engine)
    if sqlite_file(settings.database) is not None:
        # The lock on it says that there is nobody else.
        store.forget_requests()
    return _World(
        database=database,
        store=store,
        keys=SqlKeyStore(database.engine),
        run_dirs=LocalRunDirs(),
        preflight=HelperPreflight(roots=settings.roots, timeout=settings.preflight_seconds),
        embedded=embedded,
        cluster=_cluster(settings, embedded),
        board=Board(),
        watch=PrometheusWatch(),
        traces=open_traces(os.environ),
    )


def _jobs(settings: Settings, world: _World) -> Jobs:
    return Jobs(
        store=world.store,
        cluster=world.cluster,
        run_dirs=world.run_dirs,
        preflight=world.preflight,
        board=world.board,
        default_root=settings.default_root,
        grace=Grace(settings.cancel_grace_seconds, settings.pause_grace_seconds),
        clock=time.time,
        new_id=lambda: f"job-{_new_number()}",
    )


def _watching(world: _World) -> Watching:
    return Watching(SqlJobCounts(world.database.engine), world.store, world.run_dirs, world.watch, time.time)


def _parts(settings: Settings, world: _World) -> Iterator[Part]:
    """What goes on beside the answers, in the order in which it starts; it ends in the other one."""
    # A collector that does not answer is not waited for.
    yield Part("traces", _nothing, world.traces.close, seconds=1.0)
    yield Part("database", _nothing, world.database.close, seconds=1.0)
    # Seconds until it answers: the first who asks should not have to wait for all of them.
    yield Part("preflight", world.preflight.start, world.preflight.stop, seconds=1.0)
    if world.embedded is not None:
        yield Part("embedded Ray", world.embedded.start, world.embedded.stop, seconds=20.0)
    reconciler = _reconciler(settings, world)
    yield looping("reconciler", partial(reconciler.run, interval=settings.reconcile_seconds), seconds=20.0)


def _reconciler(settings: Settings, world: _World) -> Reconciler:
    return Reconciler(
        world.store,
        world.cluster,
        world.run_dirs,
        time.time,
        _owner(settings),
        _pace(settings),
        settings.rules,
        world.board,
        watch=world.watch,
        traces=world.traces,
    )


def _embedded(settings: Settings) -> EmbeddedRay | None:
    if settings.ray_address is not None:
        return None
    return EmbeddedRay(settings.home, cpus=settings.ray_cpus, object_store_bytes=settings.ray_object_store_bytes)


def _cluster(settings: Settings, embedded: EmbeddedRay | None) -> RayJobs:
    told = {SINKS_VARIABLE: format_sinks(settings.sinks)}
    if embedded is not None:
        return RayJobs(embedded.address, python=sys.executable, environment=told)
    address = RayAddress(settings.ray_address or "", token=None)
    return RayJobs(lambda: address, python="python", limit=settings.cluster_limit, environment=told)


def _guard(settings: Settings, keys: KeyStore) -> Guard:
    operator = hashlib.sha256(ensure_key(settings.admin_key).encode()).hexdigest()
    return Guard(Access(keys, operator, time.time, _new_number), settings.max_body_bytes)


def _doctor(settings: Settings, world: _World) -> Doctor:
    # Home need not be where the cluster sees it, unless run directories are there.
    roots = [root for root in settings.storage_roots if root != settings.default_root]
    storage = RunsProbe(settings.default_root, roots)
    return Doctor(RayProbe(world.cluster, roots=roots), storage, versions_here())


def _pace(settings: Settings) -> Pace:
    retry = Retry(settings.retry_seconds, settings.retry_cap_seconds)
    return Pace(settings.lease_seconds, retry, room=settings.pause_grace_seconds)


def _owner(settings: Settings) -> str:
    # The lock on the home lets one service at a time be this owner, so a restarted one goes on with its own leases.
    return f"{socket.gethostname()}:{settings.home}"[:255]


def _new_number() -> str:
    return str(ULID()).lower()


def _nothing() -> None:
    """What needs no start."""
