"""Doctor checks: findings from measurements of the cluster and the storage. Pure: the caller measures."""

from collections.abc import Mapping, Sequence

from service.domain.doctor.finding import Finding, failed, ok, skipped, warning
from service.domain.doctor.measurements import Measured, ProbeFailure, ProbeReply, RayPods, Reachability
from service.domain.jobs.head_node import how_to_free
from service.domain.jobs.reason import storage_remedy
from train_loop.plan import DATA_CPUS
from train_loop.run_dir import ALL_NODES, ClusterVisit, NodeReport

_SKEW_WARNING, _SKEW_FAILED = 2.0, 30.0
"""Clock skew in seconds. Nodes compare the deadlines of pauses and cancels, set by the service, with their clocks."""
_MUST_EQUAL = ("trainshed", "ray")
"""Packages whose versions must be equal in the service and on the cluster. Among nodes all versions must be equal."""
_SHOWN = 5
"""Maximum number of nodes that a finding names."""


def check_up(seen: Measured) -> tuple[Finding, ...]:
    """Return one finding per check, always the same checks in the same order."""
    return (*_ray(seen), *_storage(seen), *_of_nodes(seen), _files(seen))


def _ray(seen: Measured) -> tuple[Finding, ...]:
    reachable, authenticated = _reply(seen.reply)
    if reachable.verdict == "failed" and (lost := seen.pods.lost_node()) is not None:
        reachable = failed(reachable.check, reachable.seen, how_to_free(lost))
    if not _answers(seen):
        behind = [skipped(check, "Ray does not answer") for check in ("ray.nodes", "ray.tasks")]
        return (reachable, authenticated, *behind)
    nodes = _nodes(seen.nodes)
    if nodes.verdict == "failed":
        return reachable, authenticated, nodes, skipped("ray.tasks", "no live node to run a task")
    return reachable, authenticated, nodes, _tasks(seen.visit)


def _reply(reply: ProbeReply | ProbeFailure) -> tuple[Finding, Finding]:
    unknown = skipped("ray.authenticated", "Ray does not answer")
    if isinstance(reply, ProbeFailure):
        remedy = (
            "check that the dashboard is not overloaded, and that no firewall drops traffic to TRAINSHED_RAY_ADDRESS"
        )
        return failed("ray.reachable", reply.what, remedy), unknown
    where = f"{reply.url}: {reply.message}" if reply.url else reply.message
    remedies = {
        Reachability.NOBODY: "start the cluster, or correct TRAINSHED_RAY_ADDRESS: the URL of its dashboard, http://HEAD:8265",
        Reachability.STRANGE: "TRAINSHED_RAY_ADDRESS must be the URL of Ray's dashboard, without a login page",
        Reachability.STARTING: "wait 30 s; if Ray still does not start, see ray.log in TRAINSHED_HOME",
    }
    if reply.reach in remedies:
        return failed("ray.reachable", where, remedies[reply.reach]), unknown
    if reply.reach is Reachability.REFUSED:
        remedy = "give the service the cluster's token: RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        return ok("ray.reachable", f"{reply.url} answers"), failed("ray.authenticated", where, remedy)
    return ok("ray.reachable", where), ok("ray.authenticated", "Ray accepts the service's requests")


def _nodes(nodes: int | ProbeFailure) -> Finding:
    if isinstance(nodes, ProbeFailure):
        return failed("ray.nodes", nodes.what, "check the head's dashboard, and gcs_server.out in its log folder")
    if nodes == 0:
        remedy = "if the head has just started, wait some seconds; otherwise start nodes or the autoscaler"
        return failed("ray.nodes", "Ray answers, but has no live node", remedy)
    return ok("ray.nodes", f"{nodes} alive")


def _tasks(visit: ClusterVisit | ProbeFailure) -> Finding:
    remedy = "the cluster's image must have trainshed[ray] installed, and `python` on its PATH must find it"
    if isinstance(visit, ProbeFailure):
        return failed("ray.tasks", visit.what, remedy)
    troubled = {_name(node): node.trouble for node in visit.nodes if node.trouble}
    if troubled:
        return failed("ray.tasks", _list(troubled), remedy)
    if visit.left_out:
        seen = f"{len(visit.nodes)} nodes ran a task; {visit.left_out} more were not checked"
        return warning("ray.tasks", seen, "in a very large cluster, only the first nodes are checked")
    return ok("ray.tasks", f"{len(visit.nodes)} of {len(visit.nodes)} nodes ran a task")


