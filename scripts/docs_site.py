# SPDX-License-Identifier: Apache-2.0
"""MkDocs hook that adds files of the repository to which pages link.

Pages in docs/ link to results, sources and files at the top of the repository, which have links of
their own. Every file that can be reached from docs/ is added to the site at its path in the
repository (docs/ is the site's root), and relative links are rewritten. A link to a missing file is
kept, so that MkDocs reports it.

A comment "README: NAME" in a page becomes the README's part between the comments "NAME" and
"/NAME", and "README: commands" its first block. In tables, long code may break between the parts
of a path, other code not at all.
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
_README_PART = re.compile(r"<!-- README: (.+?) -->")
_TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
_LONG_CODE = re.compile(r"<code>([^<]{40,})</code>")


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


def readme_part(name: str) -> str:
    """Returns a part of the README; an error names one that it does not have."""
    text = (ROOT / README).read_text()
    start, end = (
        ("```\n", "\n```") if name == "commands" else (f"<!-- {name} -->", f"<!-- /{name} -->")
    )
    part = re.search(f"{re.escape(start)}(.*?){re.escape(end)}", text, re.DOTALL)
    if part is None:
        raise ValueError(f"{README} has no part {name!r}")
    return part[0] if name == "commands" else part[1]


def relinked(text: str, path: str, source: str) -> str:
    """Returns text of the repository's file `path` with links as the site's page `source` needs
    them."""
    folder = posixpath.dirname(path)

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if "://" in match[2] or not (ROOT / target).is_file():
            return match[0]
        link = posixpath.relpath(site_path(target), posixpath.dirname(source) or ".")
        return f"{match[1]}{link}{match[3]}"

    return _LINK.sub(rewritten, text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between files of the repository, and fills in parts of the README."""
    source = page.file.src_uri
    text = relinked(markdown, repository_path(source), source)
    return _README_PART.sub(lambda part: relinked(readme_part(part[1]), README, source), text)


def on_page_content(html: str, **_: Any) -> str:
    """Lets long code in tables break after the slashes and colons of a path."""

    def breakable(code: re.Match[str]) -> str:
        parts = re.sub(r"(/|::|, )", r"\1<wbr>", code[1])
        return f'<code class="long">{parts}</code>'

    return _TABLE.sub(lambda table: _LONG_CODE.sub(breakable, table[0]), html)
