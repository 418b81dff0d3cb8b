"""Errors of collective operations: what gloo, NCCL and the store say when another rank is late or gone.

Each such error blames the rank that waited. Pure; the controller imports it.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

_TIMEOUT = re.compile(
    r"timed out|wait timeout|socket timeout|operation timeout|application timeout|timeout.* monitoredbarrier",
    re.IGNORECASE,
)
_LOST = re.compile(
    r"connection (was |is )?(likely )?(closed|reset|refused|aborted)|broken pipe|socket closed|"
    r"(recvvalue|sendbytes|recvvaluewithtimeout|recvvector|sendvalue) failed|failed to (recv|send|connect)|"
    r"has failed to connect|nccl(Remote|System|Internal)Error|communicator was aborted|read error|write error|"
    r"no route to host|network is unreachable|host is unreachable",
    re.IGNORECASE,
)
_RAISED = re.compile(r"^(?:rank \d+: )?(?:RuntimeError|(?:\w+\.)*Dist(?:Network|Store|Backend)?Error): ")
"""Classes that PyTorch raises for them. Python's own ConnectionError comes from storage or a hub instead."""
TIMEOUT, LOST_CONNECTION = "a timeout", "a lost connection"
_UNKNOWN_RANK: Mapping[str, str] = MappingProxyType(
    {
        TIMEOUT: "training hung: a rank got no answer from the others until its timeout; it is not known which is late",
        LOST_CONNECTION: "a rank lost its connection to another one; it is not known which has ended",
    }
)


def contact_lost(error: str) -> str | None:
    """Return how a rank lost contact with another one: TIMEOUT or LOST_CONNECTION; None for any other error."""
    if not _RAISED.match(error):
        return None
    if _TIMEOUT.search(error):
        return TIMEOUT
    return LOST_CONNECTION if _LOST.search(error) else None


def explain_contact(error: str) -> str:
    """Return the text of an error; a sentence if it is about the contact with an unknown rank."""
    lost = contact_lost(error)
    return error if lost is None else _UNKNOWN_RANK[lost]
