# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook: files of the repository that pages link to become part of the site.

docs/ holds the pages, but they link to results, sources and files at the top of the repository,
and those link on. Every file that can be reached from docs/ joins the site at its path in the
repository (docs/ itself is the site's root), and relative links are rewritten to match. A link to a
file that does not exist stays as it is, so that MkDocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
# MkDocs takes a README for the index page of its folder, and the site's root has docs/index.md.
README, OVERVIEW = "README.md", "overview.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def site_path(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return OVERVIEW if path == README else path.removeprefix(DOCS)


def repository_path(source: str) -> str:
    """The inverse: `source` is a path in the site."""
    if source == OVERVIEW:
        return README
    in_docs = DOCS + source
    return in_docs if (ROOT / in_docs).is_file() else source


def linked_files(path: str, text: str) -> list[str]:
    """Files of the repository that the page at `path` links to; folders and addresses are not."""
    targets = [
        posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        for match in _LINK.finditer(text)
        if "://" not in match[2]
    ]
    return [target for target in targets if (ROOT / target).is_file()]


def reachable_files() -> list[str]:
    """All files that can be reached from the pages in docs/, themselves included."""
    todo = sorted(str(page.relative_to(ROOT)) for page in (ROOT / DOCS).rglob("*.md"))
    seen: dict[str, None] = {}
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen[path] = None
        if path.endswith(".md"):
            todo += linked_files(path, (ROOT / path).read_text())
    return sorted(seen)


def on_files(files: Any, config: Any) -> Any:
    """Adds what lies outside docs/."""
    from mkdocs.structure.files import File

    for path in reachable_files():
        if not path.startswith(DOCS):
            source = str(ROOT / path)
            files.append(File.generated(config, site_path(path), abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between repository files to links between their places in the site."""
    source = page.file.src_uri
    folder = posixpath.dirname(repository_path(source))

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if "://" in match[2] or not (ROOT / target).is_file():
            return match[0]
        link = posixpath.relpath(site_path(target), posixpath.dirname(source) or ".")
        return f"{match[1]}{link}{match[3]}"

    return _LINK.sub(rewritten, markdown)
