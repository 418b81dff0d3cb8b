"""`python deploy/grafana/build.py [FOLDER]`: generator of the Grafana dashboards, from the list of series.

Panels query series of `service.domain.metrics`, whose members build the queries, and series of Ray and of DCGM.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    GraphTresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    GridPos,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)

from service.domain import metrics
from service.domain.metrics import Series

FOLDER = Path(__file__).parent / "dashboards"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RAY_URL = "http://localhost:8265"
"""Ray's dashboard, for links; the chart puts ray.dashboardUrl in its place."""
_RELEASE = ("namespace", "service")
"""Labels that distinguish releases on Kubernetes; without it they are empty, which All matches."""
_WIDTH, _HEIGHT = 8, 8
"""Size of a panel; Grafana's grid is 24 units wide."""


@dataclass(frozen=True)
class Panel:
    """A panel: queries with their legends, and a Grafana unit."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    text: str = ""
    kind: str = "lines"
    limits: tuple[float, float] | None = None
    """Values that are a warning and critical. If the first is larger, small values are bad."""


def selected(one: Series, where: str = "", part: str = "") -> str:
    """Return the selector of a series, of the chosen releases."""
    labels = ", ".join(filter(None, (where, *(f'{name}=~"${name}"' for name in _RELEASE))))
    return f"{one.full_name}{part}{{{labels}}}"


def whole(one: Series, by: str = "", where: str = "") -> str:
    """Build the query of a series that all replicas report equally."""
    assert one.whole, one
    worst = "min" if one in (metrics.CLUSTER_UP, metrics.DATABASE_UP) else "max"
    return f"{worst}{_by(by)} ({selected(one, where)})"


def rate(one: Series, by: str = "", where: str = "", over: str = "$__rate_interval") -> str:
    """Build the query of a counter's rate, summed over all replicas."""
    assert one.kind == "counter", one
    return f"sum{_by(by)} (rate({selected(one, where)}[{over}]))"


def quantile(part: float, one: Series, by: str = "", over: str = "$__rate_interval") -> str:
    """Build the query of a histogram's quantile over all replicas."""
    assert one.kind == "histogram", one
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({part}, sum by ({labels}) (rate({selected(one, part='_bucket')}[{over}])))"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


