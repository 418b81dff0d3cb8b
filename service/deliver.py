"""claim → send → record for every webhook that has something due, again and again.

No transaction is open while something is sent. After a crash at any line a message is sent again, with its id.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from service.domain.webhook import Delivery, Settled, Webhook, settle
from service.errors import NotReady
from service.fault_log import FaultLog
from service.ports import Lease, Outbox, Sender

log = structlog.get_logger(__name__)
LEASE = 60.0
"""Seconds: more than a batch takes, with its last attempt."""
_BATCH = 30.0
"""Seconds after which another webhook has its turn."""
_THREADS = 8
_HOUSEKEEPING = 3600.0


@dataclass(frozen=True)
class Deliverer:
    """Empties the outbox, in some threads."""

    outbox: Outbox
    sender: Sender
    clock: Callable[[], float]
    jitter: Callable[[], float]
    """Anything from 0 to 1, another one each time."""
    owner: str
    interval: float = 2.0
    stopped: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    faults: FaultLog = field(default_factory=FaultLog)

    def start(self) -> None:
        """Begin, once the database answers."""
        self._begin(self._keep_house)

    def stop(self) -> None:
        """Let go of what is on its way, and give every webhook back."""
        self.stopped.set()
        self.sender.close()
        for thread in self.threads:
            thread.join()

    def run_once(self) -> bool:
        """Tell one webhook what is due; whether there was anything."""
        began = self.clock()
        batch = self.outbox.claim(Lease(self.owner, began, began + LEASE))
        if batch is None:
            return False
        try:
            for delivery in batch.deliveries:
                late = self.clock() - began >= _BATCH
                # A receiver that does not answer would hold up those that do, once for every job.
                if late or self.stopped.is_set() or not self._tell(batch.webhook, delivery):
                    break
        finally:
            self.outbox.release(batch.webhook.id, owner=self.owner, now=self.clock())
        return True

    def _tell(self, webhook: Webhook, before: Delivery) -> bool:
        """One attempt; whether the receiver may be told more."""
        answer = self.sender.send(webhook, before.message, now=self.clock())
        if answer is None:
            return False
        now = self.clock()
        after = settle(before, answer, now=now, jitter=self.jitter())
        self.outbox.record(before, after)
        if answer.gone:
            self.outbox.disable(webhook.id, answer.error or "", now=now)
        if not answer.received:
            told = {
                "webhook": webhook.id,
                "message": before.message.id,
                "attempt": after.attempts,
                "error": answer.error,
            }
            log.warning("webhook_given_up" if after.settled is Settled.GIVEN_UP else "webhook_failed", **told)
        return answer.status is not None and not answer.gone

    def _begin(self, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=loop, name="webhooks", daemon=True)
        self.threads.append(thread)
        thread.start()

    def _keep_house(self) -> None:
        """Take back what a predecessor of the same name has left; clear away what is over, once in a while."""
        while not self._tried(self._take_back):
            if self.stopped.wait(self.interval):
                return
        for _ in range(_THREADS):
            self._begin(self._deliver)
        while not self.stopped.wait(_HOUSEKEEPING):
            self._tried(self._clear_away)

    def _deliver(self) -> None:
        while not self.stopped.is_set():
            if not self._tried(self.run_once):
                # No two of them in step: something that is due is seen by the first that comes along.
                self.stopped.wait(self.interval * (0.5 + self.jitter()))

    def _take_back(self) -> bool:
        self.outbox.release_all(self.owner, now=self.clock())
        return self._clear_away()

    def _clear_away(self) -> bool:
        self.outbox.prune(now=self.clock())
        return True

    def _tried(self, step: Callable[[], bool]) -> bool:
        """What a step says; one that fails is logged, and tried again later."""
        try:
            return step()
        except NotReady as error:
            self.faults.warn("webhooks_step_failed", error)
            return False
        except Exception as error:
            self.faults.report("webhooks_step_failed", error)
            return False
