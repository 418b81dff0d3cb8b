"""MkDocs hooks: add the pages of the repository's root to the site, and warn of assets that are not local."""

import logging
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# MkDocs loads this file by its path.
sys.path.insert(0, str(ROOT))

from tools.docs.markdown import separate_blocks  # noqa: E402

# A warning of this logger fails a strict build.
log = logging.getLogger("mkdocs.hooks.docs")
ROOT_PAGES = {"CONTRIBUTING.md": "contribute/index.md", "CHANGELOG.md": "contribute/changelog.md"}
"""Pages of the site that are files at the root of the repository."""
_REMOTE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]+"')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository's root, with links into `docs/` made relative to a section."""
    for name, path in ROOT_PAGES.items():
        text = (ROOT / name).read_text().replace("](docs/", "](../")
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page in the form that Python-Markdown expects, with links to files of the root made links to pages."""
    for name, path in ROOT_PAGES.items():
        markdown = re.sub(rf"\]\(((?:\.\./)*)\.\./{re.escape(name)}", rf"](\1{path}", markdown)
    return separate_blocks(markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of scripts, styles and images that a browser would load from another host."""
    for found in _REMOTE.findall(output):
        log.warning("%s loads a remote asset: %s", page.file.src_path, found)
    return output
