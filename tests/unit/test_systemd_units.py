"""The systemd units of deploy/systemd."""

from pathlib import Path

import pytest
from ray._common.usage.usage_constants import USAGE_STATS_ENABLED_ENV_VAR

UNITS = Path("deploy/systemd")


@pytest.mark.parametrize("unit", ["trainshed-head", "trainshed-node"])
def test_units_keep_ray_from_sending_usage_statistics(unit: str) -> None:
    text = (UNITS / f"{unit}.service").read_text()
    assert f"Environment={USAGE_STATS_ENABLED_ENV_VAR}=0" in text.splitlines()
