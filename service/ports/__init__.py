"""Ports: the interfaces of the service to the outside, as Protocols. adapters/ implements them."""

from service.ports.access import KeyStore, TokenVerifier
from service.ports.cluster import Cluster, Launch, Node
from service.ports.doctor import ClusterProbe, StorageProbe
from service.ports.jobs import KEPT_SECONDS, JobQuery, JobStore, Lease, NewJob, Once
from service.ports.metrics import Counts, JobCounts, RunTotals, Totals, Traces, Untraced, Unwatched, Watch
from service.ports.preflight import Findings, Preflight
from service.ports.runs import (
    NO_STORY,
    Checkpoint,
    CheckpointTools,
    Cursor,
    Entry,
    Line,
    Loss,
    Place,
    Progress,
    Reading,
    RunDirs,
    Sighting,
    Story,
    Tail,
    Written,
)
from service.ports.webhooks import Batch, Outbox, Sender, WebhookStore

__all__ = [
    "KEPT_SECONDS",
    "NO_STORY",
    "Batch",
    "Checkpoint",
    "CheckpointTools",
    "Cluster",
    "ClusterProbe",
    "Counts",
    "Cursor",
    "Entry",
    "Findings",
    "JobCounts",
    "JobQuery",
    "JobStore",
    "KeyStore",
    "Launch",
    "Lease",
    "Line",
    "Loss",
    "NewJob",
    "Node",
    "Once",
    "Outbox",
    "Place",
    "Preflight",
    "Progress",
    "Reading",
    "RunDirs",
    "RunTotals",
    "Sender",
    "Sighting",
    "StorageProbe",
    "Story",
    "Tail",
    "TokenVerifier",
    "Totals",
    "Traces",
    "Untraced",
    "Unwatched",
    "Watch",
    "WebhookStore",
    "Written",
]
