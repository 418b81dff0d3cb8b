"""Monitor of worker groups by their heartbeats, in Ray Train's controller.

Ray detects a silent host after a minute by default. Heartbeats detect it within ten seconds, and show which rank waits
for which. The monitor evaluates and reports; the rules are in `liveness` and `group_failure`.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from train_loop.liveness.group import Liveness, Stall
from train_loop.liveness.heartbeat import Beat
from train_loop.ray_train.group_failure import explain
from train_loop.ray_train.group_record import GroupFailure, GroupRecord
from train_loop.ray_train.heartbeat_listener import TICK_SECONDS, HeartbeatListener

log = logging.getLogger(__name__)

SILENT_SECONDS, LOST_SECONDS = 5.0, 10.0
"""Seconds without a heartbeat before a host is reported as silent, then declared lost."""
STALL_SECONDS, LACK_SECONDS, STORAGE_SECONDS = 8.0, 5.0, 5.0
_SHORT_STALL_SECONDS = 2.0
"""Seconds without progress after which ranks of a failed group count as waiting."""
STALL_AGAIN_SECONDS = 3.0
"""Minimum time between two reports of a stall, if other ranks are behind now."""
LACK_AGAIN_SECONDS = 30.0
"""Minimum time between two reports of missing capacity, if other capacity is missing now."""
_CAUSE_SECONDS = 4.0
"""Seconds to wait for the cause of a failure before reporting it without one."""
_PROBE_SECONDS = 5.0
"""Seconds to wait for the probe of a failed group's hosts."""
_SETTLE_SECONDS = 0.3
"""Seconds to wait for more evidence after the cause is known."""
_DECLARE_PAUSES = (1.0, 2.0, 4.0)
_PAUSE_SECONDS = 2.0
"""Time between two checks above which the monitor itself did not run."""
_STORAGE_ERRORS = {errno.ESTALE: "it is not mounted"}


class Cluster(Protocol):
    """Ray's interface for the monitor."""

    def declare_lost(self, host: str) -> None:
        """Make the cluster treat a host as dead."""

    def answers(self, host: str) -> bool:
        """Return whether a host answers, within a few seconds."""


class _Lack(NamedTuple):
    """A report of missing capacity."""

    missing: str
    left: Sequence[str]
    since: float
    """Unix seconds since which the group has waited."""
    at: float
    """Time of the report by the monitor's clock."""


