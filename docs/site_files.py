"""Which files the site has: the documents at their places in the repository, so that links between them hold in both.

MkDocs takes one folder of documents, and the README, the changelog and the tables of the benchmarks are outside of it.
Files that pages link to and that are no documents, such as examples, are copied as they are.
"""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PATTERNS = (
    "*.md",
    "docs/*.md",
    "docs/*.css",
    "docs/*.svg",
    "benchmarks/*.md",
    "benchmarks/*.py",
    "benchmarks/results/*.md",
    "benchmarks/results/*.png",
    "examples/*.py",
    "examples/*.png",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted(path.relative_to(ROOT).as_posix() for pattern in PATTERNS for path in ROOT.glob(pattern))
    return Files([*theme, *(File(path, str(ROOT), config.site_dir, config.use_directory_urls) for path in paths)])
