"""All generated pages, by their path below `docs/`."""

import re
from pathlib import Path

from tools.docs import cli, errors, events, metrics, rest, sdk, settings, spec

ROOT = Path(__file__).parents[2]


def generate() -> dict[str, str]:
    """Return the Markdown of each generated page."""
    return {
        "contribute/index.md": root_file("CONTRIBUTING.md"),
        "contribute/changelog.md": root_file("CHANGELOG.md"),
        "reference/cli.md": cli.page(),
        "reference/errors.md": errors.page(),
        "reference/events.md": events.page(),
        "reference/metrics.md": metrics.page(),
        "reference/rest-api.md": rest.page(),
        "reference/sdk.md": sdk.page(),
        "reference/settings.md": settings.page(),
        "reference/spec.md": spec.page(),
    }


def root_file(name: str) -> str:
    """Return the text of a file at the root of the repository, with links into `docs/` made relative to a section."""
    return re.sub(r"\]\(docs/", "](../", (ROOT / name).read_text())
