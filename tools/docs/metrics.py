"""The reference of Prometheus series, from the list that the service reports."""

from service.domain.metrics import ALL, Series
from tools.docs.markdown import code, sentence, table


def page() -> str:
    """Return the Markdown of the page."""
    whole, own = [one for one in ALL if one.whole], [one for one in ALL if not one.whole]
    return (
        "# Metrics\n\n"
        "`GET /metrics` reports these series. [Monitoring](../operate/monitoring.md) describes access, dashboards and "
        "alerts.\n\n"
        "## Series of the whole service\nAll replicas report the same value: use `max`, not `sum`.\n\n"
        + _table(whole)
        + "\n## Series of one process\nUse `sum` over replicas. The `process_*` series of the Prometheus client are "
        "reported, too.\n\n" + _table(own)
    )


def _table(series: list[Series]) -> str:
    rows = [(code(one.full_name), one.kind, ", ".join(map(code, one.labels)), sentence(one.help)) for one in series]
    return table(("series", "type", "labels", "meaning"), rows)
