"""`python deploy/grafana/evaluate.py URL [--plots FILE]`: check of all dashboard queries against a Prometheus server.

Prints each panel with the number of its series, and exits with 1 if a query fails. With --plots it draws the last
minutes of all panels (needs matplotlib).
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx

FOLDER = Path(__file__).parent / "dashboards"
_VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$namespace": ".*", "$service": ".*", "$cluster": ".*"}
_COLUMNS = 4
Panel = tuple[str, list[str]]


def panels() -> list[Panel]:
    """Return every panel's title and queries, with Grafana's variables replaced."""
    found: list[Panel] = []
    for file in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            queries = [target["expr"] for target in panel["targets"]]
            for name, value in _VARIABLES.items():
                queries = [query.replace(name, value) for query in queries]
            found.append((panel["title"], queries))
    return found


def run_query(client: httpx.Client, query: str, *, minutes: float) -> list[dict[str, Any]]:
    """Return the series of a query over the last minutes. Raises httpx.HTTPStatusError if Prometheus rejects it."""
    now = time.time()
    span = {"start": now - 60 * minutes, "end": now, "step": max(minutes, 1)}
    answer = client.get("/api/v1/query_range", params={"query": query, **span})
    answer.raise_for_status()
    found: list[dict[str, Any]] = answer.json()["data"]["result"]
    return found


def main() -> int:
    """Run all queries, print the results, and draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    series: dict[str, list[dict[str, Any]]] = {}
    failed = False
    with httpx.Client(base_url=arguments.url, timeout=30) as client:
        for title, queries in panels():
            try:
                series[title] = [
                    one for query in queries for one in run_query(client, query, minutes=arguments.minutes)
                ]
                print(f"{title}: {len(series[title])} series")  # noqa: T201
            except httpx.HTTPStatusError as error:
                failed = True
                print(f"{title}: {error.response.text}")  # noqa: T201
    if arguments.plots:
        draw(series, arguments.plots)
    return 1 if failed else 0


def draw(series: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """Draw all panels into one image file."""
    import matplotlib.pyplot as plot  # noqa: PLC0415 - needed for --plots only

    rows = -(-len(series) // _COLUMNS)
    figure, axes = plot.subplots(rows, _COLUMNS, figsize=(4 * _COLUMNS, 2.2 * rows), constrained_layout=True)
    for axis in axes.flat[len(series) :]:
        axis.remove()
    for axis, (title, found) in zip(axes.flat, series.items(), strict=False):
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        begin = min((one["values"][0][0] for one in found), default=0)
        for one in found:
            points = [(float(at) - float(begin), float(value)) for at, value in one["values"]]
            label = ", ".join(value for name, value in one["metric"].items() if name != "job")
            axis.plot(*zip(*points, strict=True), label=label[:24])
        if 1 < len(found) < 7:
            axis.legend(fontsize=6)
    figure.savefig(file, dpi=60)


if __name__ == "__main__":
    sys.exit(main())
