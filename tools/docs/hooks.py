"""MkDocs hooks: add the generated pages to the site."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# MkDocs loads this file by its path.
sys.path.insert(0, str(ROOT))

from tools.docs.pages import generate  # noqa: E402


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one file per generated page."""
    for path, text in generate().items():
        files.append(File.generated(config, path, content=text))
    return files
