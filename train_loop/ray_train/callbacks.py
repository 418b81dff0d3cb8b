"""Callback in Ray Train's controller that fences, connects and monitors each worker group.

The controller unpickles this module. It must not import modules that only ranks need: they take seconds.
"""

import logging
import queue
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import ControllerCallback

from train_loop.errors import RunEndedError, TooLittleMemoryError
from train_loop.faults.failure import killed_for_memory, message, reason
from train_loop.faults.memory_events import OUT_OF_MEMORY, describe_killed, groups_without_memory
from train_loop.faults.micro_batch_choices import smaller_is_left
from train_loop.faults.ray_reports import describe_death
from train_loop.liveness.fencing import NewestEpoch, begin_group
from train_loop.ray_train.heartbeat_monitor import GroupMonitor
from train_loop.ray_train.placement import Placement
from train_loop.ray_train.rank_setup import RankSettings, set_up_rank
from train_loop.ray_train.raylet import unreachable, unregister_node
from train_loop.run_dir import RunDir, expect_run_dir, list_folder, size_of, storage_may_fail
from train_loop.spec import JobSpec
from train_loop.system.retry import retry_storage
from train_loop.telemetry.event_log import EventLog, last_word
from train_loop.telemetry.logs import log_lines_to

log = logging.getLogger(__name__)
_LAST_EVENTS_SECONDS, _SET_UP_SECONDS, _DEATH_SECONDS = 5.0, 60.0, 2.0
_LAST_BEAT_SECONDS = 1.0
"""Time for the last heartbeat of a dead rank to arrive."""


