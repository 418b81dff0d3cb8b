"""`python -m train_loop.ray_train.dashboards FOLDER`: writes the Grafana dashboards of the installed Ray."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from ray.dashboard.modules.metrics import grafana_dashboard_factory as factory

_MADE: dict[str, Callable[[], tuple[str, str]]] = {
    "ray-default": factory.generate_default_grafana_dashboard,
    "ray-train": factory.generate_train_grafana_dashboard,
    "ray-data": factory.generate_data_grafana_dashboard,
}


def main() -> None:
    """Write one file per dashboard."""
    parser = argparse.ArgumentParser(prog="python -m train_loop.ray_train.dashboards", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in _MADE.items():
        text, _ = make()
        (folder / f"{name}.json").write_text(json.dumps(json.loads(text)))


if __name__ == "__main__":
    main()