def _storage(seen: Measured) -> tuple[Finding, ...]:
    where = seen.runs
    return (
        _step(
            "storage.readable",
            seen.read,
            "give the service permission to list these folders: TRAINSHED_RUNS, TRAINSHED_STORAGE_ROOTS",
        ),
        _step(
            "storage.writable",
            seen.write,
            _or_known(
                seen.write, where, f"give the service permission to write to {where}, or set TRAINSHED_RUNS elsewhere"
            ),
        ),
        _step(
            "storage.atomic",
            seen.replace,
            _or_known(
                seen.replace,
                where,
                f"checkpoints need storage that replaces files atomically: mount {where} with another file system "
                "(NFS, a local disk, Lustre), or choose object storage with conditional writes",
            ),
        ),
        _shared(seen),
    )


def _or_known(seen: str | ProbeFailure, where: str, remedy: str) -> str:
    """Return what helps against an error of storage, such as a full disk; `remedy` if its text does not show that."""
    known = storage_remedy(seen.what) if isinstance(seen, ProbeFailure) else None
    return remedy if known is None else f"{where}: {known}"


def _step(check: str, seen: str | ProbeFailure, remedy: str) -> Finding:
    return failed(check, seen.what, remedy) if isinstance(seen, ProbeFailure) else ok(check, seen)


def _shared(seen: Measured) -> Finding:
    """Check that nodes see the service's writes, and the reverse."""
    check = "storage.shared"
    looked = [node for node in _visited(seen) if node.sight is not None]
    if not looked:
        return skipped(check, "no node has checked the storage")
    if isinstance(seen.token, ProbeFailure):
        return skipped(check, f"the service could not write a file for the nodes: {seen.token.what}")
    faults = _sight_faults(looked, seen.token, seen.arrived)
    if faults:
        remedy = (
            f"mount the same storage at the same path on service and nodes, writable for the user that Ray runs as "
            f"({seen.runs}), or set TRAINSHED_RUNS to shared storage"
        )
        return failed(check, _list(faults), remedy)
    return ok(check, f"{len(looked)} nodes see the service's writes, and it sees theirs")


def _sight_faults(looked: Sequence[NodeReport], token: str, arrived: frozenset[str] | ProbeFailure) -> dict[str, str]:
    faults = dict[str, str]()
    for node in looked:
        sight = node.sight
        if sight is None:
            continue
        if sight.fault:
            faults[_name(node)] = sight.fault
        elif sight.token != token:
            faults[_name(node)] = "does not see the service's writes"
        elif isinstance(arrived, ProbeFailure):
            faults[_name(node)] = arrived.what
        elif node.node not in arrived:
            faults[_name(node)] = "the service does not see its writes"
        elif sight.unreadable:
            faults[_name(node)] = "; ".join(f"{root}: {why}" for root, why in sight.unreadable.items())
    return faults


def _of_nodes(seen: Measured) -> tuple[Finding, ...]:
    nodes = _visited(seen)
    if not nodes or isinstance(seen.visit, ProbeFailure):
        checks = ("network", "versions", "user", "clock", "data_cpus")
        return tuple(skipped(check, "no node was checked") for check in checks)
    head = None if isinstance(seen.reply, ProbeFailure) else seen.reply.ahead
    versions, user = _outdated(seen.pods, nodes) or _versions(seen.versions, nodes), _user(seen, nodes)
    return _network(seen.visit), versions, user, _clock(head, nodes), _data_cpus(seen.visit)


