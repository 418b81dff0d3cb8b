"""Cache of recent preflight reports without problems, and of running checks."""

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from service.ports import CallCancelled, PreflightReport
from train_loop.spec import AnyJobSpec, OptimizerSpec

FRESH_SECONDS = 30.0
"""Seconds for which a result without problems is reused: many jobs differ only in fields that no check reads."""
_KEPT = 256


class ReportCache:
    """A cache of recent results without problems, and of running checks. Equal concurrent checks share one result."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[float, Future[PreflightReport]]] = OrderedDict()

    def cached(self, key: str) -> PreflightReport | None:
        """Return a fresh result without problems; None if there is none."""
        with self._lock:
            since, answer = self._known.get(key, (-math.inf, Future[PreflightReport]()))
        if not answer.done() or answer.exception() or time.monotonic() - since >= FRESH_SECONDS:
            return None
        return None if answer.result().problems else answer.result()

    def get(self, key: str, check: Callable[[], PreflightReport]) -> PreflightReport:
        """Return the cached result, or call `check`. Raises what `check` raises."""
        while True:
            mine = Future[PreflightReport]()
            answer = self._answer(key, mine)
            if answer is mine:
                self._fill(key, mine, check)
            try:
                return answer.result()
            except CallCancelled:
                # The client of the other call has gone, and ours has not.
                if answer is mine:
                    raise

    def _answer(self, key: str, mine: Future[PreflightReport]) -> Future[PreflightReport]:
        """Return the fresh or running result of a key; `mine`, which is kept for it, if there is none."""
        with self._lock:
            since, answer = self._known.get(key, (0.0, mine))
            if answer is mine or (answer.done() and time.monotonic() - since >= FRESH_SECONDS):
                answer = mine
                self._known[key] = time.monotonic(), mine
                self._known.move_to_end(key)
                if len(self._known) > _KEPT:
                    self._known.popitem(last=False)
        return answer

    def _fill(self, key: str, answer: "Future[PreflightReport]", check: Callable[[], PreflightReport]) -> None:
        try:
            answer.set_result(check())
        except BaseException as error:
            answer.set_exception(error)
        if answer.exception() or answer.result().problems:
            # Do not cache problems: the next check should see a fix at once.
            with self._lock:
                self._known.pop(key, None)


def cache_key(spec: AnyJobSpec) -> str:
    """Return the cache key: all fields of a spec that `train_loop.preflight.checks` reads.

    The project is part of it, because projects may read different files.
    """
    parts: dict[str, Any] = {
        "project": True,
        "model": True,
        "data": True,
        "strategy": True,
        "scaling": True,
        "infer": True,
        "training": {
            *OptimizerSpec.model_fields,
            "chunked_loss",
            "global_batch_size",
            "gradient_accumulation_steps",
            "label_smoothing_factor",
            "optimizer_state",
            "per_device_train_batch_size",
            "reproducible",
            "router_aux_loss",
            "router_z_loss",
            "seed",
            "z_loss",
        },
    }
    return f"{spec.kind} {spec.run.model_dump_json(include=parts)}"