class GroupMonitor:
    """Evaluation of heartbeats, which reports events. Thread-safe."""

    def __init__(
        self,
        address: str,
        report: Callable[..., None],
        cluster: Cluster,
        *,
        own_host: str,
        storage: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._cluster, self._own_host, self._clock = report, cluster, own_host, clock
        self._storage = storage
        self._group: GroupRecord | None = None
        self._placing_since: float | None = None
        self._lack: _Lack | None = None
        self._lock = threading.RLock()
        self._last_tick = clock()
        self._listener = HeartbeatListener(address, on_beat=self.record, tick=self.tick, clock=clock)
        self.target = self._listener.target

    def start(self) -> None:
        """Start listening."""
        self._listener.start()

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def finish(self) -> None:
        """Report the failure of the last group if still unreported, and stop listening."""
        self.lost_hosts()
        with self._lock:
            self._settle_failure(force=True)
        self.close()

    def placing(self) -> None:
        """Record that a worker group waits for capacity in the cluster."""
        with self._lock:
            # Ray Train retries every minute, for the same group.
            self._placing_since = self._placing_since or self._clock()

    def lacking(self, missing: str, *, left: Collection[str]) -> None:
        """Report the capacity that the waiting group lacks, and which hosts of the last group have left."""
        with self._lock:
            now, lack = self._clock(), self._lack
            if self._placing_since is None or now - self._placing_since <= LACK_SECONDS:
                return
            # The cluster changes while the group waits, and the report must not become wrong.
            if lack is None or ((lack.missing, lack.left) != (missing, [*left]) and now - lack.at > LACK_AGAIN_SECONDS):
                since = time.time() - (now - self._placing_since) if lack is None else lack.since
                self._lack = _Lack(missing, [*left], since, now)
                self._report("waiting_for_capacity", missing=missing, left=[*left], since=round(since, 3))

    def lost_hosts(self) -> set[str]:
        """Return the lost hosts of the last group; if it failed, wait for the probe of its hosts."""
        with self._lock:
            probe = None if self._group is None else self._group.probe
        if probe is not None:
            probe.join(_PROBE_SECONDS)
        with self._lock:
            return set() if self._group is None else set(self._group.lost)

    def hosts_without_storage(self) -> set[str]:
        """Return the hosts of the last group whose storage still failed at its end."""
        with self._lock:
            return set() if self._group is None else set(self._group.without_storage)

    def begin(self, epoch: int, hosts: Mapping[int, str]) -> None:
        """Monitor a new worker group. An unreported failure of the previous group is reported first."""
        with self._lock:
            self._settle_failure(force=True)
            self._placing_since = self._lack = None
            self._group = GroupRecord(Liveness(epoch, hosts))

    def failed(self, errors: Mapping[int, str], unreachable: Mapping[int, str], **extra: Any) -> None:
        """Record ranks that raised errors or that Ray reports as dead. The failure is reported once, with its cause."""
        with self._lock:
            if self._group is not None and self._group.failure is None:
                now, stall = self._clock(), self._group.stall
                # The timeout of an operation may be shorter than the time until a stall is reported.
                stall = stall or self._group.liveness.stall(now, seconds=_SHORT_STALL_SECONDS)
                self._group.failure = GroupFailure(now, errors, unreachable, extra, stall)

    def died(self, seconds: float) -> bool:
        """Return whether a rank or host of the group has died; wait up to `seconds` for it."""
        deadline = self._clock() + seconds
        while True:
            with self._lock:
                if self._group is not None and (self._group.lost or self._group.ended()):
                    return True
            if self._clock() >= deadline:
                return False
            self._listener.closed.wait(TICK_SECONDS)

    def record(self, beat: Beat) -> None:
        """Record a heartbeat."""
        with self._lock:
            group = self._group
            if group is None:
                return
            group.liveness.record(beat, self._clock())
            ended = group.ended()
            for rank in sorted((group.liveness.out_of_memory() & ended.keys()) - group.out_of_memory):
                group.out_of_memory.add(rank)
                host = group.liveness.hosts[rank]
                error = f"rank {rank} on {host} {ended[rank]}"
                # Report at once: the next group must not start after a second time.
                self._report("out_of_memory", rank=rank, host=host, memory="host", error=error)

    def await_cause(self, seconds: float) -> None:
        """Wait until the cause of dead ranks is known, at most `seconds` after the failure of their group."""
        while True:
            with self._lock:
                group = self._group
                failure = None if group is None else group.failure
                if group is None or failure is None or not failure.unreachable:
                    return
                now = self._clock()
                if now - failure.at >= seconds or group.evidence(failure, now, own_host=self._own_host).has_cause:
                    return
            self._listener.closed.wait(TICK_SECONDS / 5)

    def closing(self) -> None:
        """Record that the group's processes are being terminated: their silence and ends are ignored from now on.

        If the group has failed, probe its hosts, so that the next group is not placed on a dead host.
        """
        with self._lock:
            group = self._group
            if group is None or group.closing:
                return
            group.close()
            if group.failure is not None:
                group.probe = threading.Thread(target=self._probe, args=(group,), daemon=True)
                group.probe.start()

    def _probe(self, group: GroupRecord) -> None:
        """Mark hosts of a group that do not answer as lost. If none of several answers, this host is disconnected."""
        # The own host is alive, because this process runs on it.
        hosts = sorted(set(group.liveness.hosts.values()) - group.lost.keys() - {self._own_host})
        with ThreadPoolExecutor(len(hosts) or 1) as pool:
            dead = {
                host for host, alive in zip(hosts, pool.map(self._cluster.answers, hosts), strict=True) if not alive
            }
        with self._lock:
            for host in dead if len(hosts) < 2 or set(hosts) - dead else ():
                self._lose(group, host, "it does not answer")

    def _lose(self, group: GroupRecord, host: str, how: str, **fields: Any) -> None:
        group.lost[host] = how
        self._report("host_lost", host=host, reason=how, **fields)
        threading.Thread(target=self._declare, args=(group, host), daemon=True).start()

    def tick(self) -> None:
        """Evaluate the current state and report changes."""
        with self._lock:
            now = self._clock()
            pause, self._last_tick = now - self._last_tick, now
            if self._group is not None:
                if pause > _PAUSE_SECONDS:
                    # This process was stopped or starved: it could receive no heartbeats.
                    self._group.liveness.skip(pause, now)
                self._judge_hosts(self._group, now)
                self._judge_storage(self._group)
                self._judge_stall(self._group, now)
                self._settle_failure()

    def _judge_hosts(self, group: GroupRecord, now: float) -> None:
        if group.closing:
            return
        silence = group.liveness.silence(now)
        for host, seconds in silence.items():
            if host in group.lost or host == self._own_host:
                continue
            if seconds <= SILENT_SECONDS:
                if host in group.silent:
                    group.silent.remove(host)
                    self._report("progressing", host=host)
            elif host not in group.silent:
                group.silent.add(host)
                self._report("host_silent", host=host, seconds=round(seconds, 1))
            if seconds > LOST_SECONDS and self._may_declare(silence):
                self._lose(group, host, f"no heartbeat for {seconds:.0f} s", seconds=round(seconds, 1))

    def _declare(self, group: GroupRecord, host: str) -> None:
        for pause in _DECLARE_PAUSES:
            try:
                self._cluster.declare_lost(host)
            except Exception as error:
                log.warning("host %s could not be reported to Ray as lost: %s", host, error)
                self._listener.closed.wait(pause)
            else:
                return
        with self._lock:
            # Ray may still use the host, and it may be back: evaluate it again.
            group.lost.pop(host, None)

    def _may_declare(self, silence: Mapping[str, float]) -> bool:
        """Return whether silent hosts may be declared lost: not if all of several other hosts are silent."""
        others = {host: seconds for host, seconds in silence.items() if host != self._own_host}
        return len(others) < 2 or any(seconds <= SILENT_SECONDS for seconds in others.values())

    def _judge_storage(self, group: GroupRecord) -> None:
        if group.closing:
            return
        found = group.liveness.without_storage(STORAGE_SECONDS)
        if found.keys() - group.without_storage:
            since = time.time() - max(beat.storage_seconds for beat in found.values())
            numbers = {beat.storage_errno for beat in found.values()} - {0}
            error = "; ".join(_STORAGE_ERRORS.get(number) or os.strerror(number) for number in sorted(numbers))
            fields = {"hosts": sorted(found), "root": self._storage, "since": round(since, 3)}
            self._report("storage_unavailable", **fields, error=error or "no answer")
        elif group.without_storage and not found:
            self._report("storage_available", root=self._storage)
        group.without_storage = set(found)

    def _judge_stall(self, group: GroupRecord, now: float) -> None:
        if group.failure is not None or group.closing:
            return
        # A silent host is reported as silent instead, and a rank may wait for storage until its timeout.
        stall = None if group.silent or group.without_storage else group.liveness.stall(now, seconds=STALL_SECONDS)
        if stall is not None and _is_news(stall, group.stall):
            group.stall = stall
            hosts = sorted({group.liveness.hosts[rank] for rank in stall.behind})
            self._report(
                "stalled",
                **{"waiting": stall.waiting, "for": stall.behind, "hosts": hosts, "step": stall.step},
                seconds=round(stall.seconds, 1),
                reason=stall.reason,
                phase=stall.phase.name.lower(),
            )
        elif stall is None and group.stall is not None and not group.silent and not group.without_storage:
            group.stall = None
            self._report("progressing")

    def _settle_failure(self, *, force: bool = False) -> None:
        """Report a failure after its cause is known or the wait for it has timed out."""
        group = self._group
        if group is None or group.failure is None or group.reported:
            return
        failure = group.failure
        now = self._clock()
        evidence, age = group.evidence(failure, now, own_host=self._own_host), now - failure.at
        # Ray's lost connection to a rank does not show the cause: heartbeats or a probe of its host do.
        if not force and age < (_SETTLE_SECONDS if evidence.has_cause else _CAUSE_SECONDS):
            return
        group.reported = True
        loss = explain(evidence)
        fields = {"ranks": loss.ranks, "hosts": loss.hosts, "cause": loss.kind, "error": loss.cause}
        survivors = {"survivors": loss.survivors} if loss.survivors else {}
        self._report("workers_lost", **fields, **survivors, **failure.extra)


def _is_news(stall: Stall, reported: Stall | None) -> bool:
    """Return whether a stall differs from the reported one: a late heartbeat can first blame the wrong rank."""
    if reported is None:
        return True
    return stall.behind != reported.behind and abs(stall.seconds - reported.seconds) >= STALL_AGAIN_SECONDS