_LIVE = 'state=~"QUEUED|STARTING|RUNNING|RECOVERING|PAUSING|PAUSED|CANCELLING"'
FLEET = (
    Panel("Ray answers", ((whole(metrics.CLUSTER_UP), ""),), kind="number", limits=(1, 0.5)),
    Panel(
        "Ray silent",
        ((whole(metrics.CLUSTER_SILENT, "head_node"), "{{head_node}}"),),
        "s",
        "With the head's node.",
        limits=(10, 180),
    ),
    Panel("Database answers", ((whole(metrics.DATABASE_UP), ""),), kind="number", limits=(1, 0.5)),
    Panel("Versions", ((f"count by (version) ({selected(metrics.BUILD)})", "{{version}}"),), kind="number"),
    Panel(
        "Jobs by state",
        ((f"sum by (state) ({whole(metrics.JOBS, 'state, project', _LIVE)})", "{{state}}"),),
    ),
    Panel("Running jobs by project", ((whole(metrics.JOBS, "project", 'state="RUNNING"'), "{{project}}"),)),
    Panel(
        "Goodput",
        ((whole(metrics.GOODPUT, "project"), "{{project}}"),),
        "percentunit",
        "Fraction of the wall time spent on new steps.",
        limits=(0.8, 0.5),
    ),
    Panel("Oldest queued job", ((whole(metrics.OLDEST_WAIT, "project"), "{{project}}"),), "s", limits=(3600, 14400)),
    Panel("Queue wait (95 %)", ((quantile(0.95, metrics.QUEUE_WAIT, over="1h"), ""),), "s"),
    Panel("Finished attempts per hour", ((rate(metrics.ATTEMPTS, "outcome", over="1h") + " * 3600", "{{outcome}}"),)),
    Panel(
        "Reconcile lag",
        ((f"min({selected(metrics.LAG)})", ""),),
        "s",
        "Time since the last complete reconcile pass.",
        limits=(30, 120),
    ),
    Panel("Reconcile pass (95 %)", ((quantile(0.95, metrics.PASS_SECONDS), ""),), "s"),
    Panel("Webhook backlog", ((whole(metrics.BACKLOG), ""),), limits=(100, 1000)),
    Panel("Webhooks", ((whole(metrics.WEBHOOKS, "status"), "{{status}}"),)),
    Panel("HTTP responses", ((rate(metrics.HTTP_REQUESTS, "status"), "{{status}}"),), "reqps"),
    Panel("Response time (99 %)", ((quantile(0.99, metrics.HTTP_SECONDS, "route"), "{{route}}"),), "s"),
    Panel("Open streams", ((f"sum({selected(metrics.STREAMS)})", ""),)),
    Panel("State changes per hour", ((rate(metrics.MOVES, "state", over="1h") + " * 3600", "{{state}}"),)),
)
_ONE = 'job_id=~"$job"'
_NAMED = "{{name}} ({{job_id}})"
JOB = (
    Panel("Newest attempt", ((whole(metrics.JOB_ATTEMPT, "name, job_id", _ONE), _NAMED),), kind="attempts"),
    Panel("Step time", ((whole(metrics.JOB_STEP_SECONDS, "name, job_id", _ONE), _NAMED),), "s", "Median of 50 steps."),
    Panel("Tokens per second", ((whole(metrics.JOB_TOKENS, "name, job_id", _ONE), _NAMED),)),
    Panel("Loss", ((whole(metrics.JOB_LOSS, "name, job_id", _ONE), _NAMED),)),
    Panel("Steps", ((whole(metrics.JOB_STEP, "name, job_id", _ONE), _NAMED),)),
    Panel(
        "Time since the newest step",
        ((whole(metrics.JOB_PROGRESS_AGE, "name, job_id", _ONE), _NAMED),),
        "s",
        limits=(600, 1800),
    ),
    Panel(
        "Time since the newest checkpoint",
        ((whole(metrics.JOB_CHECKPOINT_AGE, "name, job_id", _ONE), _NAMED),),
        "s",
        limits=(3600, 7200),
    ),
    Panel("Restarts", ((whole(metrics.JOB_RESTARTS, "name, job_id", _ONE), _NAMED),)),
    Panel(
        "Waiting for data",
        ((whole(metrics.JOB_DATA_WAIT, "name, job_id", _ONE), _NAMED),),
        "percentunit",
        limits=(0.1, 0.3),
    ),
    Panel("Jobs without progress", ((whole(metrics.JOB_WAITS, "name, job_id, code", _ONE), "{{name}}: {{code}}"),)),
)
_RAY = '{ray_io_cluster=~"$cluster"}'
_POD = '{pod=~"($cluster)(-.*)?"}'
_GPU = "{{instance}} GPU {{GpuIndex}}"


def ratio(used: str, free: str) -> str:
    """Build the query of the used part of a resource of each Ray node."""
    return f"ray_node_{used}{_RAY} / (ray_node_{used}{_RAY} + ray_node_{free}{_RAY})"


NODES = (
    Panel("CPUs", ((f"ray_node_cpu_utilization{_RAY}", "{{instance}}"),), "percent", "Of each Ray node."),
    Panel(
        "Host memory",
        ((f"ray_node_mem_used_host{_RAY} / ray_node_mem_total_host{_RAY}", "{{instance}}"),),
        "percentunit",
        "Of the machine of each Ray node. Ray ends workers above 95 %.",
        limits=(0.85, 0.95),
    ),
    Panel(
        "Memory of the container",
        ((f"ray_node_mem_used{_RAY} / ray_node_mem_total{_RAY}", "{{instance}}"),),
        "percentunit",
        limits=(0.85, 0.95),
    ),
    Panel(
        "Disk", ((ratio("disk_usage", "disk_free"), "{{instance}}"),), "percentunit", "Of /tmp.", limits=(0.85, 0.95)
    ),
    Panel("GPU utilization", ((f"ray_node_gpus_utilization{_RAY}", _GPU),), "percent"),
    Panel("GPU memory", ((ratio("gram_used", "gram_available"), _GPU),), "percentunit", limits=(0.9, 0.97)),
    Panel("GPU temperature", ((f"ray_node_gpu_temperature_celsius{_RAY}", _GPU),), "celsius", limits=(80, 87)),
    Panel("GPU power", ((f"ray_node_gpu_power_milliwatts{_RAY} / 1000", _GPU),), "watt"),
    Panel(
        "GPU errors (XID)",
        ((f"DCGM_FI_DEV_XID_ERRORS{_POD}", "{{Hostname}} GPU {{gpu}}"),),
        text="Number of the last error, of NVIDIA's DCGM exporter.",
        limits=(1, 1),
    ),
    Panel(
        "Remapped GPU memory rows",
        ((f"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{_POD}", "{{Hostname}} GPU {{gpu}}"),),
        text="Of uncorrectable errors, of NVIDIA's DCGM exporter.",
        limits=(1, 8),
    ),
)


