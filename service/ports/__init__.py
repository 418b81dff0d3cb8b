"""Ports: the interfaces of the service to the outside, as Protocols. adapters/ implements them."""

from service.ports.access import KeyStore, TokenVerifier
from service.ports.cancellation import CallCancelled, Cancellation
from service.ports.cluster import Cluster, Node, SubmitRequest
from service.ports.doctor import ClusterProbe, StorageProbe
from service.ports.jobs import IDEMPOTENCY_TTL, IdempotencyKey, JobQuery, JobStore, Lease, NewJob
from service.ports.metrics import Counts, JobCounts, Metrics, NoMetrics, NoTracer, RunTotals, Totals, Tracer
from service.ports.preflight import Preflight, PreflightReport
from service.ports.runs import (
    EMPTY_SUMMARY,
    AttemptObservation,
    Checkpoint,
    CheckpointTools,
    Cursor,
    Digests,
    LogChunk,
    LogLine,
    LogOffset,
    LogSource,
    Loss,
    Progress,
    Reading,
    RunDirs,
    RunSummary,
    TensorDigest,
)
from service.ports.webhooks import Batch, Outbox, Sender, WebhookStore

__all__ = [
    "EMPTY_SUMMARY",
    "IDEMPOTENCY_TTL",
    "AttemptObservation",
    "Batch",
    "CallCancelled",
    "Cancellation",
    "Checkpoint",
    "CheckpointTools",
    "Cluster",
    "ClusterProbe",
    "Counts",
    "Cursor",
    "Digests",
    "IdempotencyKey",
    "JobCounts",
    "JobQuery",
    "JobStore",
    "KeyStore",
    "Lease",
    "LogChunk",
    "LogLine",
    "LogOffset",
    "LogSource",
    "Loss",
    "Metrics",
    "NewJob",
    "NoMetrics",
    "NoTracer",
    "Node",
    "Outbox",
    "Preflight",
    "PreflightReport",
    "Progress",
    "Reading",
    "RunDirs",
    "RunSummary",
    "RunTotals",
    "Sender",
    "StorageProbe",
    "SubmitRequest",
    "TensorDigest",
    "TokenVerifier",
    "Totals",
    "Tracer",
    "WebhookStore",
]
