"""Hooks of mkdocs: the changelog as a page, and each page's Markdown beside its HTML, for llms.txt."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    """Add CHANGELOG.md, whose links are those of the repository's root."""
    text = (Path(config.config_file_path).parent / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "changelog.md", content=text.replace("](docs/", "](")))
    return files


def on_post_build(config: Any) -> None:
    """Copy the sources of all pages into the site."""
    docs, site = Path(config.docs_dir), Path(config.site_dir)
    for page in docs.rglob("*.md"):
        shutil.copyfile(page, site / page.relative_to(docs))
