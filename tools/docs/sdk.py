"""The reference of the Python client, which mkdocstrings fills from signatures and docstrings."""

PACKAGE = "service.client"
NAMES = ("Client", "Job", "AsyncClient", "AsyncJob", "ApiError")


def page() -> str:
    """Return the Markdown of the page."""
    parts = "\n".join(f"::: {PACKAGE}.{name}\n" for name in NAMES)
    return f"# Python SDK\n\n[The Python client](../guides/client.md) has tested examples.\n\n{parts}"
