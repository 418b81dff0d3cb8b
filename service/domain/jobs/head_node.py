"""The Kubernetes node of Ray's head, and the command that frees its pods: the service itself has no access there."""

from dataclasses import dataclass

LOST_SECONDS = 180.0
"""Silence of Ray after which its head's node may be gone; Kubernetes evicts the pods of a lost node within a minute."""


@dataclass(frozen=True, order=True)
class HeadNode:
    """The node that the driver of an attempt ran on."""

    seen_at: float
    """Time at which the driver started (Unix seconds)."""
    name: str


def lost_node(head: HeadNode | None, *, silent_seconds: float) -> HeadNode | None:
    """Return the node of a head that has been silent for minutes; None if it is unknown or may return."""
    return head if head is not None and silent_seconds >= LOST_SECONDS else None


def how_to_free(head: HeadNode) -> str:
    """Return what to do about a lost node."""
    return (
        f"the head was on the Kubernetes node {head.name}; if this node is gone for good, its pods stay Terminating "
        f"and nothing replaces them until: kubectl taint nodes {head.name} "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    )
