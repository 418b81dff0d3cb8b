"""Delivery loop of webhooks: claim → send → record for every webhook with due messages.

No transaction is open during a send. After a crash at any line, the message is sent again with the same id.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from service.domain.webhooks.delivery import Delivery, DeliveryStatus, Webhook, apply_answer
from service.errors import NotReady
from service.fault_log import FaultLog
from service.ports import Lease, Outbox, Sender

log = structlog.get_logger(__name__)
LEASE = 60.0
"""Lease of a webhook in seconds: longer than a batch and its last send."""
_BATCH = 30.0
"""Seconds after which a batch ends, so that other webhooks get their turn."""
_THREADS = 8
_HOUSEKEEPING = 3600.0


@dataclass(frozen=True)
class Deliverer:
    """Sender of the messages in the outbox, with a pool of threads."""

    outbox: Outbox
    sender: Sender
    clock: Callable[[], float]
    jitter: Callable[[], float]
    """Function that returns a random number from 0 to 1."""
    owner: str
    interval: float = 2.0
    stopped: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    faults: FaultLog = field(default_factory=FaultLog)

    def start(self) -> None:
        """Start the threads; sending begins once the database answers."""
        self._begin(self._run_maintenance)

    def stop(self) -> None:
        """Abort the in-flight sends, and release every claimed webhook."""
        self.stopped.set()
        self.sender.close()
        for thread in self.threads:
            thread.join()

    def run_once(self) -> bool:
        """Send the due messages of one webhook; return False if there were none."""
        began = self.clock()
        batch = self.outbox.claim(Lease(self.owner, began, began + LEASE))
        if batch is None:
            return False
        try:
            for delivery in batch.deliveries:
                late = self.clock() - began >= _BATCH
                # Stop at the first message without an answer: a dead receiver must not delay the others.
                if late or self.stopped.is_set() or not self._send_one(batch.webhook, delivery):
                    break
        finally:
            self.outbox.release(batch.webhook.id, owner=self.owner, now=self.clock())
        return True

    def _send_one(self, webhook: Webhook, before: Delivery) -> bool:
        """Try to send one message; return whether the batch may continue."""
        answer = self.sender.send(webhook, before.message, now=self.clock())
        if answer is None:
            return False
        now = self.clock()
        after = apply_answer(before, answer, now=now, jitter=self.jitter())
        self.outbox.record(before, after)
        if answer.gone:
            self.outbox.disable(webhook.id, answer.error or "", now=now)
        if not answer.received:
            fields = {
                "webhook": webhook.id,
                "message": before.message.id,
                "attempt": after.attempts,
                "error": answer.error,
            }
            log.warning("webhook_given_up" if after.settled is DeliveryStatus.GIVEN_UP else "webhook_failed", **fields)
        return answer.status is not None and not answer.gone

    def _begin(self, loop: Callable[[], None]) -> None:
        thread = threading.Thread(target=loop, name="webhooks", daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run_maintenance(self) -> None:
        """Release leases that an earlier process of this owner left, start the senders, then prune once an hour."""
        while not self._try(self._release_leases):
            if self.stopped.wait(self.interval):
                return
        for _ in range(_THREADS):
            self._begin(self._deliver)
        while not self.stopped.wait(_HOUSEKEEPING):
            self._try(self._prune)

    def _deliver(self) -> None:
        while not self.stopped.is_set():
            if not self._try(self.run_once):
                # Jitter keeps the threads from polling at the same moment.
                self.stopped.wait(self.interval * (0.5 + self.jitter()))

    def _release_leases(self) -> bool:
        self.outbox.release_all(self.owner, now=self.clock())
        return self._prune()

    def _prune(self) -> bool:
        self.outbox.prune(now=self.clock())
        return True

    def _try(self, step: Callable[[], bool]) -> bool:
        """Return the result of a step; log an error and return False, so that the caller retries later."""
        try:
            return step()
        except NotReady as error:
            self.faults.warn("webhooks_step_failed", error)
            return False
        except Exception as error:
            self.faults.report("webhooks_step_failed", error)
            return False