class GroupCallback(Placement, ControllerCallback):  # type: ignore[misc]
    """Callback of Ray Train's controller that places, fences, connects and monitors each worker group.

    Only Ray Train's internal callback interface has a hook before the ranks of a group start.
    """

    def __init__(self, run_dir: RunDir, attempt: int, spec: JobSpec, *, autoscaled: bool) -> None:
        super().__init__(
            spec.scaling, group=spec.strategy.peers, whole=spec.strategy.whole_group, autoscaled=autoscaled
        )
        self._run_dir, self._attempt, self._spec = run_dir, run_dir.attempt(attempt), spec
        self._nodes: dict[str, str] = {}
        self._monitor: GroupMonitor | None = None
        self._actors: dict[int, Any] = {}
        """Actors of the newest group, by rank."""
        self._placement_group: Any = None
        self._preempted: tuple[int, ...] = ()
        self._failed = False

    def after_controller_start(self, train_run_context: Any) -> None:
        """Start listening for heartbeats."""
        expect_run_dir(self._run_dir.root)
        with storage_may_fail(lambda error: log.warning("the driver's log cannot be opened: %s", error)):
            log_lines_to(self._attempt.driver_log)
        self._journal = EventLog(self._attempt, epoch=NewestEpoch(self._run_dir, self._attempt.number))
        self._events: queue.SimpleQueue[tuple[str, dict[str, Any]] | threading.Event | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write_events, name="events", daemon=True)
        self._writer.start()
        storage = str(self._run_dir.root.parent.parent)
        address, own_host = ray.util.get_node_ip_address(), socket.gethostname()
        self._monitor = GroupMonitor(address, self._report, self, own_host=own_host, storage=storage)
        self._monitor.start()

    @contextmanager
    def on_worker_group_start(self) -> Iterator[None]:
        """Clean up a start in which a rank or host died, and make Ray Train start a new group.

        After a late failure Ray Train leaves processes and placement group in place: the next group would find no room.
        """
        self._actors, self._placement_group = {}, None
        try:
            yield
        except WorkerGroupStartupTimeoutError:
            raise
        except Exception as error:
            died = bool(self._actors) and self._end_start(error)
            if died and not isinstance(error, WorkerGroupStartupFailedError):
                raise WorkerGroupStartupFailedError("a rank died while its worker group started") from error
            raise

    def _end_start(self, error: Exception) -> bool:
        """Kill the actors of a failed start and remove its placement group. Return whether a rank or host died."""
        assert self._monitor is not None
        dead, actor_id = dict[int, str](), getattr(error.__cause__ or error, "actor_id", None)
        for rank, actor in self._actors.items():
            if actor_id is not None and actor._actor_id.hex() == actor_id:
                dead[rank] = describe_death(message(error.__cause__ or error))
        died = self._monitor.died(_DEATH_SECONDS) or bool(dead)
        if died:
            self._failed = True
            self._monitor.failed({}, dead)
        self._monitor.closing()
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        if self._placement_group is not None:
            ray.util.remove_placement_group(self._placement_group)
        return died

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Choose the nodes of a worker group. Raises RunEndedError if an earlier group has trained all steps.

        Raises TooLittleMemoryError if two groups ran out of memory.
        """
        assert self._monitor is not None
        if retry_storage(partial(last_word, self._attempt)) is not None:
            # The group was lost after training ended. A new group would have nothing to do, and may find no room.
            raise RunEndedError("an earlier worker group of this attempt has ended the run")
        self._monitor.await_cause(_LAST_BEAT_SECONDS)
        self._flush_events()
        committed = retry_storage(lambda: max(self._run_dir.checkpoint_folders(), default=None))
        reported = retry_storage(partial(groups_without_memory, self._run_dir, committed))
        if len(reported) > 1 and not retry_storage(partial(smaller_is_left, self._spec, self._run_dir)):
            *_, newest = reported.values()
            raise TooLittleMemoryError(
                f"two worker groups ran out of memory, with no new checkpoint between them: {newest}"
            )
        self._monitor.placing()
        super().before_worker_group_start(worker_group_context)

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        """Raise the fence for a new worker group, then send its ranks their epoch, interface and heartbeat target."""
        assert self._monitor is not None
        token = retry_storage(partial(begin_group, self._run_dir, self._attempt.number, by=uuid.uuid4().hex))
        names = _host_names({worker.metadata.node_id: worker.metadata for worker in workers})
        hosts = {worker.distributed_context.world_rank: names[worker.metadata.node_id] for worker in workers}
        self._nodes = {name: node for node, name in names.items()}
        self._preempted = ()
        self._actors = {worker.distributed_context.world_rank: worker.actor for worker in workers}
        self._failed = False
        self._monitor.begin(token.epoch, hosts)
        settings = RankSettings(token.epoch, self._monitor.target, self._spec.training.deterministic)
        setups = [
            worker.execute_async(set_up_rank, settings, worker.distributed_context.world_rank, worker.metadata.node_ip)
            for worker in workers
        ]
        try:
            self._placement_group = ray.get(setups, timeout=_SET_UP_SECONDS)[0]
        except ray.exceptions.GetTimeoutError as error:
            raise WorkerGroupStartupFailedError(f"a rank did not answer within {_SET_UP_SECONDS:.0f} s") from error
        self._report("group_started", epoch=token.epoch, hosts={str(rank): host for rank, host in hosts.items()})
        return {}

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Report failed ranks, once per group."""
        preemption = worker_group_status.get_preemption_info()
        self._preempted = self._preempted if preemption is None else tuple(preemption.preempted_ranks)
        errors: Mapping[int, Exception] = worker_group_status.errors
        if not errors or self._failed or self._monitor is None:
            return
        self._failed = True
        died = {rank: message(error) for rank, error in errors.items() if hasattr(error, "health_check_failure")}
        for rank, why in died.items():
            if killed_for_memory(why):
                self._report(OUT_OF_MEMORY, rank=rank, memory="host", error=reason(errors[rank]))
        dead = {rank: describe_death(why) for rank, why in died.items()}
        alive = {rank: reason(error) for rank, error in errors.items() if rank not in dead}
        self._monitor.failed(alive, dead, **self._stacks())

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Report a group that Ray Train stops at the deadline of a preemption."""
        if self._preempted and not self._failed and self._monitor is not None:
            self._failed = True
            self._monitor.failed({}, dict.fromkeys(self._preempted, "died: its host was preempted"))

    @contextmanager
    def on_worker_group_shutdown(self) -> Iterator[None]:
        """Kill the processes of a failed group immediately.

        Ray Train would first wait up to 35 s for each rank to leave its process group, where a rank may be stuck.
        """
        if self._monitor is not None:
            self._monitor.closing()
        if self._failed:
            for actor in self._actors.values():
                ray.kill(actor)
        yield

    async def before_controller_shutdown(self) -> None:
        """Report the failure of the last group before the controller ends."""
        if self._monitor is not None:
            self._monitor.await_cause(_LAST_BEAT_SECONDS)
            self._monitor.finish()

    def after_controller_finish(self, result: Any) -> None:
        """Write the last events."""
        self._events.put(None)
        self._writer.join(_LAST_EVENTS_SECONDS)

    def _report(self, name: str, **fields: Any) -> None:
        """Queue an event and return immediately: hanging storage must not block the monitor."""
        self._events.put((name, {"time": time.time(), **fields}))

    def _flush_events(self) -> None:
        """Wait until all queued events are written, or 5 s if storage hangs."""
        written = threading.Event()
        self._events.put(written)
        written.wait(_LAST_EVENTS_SECONDS)

    def _write_events(self) -> None:
        """Write queued events in order, and log one line for each in the driver's log."""
        while (event := self._events.get()) is not None:
            if isinstance(event, threading.Event):
                event.set()
                continue
            name, fields = event
            if name == "workers_lost" and self._ended_by_error():
                # A user's error ends the job: no worker was lost, and there is no retry.
                continue
            # An error here must not stop later events.
            try:
                if name == OUT_OF_MEMORY:
                    fields = describe_killed(fields, self._run_dir, self._spec)
                self._journal.event(name, **fields)
            except Exception:
                log.exception("the event %s could not be written", name)
            log.info(
                "%s: %s", name, ", ".join(f"{field}={value}" for field, value in fields.items() if field != "time")
            )

    def _ended_by_error(self) -> bool:
        """Return whether a rank has reported an error that ends the job; False if its events cannot be read."""
        end: dict[str, Any] | None = None
        with storage_may_fail(lambda error: log.warning("the ranks' events cannot be read: %s", error)):
            end = last_word(self._attempt)
        return end is not None and end.get("result") == "failed" and not end.get("retryable")

    def declare_lost(self, host: str) -> None:
        """Make Ray treat a host as dead, so that its actors restart elsewhere."""
        if host in self._nodes:
            unregister_node(self._nodes[host], f"host {host} has sent no heartbeat")

    def answers(self, host: str) -> bool:
        """Return whether the Ray daemon of a host accepts connections."""
        return host in self._nodes and not unreachable({self._nodes[host]})

    def avoided(self) -> Collection[str]:
        """Return the ids of nodes on lost hosts, which Ray may still consider alive."""
        assert self._monitor is not None
        lost = self._monitor.lost_hosts()
        return [node for host, node in self._nodes.items() if host in lost]

    def doubtful(self) -> Collection[str]:
        """Return the ids of nodes on hosts with failed storage."""
        assert self._monitor is not None
        failed = self._monitor.hosts_without_storage()
        return [node for host, node in self._nodes.items() if host in failed]

    def waiting(self, missing: str, unreachable: Collection[str]) -> None:
        """Report missing capacity for the next worker group; called several times a second while it waits."""
        assert self._monitor is not None
        # Ray may still list a host as alive that the monitor has declared lost.
        usable = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - {*self.avoided(), *unreachable}
        self._monitor.lacking(missing, left=[host for host, node in self._nodes.items() if node not in usable])

    def _stacks(self) -> dict[str, list[str]]:
        found = list[str]()
        with storage_may_fail(lambda error: log.warning("stacks cannot be listed: %s", error)):
            folder, below = self._attempt.stacks, self._attempt.run_dir
            found = sorted(name for name in list_folder(folder, below=below) if size_of(folder / name, below=below))
        return {"stacks": [f"{self._attempt.stacks.name}/{name}" for name in found]} if found else {}


def _host_names(nodes: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each node's host, with its address if several have the same name."""
    counts = Counter(node.hostname for node in nodes.values())
    return {
        node_id: node.hostname if counts[node.hostname] == 1 else f"{node.hostname} ({node.node_ip})"
        for node_id, node in nodes.items()
    }
