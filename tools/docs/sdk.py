"""The reference of the Python client, which mkdocstrings fills from signatures and docstrings."""

import trainshed

_FIRST = ("Client", "Job", "AsyncClient", "AsyncJob")
"""The classes at the top of the page; the other public names follow."""


def page() -> str:
    """Return the Markdown of the page."""
    names = [*_FIRST, *(name for name in trainshed.__all__ if name not in _FIRST)]
    parts = "\n".join(f"::: {trainshed.__name__}.{name}\n" for name in names)
    return f"# Python SDK\n\n[The Python client](../guides/client.md) has tested examples.\n\n{parts}"