def _network(visit: ClusterVisit) -> Finding:
    check, network = "network", visit.network
    if len(visit.nodes) < 2:
        return ok(check, "the cluster has only one node")
    if network is None:
        return skipped(check, "no time was left for this check")
    if not network.failed:
        return ok(check, f"an all-reduce over {network.nodes} nodes succeeded")
    remedy = (
        "open all TCP ports between the hosts; if a host has several networks, give `ray start` the address of the one "
        "that connects them (--node-ip-address), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )
    what = "an all-reduce fails over" if ALL_NODES in network.failed else "no connection between"
    return failed(check, f"{what} {_list(network.failed)}", remedy)


def _outdated(pods: RayPods, nodes: Sequence[NodeReport]) -> Finding | None:
    """Return a finding if pods have another specification than the chart's; None otherwise.

    KubeRay does not replace them if its operator and the RayCluster changed at the same time.
    """
    others = {_name(node): "an older specification" for node in nodes if node.pod_digest not in (None, *pods.digests)}
    if not others or not pods.digests:
        return None
    remedy = (
        "wait some minutes after an upgrade, while jobs save; then, if KubeRay does not replace them: "
        f"kubectl delete pod -l ray.io/cluster={pods.cluster}"
    )
    return failed("versions", f"pods of Ray do not have the image or settings of the chart: {_list(others)}", remedy)


def _versions(own: Mapping[str, str], nodes: Sequence[NodeReport]) -> Finding:
    check = "versions"
    versions_by_node = {_name(node): node.versions for node in nodes if node.versions is not None}
    if not versions_by_node:
        return skipped(check, "no node has reported its versions")
    among = _differing(versions_by_node)
    if among:
        return failed(check, f"nodes differ: {among}", "use one image for all nodes of the cluster")
    cluster = next(iter(versions_by_node.values()))
    others = {name: (mine, cluster[name]) for name, mine in own.items() if name in cluster and cluster[name] != mine}
    differences = ", ".join(
        f"{name} {mine} here and {theirs} on the cluster" for name, (mine, theirs) in others.items()
    )
    remedy = (
        "install the same versions for the service and in the cluster's image; constraints.txt lists the tested ones"
    )
    if any(name in _MUST_EQUAL for name in others):
        return failed(check, differences, remedy)
    if others:
        return warning(check, differences, remedy)
    return ok(check, ", ".join(f"{name} {version}" for name, version in cluster.items()))


def _user(seen: Measured, nodes: Sequence[NodeReport]) -> Finding:
    """Compare the users of the service and the nodes: each writes into folders that the other created."""
    check = "user"
    uid_by_node = {_name(node): node.uid for node in nodes if node.uid is not None}
    if seen.uid is None or not uid_by_node:
        return skipped(check, "no node has reported its user")
    others = {name: f"uid {uid}" for name, uid in uid_by_node.items() if uid != seen.uid}
    if not others:
        return ok(check, f"service and nodes run as uid {seen.uid}")
    if "://" in seen.runs and not seen.runs.startswith("file:"):
        return ok(check, f"the service runs as uid {seen.uid}, nodes as others; object storage has no file owners")
    remedy = "run the service and Ray as the same user: only the owner of a run directory may write to it"
    return failed(check, f"the service runs as uid {seen.uid}, but {_list(others)}", remedy)


def _files(seen: Measured) -> Finding:
    """Compare the open-file limit of the service with the connections that its settings allow."""
    room, wanted = seen.connections
    room_for = f"the limit of open files allows {room} connections"
    if room >= wanted:
        return ok("files", room_for)
    remedy = "raise the hard limit of open files (ulimit -Hn, LimitNOFILE=), or lower TRAINSHED_CONNECTIONS"
    return warning("files", f"{room_for}, and TRAINSHED_CONNECTIONS is {wanted}", remedy)


def _differing(versions_by_node: Mapping[str, Mapping[str, str]]) -> str:
    names = sorted({name for versions in versions_by_node.values() for name in versions})
    found = {name: sorted({versions.get(name, "none") for versions in versions_by_node.values()}) for name in names}
    return "; ".join(f"{name} {' and '.join(values)}" for name, values in found.items() if len(values) > 1)


def _clock(head: tuple[float, float] | None, nodes: Sequence[NodeReport]) -> Finding:
    """Check the clock skew. Bounds that include zero prove nothing: only a certain skew counts."""
    check = "clock"
    # The bounds of nodes are relative to the driver, which Ray runs on the head by default.
    bounds = [add(head, node.ahead) for node in nodes if node.ahead is not None] if head is not None else []
    if not bounds:
        return skipped(check, "neither the head nor the nodes have reported their time")
    worst = max(map(min_distance, bounds))
    seen = f"clock skew of at least {worst:.1f} s" if worst else "no clock skew found"
    remedy = "run chrony or another NTP client on all machines"
    if worst >= _SKEW_FAILED:
        return failed(check, seen, remedy)
    return warning(check, seen, remedy) if worst >= _SKEW_WARNING else ok(check, seen)


def add(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Add two lower bounds and two upper bounds."""
    return one[0] + other[0], one[1] + other[1]


def min_distance(bounds: tuple[float, float]) -> float:
    """Return the minimum distance from zero within the bounds."""
    return max(bounds[0], -bounds[1], 0.0)


def _data_cpus(visit: ClusterVisit) -> Finding:
    check, seen = "data_cpus", f"{visit.free_cpus:g} of {visit.cpus:g} CPUs are free"
    if visit.cpus <= DATA_CPUS:
        remedy = f"a job needs {DATA_CPUS:g} CPU for Ray Data besides its workers: add nodes with CPUs (--num-cpus)"
        return failed(check, seen, remedy)
    if visit.free_cpus < DATA_CPUS:
        remedy = f"running jobs may use all CPUs; the next job waits until {DATA_CPUS:g} CPU is free for Ray Data"
        return warning(check, seen, remedy)
    return ok(check, seen)


def _answers(seen: Measured) -> bool:
    return isinstance(seen.reply, ProbeReply) and seen.reply.reach is Reachability.ANSWERS


def _visited(seen: Measured) -> list[NodeReport]:
    return [] if isinstance(seen.visit, ProbeFailure) else seen.visit.nodes


def _name(node: NodeReport) -> str:
    return f"{node.address} ({node.node[:8]})"


def _list(faults: Mapping[str, str | None]) -> str:
    shown = [f"{node}: {why}" for node, why in list(faults.items())[:_SHOWN]]
    more = len(faults) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")