def _panel(panel: Panel, place: int) -> Any:
    builder: Any = _lines() if panel.kind == "lines" else _newest()
    if panel.kind == "attempts":
        # The submission of an attempt is called JOB-NUMBER in Ray.
        page = dashboard.DashboardLink("Ray's page of the attempt, with its logs").target_blank(True)
        builder = builder.data_links([page.url("${ray}/#/jobs/${__field.labels.job_id}-${__value.raw}")])
    if panel.limits is not None:
        builder = builder.thresholds(_thresholds(*panel.limits))
    if panel.limits is not None and panel.kind == "lines":
        builder = builder.thresholds_style(common.GraphThresholdsStyleConfig().mode(GraphTresholdsStyleMode.LINE))
    for query, legend in panel.queries:
        target = prometheus.Dataquery().expr(query).legend_format(legend or panel.title)
        builder = builder.with_target(target)
    columns = 24 // _WIDTH
    return (
        builder.title(panel.title)
        .description(panel.text)
        .unit(panel.unit)
        .datasource(_SOURCE)
        .grid_pos(_place(place, columns))
    )


def _lines() -> Any:
    legend = common.VizLegendOptions().show_legend(True)
    legend = legend.display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    return timeseries.Panel().legend(legend).tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))


def _newest() -> Any:
    return stat.Panel().reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))


def _thresholds(warning: float, critical: float) -> Any:
    """Return the colours of a panel's values."""
    steps = [(None, "green"), (warning, "orange"), (critical, "red")]
    if warning > critical:
        steps = [(None, "red"), (critical, "orange"), (warning, "green")]
    return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps([Threshold(*one) for one in steps])


def _place(place: int, columns: int) -> GridPos:
    return GridPos(h=_HEIGHT, w=_WIDTH, x=place % columns * _WIDTH, y=place // columns * _HEIGHT)


def _variable(name: str, query: str) -> Any:
    chosen = dashboard.QueryVariable(name).label(name.capitalize()).datasource(_SOURCE).multi(True).include_all(True)
    return chosen.all_value(".*").query(query).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)


def _attempts() -> Any:
    """Mark the starts of attempts after the first."""
    starts = f"changes({selected(metrics.JOB_ATTEMPT, _ONE)}[1m]) > 0"
    return (
        dashboard.AnnotationQuery().name("Attempts").datasource(_SOURCE).enable(True).icon_color("orange").expr(starts)
    )


def build(uid: str, title: str, panels: tuple[Panel, ...], *, by: str = "") -> str:
    """Return the dashboard as JSON. `by`: what its panels select by, `job` or `cluster`."""
    others = dashboard.DashboardLink("Trainshed").type(DashboardLinkType.DASHBOARDS).tags(["trainshed"]).keep_time(True)
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .tags(["trainshed"])
        .refresh("30s")
        .time("now-6h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .links([others])
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name in _RELEASE if by != "cluster" else ():
        made = made.with_variable(_variable(name, f"label_values({metrics.BUILD.full_name}, {name})"))
    if by == "cluster":
        made = made.with_variable(_variable("cluster", "label_values(ray_node_mem_total, ray_io_cluster)"))
    if by == "job":
        made = made.with_variable(_variable("job", f"label_values({selected(metrics.JOB_STEP)}, job_id)"))
        made = made.with_variable(dashboard.TextBoxVariable("ray").label("Ray's dashboard").default_value(RAY_URL))
        made = made.annotation(_attempts())
    for place, panel in enumerate(panels):
        made = made.with_panel(_panel(panel, place))
    return json.dumps(json.loads(JSONEncoder(sort_keys=True).encode(made.build())), indent=1, sort_keys=True) + "\n"


def all_dashboards() -> dict[str, str]:
    """Return every dashboard by its file name."""
    return {
        "fleet.json": build("trainshed-fleet", "Trainshed: fleet", FLEET),
        "job.json": build("trainshed-job", "Trainshed: jobs", JOB, by="job"),
        "nodes.json": build("trainshed-nodes", "Trainshed: nodes", NODES, by="cluster"),
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in all_dashboards().items():
        (folder / name).write_text(text)
