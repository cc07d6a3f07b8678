# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook that adds files of the repository to which pages link.

Pages in docs/ link to results, sources and files at the top of the repository, which have links of
their own. Every file that can be reached from docs/ is added to the site at its path in the
repository (docs/ is the site's root), and relative links are rewritten. A link to a missing file is
kept, so that MkDocs reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
# MkDocs makes a README the index page of its folder, but the site's root has docs/index.md.
README, OVERVIEW = "README.md", "overview.md"
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def site_path(path: str) -> str:
    """Returns the path of a repository's file in the site."""
    return OVERVIEW if path == README else path.removeprefix(DOCS)


def repository_path(source: str) -> str:
    """Returns the path in the repository of a path in the site."""
    if source == OVERVIEW:
        return README
    in_docs = DOCS + source
    return in_docs if (ROOT / in_docs).is_file() else source


def linked_files(path: str, text: str) -> list[str]:
    """Returns the files of the repository to which the page at `path` links."""
    targets = [
        posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        for match in _LINK.finditer(text)
        if "://" not in match[2]
    ]
    return [target for target in targets if (ROOT / target).is_file()]


def reachable_files() -> list[str]:
    """Returns the pages in docs/ and all files that can be reached from them."""
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
    """Adds the files outside docs/."""
    from mkdocs.structure.files import File

    for path in reachable_files():
        if not path.startswith(DOCS):
            source = str(ROOT / path)
            files.append(File.generated(config, site_path(path), abs_src_path=source))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between files of the repository to links between their paths in the site."""
    source = page.file.src_uri
    folder = posixpath.dirname(repository_path(source))

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if "://" in match[2] or not (ROOT / target).is_file():
            return match[0]
        link = posixpath.relpath(site_path(target), posixpath.dirname(source) or ".")
        return f"{match[1]}{link}{match[3]}"

    return _LINK.sub(rewritten, markdown)
