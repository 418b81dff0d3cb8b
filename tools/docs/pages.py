"""`python -m tools.docs.pages`: writes the generated pages of `docs/reference/`, or checks that they are up to date."""

import argparse
import sys
from pathlib import Path

from tools.docs import cli, devices, errors, events, gpus, metrics, models, names, rest, sdk, settings, spec

DOCS = Path(__file__).parents[2] / "docs"


def generate() -> dict[str, str]:
    """Return the Markdown of each generated page, by its path below `docs/`."""
    return {
        "reference/cli.md": cli.page(),
        "reference/devices.md": devices.page(),
        "reference/errors.md": errors.page(),
        "reference/events.md": events.page(),
        "reference/gpus.md": gpus.page(),
        "reference/metrics.md": metrics.page(),
        "reference/models.md": models.page(),
        "reference/names.md": names.page(),
        "reference/rest-api.md": rest.page(),
        "reference/sdk.md": sdk.page(),
        "reference/settings.md": settings.page(),
        "reference/spec.md": spec.page(),
    }


def main() -> None:
    """Write the pages, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    pages = {DOCS / path: text for path, text in generate().items()}
    stale = [file for file, text in pages.items() if not file.exists() or file.read_text() != text]
    if check and stale:
        sys.exit(f"out of date: {', '.join(file.name for file in stale)} in docs/reference; run `make reference`")
    for file in stale:
        file.write_text(pages[file])


if __name__ == "__main__":
    main()
