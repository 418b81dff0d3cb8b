"""The committed description of the REST API: `python -m tools.docs.openapi` writes it."""

import json
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "docs" / "reference" / "openapi.json"


def describe() -> dict[str, Any]:
    """Return the description that the service serves at /openapi.json."""
    from service.app import create_app  # noqa: PLC0415 - the site is built from the file, without the service's parts
    from service.config.settings import Settings  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as home:
        document: dict[str, Any] = create_app(Settings(home=Path(home))).openapi()
    return document


def text(document: dict[str, Any]) -> str:
    """Return the text of the file."""
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(describe()))
