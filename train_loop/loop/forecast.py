"""The score of a run's forecast: measured throughput and memory against the plan's."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from train_loop.errors import ModelError
from train_loop.model.folder import model_shape
from train_loop.plan import Outlook, device_of, outlook_on, plan_job
from train_loop.spec import JobSpec

_LEAST = 5
"""Logged steps that a score needs, besides the first one, which compiles and allocates."""


@dataclass
class ForecastScore:
    """The forecast of a run, and the steps by which it is judged."""

    outlook: Outlook | None
    """The plan on the run's device; None if the device or its throughput is not known."""
    tokens: int
    """Tokens of a step with full rows."""
    _seconds: list[float] = field(default_factory=list, init=False)
    _peak: int = field(default=0, init=False)

    @classmethod
    def of(cls, spec: JobSpec, device: str) -> "ForecastScore":
        """Return the forecast of a run on a device, by the name that CUDA reports."""
        known = device_of(device)
        if known is None or spec.code is not None:
            return cls(None, 0)
        try:
            shape = model_shape(spec.model)
        except ModelError:
            return cls(None, 0)
        plan = plan_job(spec, shape)
        outlook = outlook_on(spec, plan, known) if shape.known else None
        return cls(outlook, plan.batch.global_batch * spec.data.sequences * spec.data.sequence_length)

    def add(self, line: Mapping[str, Any] | None) -> None:
        """Count a step, by its metrics line; None for steps that have none."""
        if line is not None:
            self._seconds.append(line["step_seconds"])
            self._peak = max(self._peak, line["peak_device_bytes"] or 0)

    def result(self) -> dict[str, Any] | None:
        """Return the fields of the event `forecast_scored`; None without a forecast, or after too few steps."""
        if self.outlook is None or (speed := self.outlook.throughput) is None or len(self._seconds) <= _LEAST:
            return None
        seconds = statistics.median(self._seconds[1:])
        least, most = speed.tokens_per_second
        measured = self.tokens / seconds
        return {
            "device": self.outlook.device.name,
            "tokens_per_second": {"least": least, "most": most, "measured": measured},
            "inside": least <= measured <= most,
            "device_bytes": {"planned": self.outlook.planned_bytes, "measured": self._peak},
            "steps": len(self._seconds) - 1,
        }
