"""Hooks of the documentation site: navigation from docs/README.md, pages of the root, llms.txt."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
INDEX = "README.md"
FROM_ROOT = {"CONTRIBUTING.md": "contributing/guide.md", "CHANGELOG.md": "contributing/changelog.md"}
"""Files beside docs/ that are pages of the site, with their places there."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ROW = re.compile(r"^- \[(.+?)\]\(([\w/-]+\.md)\): (.*)$", re.MULTILINE)


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """Section -> title, page and description of each of its pages, as the start page lists them."""
    text = (ROOT / "docs" / INDEX).read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    found = {title: ROW.findall(body) for title, body in zip(parts[::2], parts[1::2], strict=True)}
    extra = (("Guide for contributors", "CONTRIBUTING.md"), ("Changelog", "CHANGELOG.md"))
    found["Contributing"] += [(title, FROM_ROOT[name], "") for title, name in extra]
    return found


def on_config(config: Any) -> None:
    """Take the navigation from the start page: one list of pages for both."""
    pages = [{name: [{title: page} for title, page, _ in rows]} for name, rows in sections().items()]
    config.nav = [{"Home": INDEX}, *pages]


def on_files(files: Files, config: Any) -> None:
    """Add the pages that lie beside docs/."""
    for name, place in FROM_ROOT.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to files beside docs/ to their pages; a link to any other file becomes its text."""
    place = page.file.src_uri
    own = next((f"../{name}" for name, target in FROM_ROOT.items() if target == place), place)
    return LINK.sub(lambda found: _moved(found, own, place), markdown)


def _moved(link: re.Match[str], own: str, place: str) -> str:
    mark, text, target = link.groups()
    name, hash_, anchor = target.partition("#")
    if not name or re.match(r"\w+:", target):
        return link[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(own), name))
    if path.startswith("../"):
        outside = path.removeprefix("../")
        inside = outside.removeprefix("docs/") if outside.startswith("docs/") else FROM_ROOT.get(outside)
        if inside is None:
            return text
        path = inside
    moved = posixpath.relpath(path, posixpath.dirname(place) or ".")
    return f"{mark}[{text}]({moved}{hash_}{anchor})"


def on_post_build(config: Any) -> None:
    """Write llms.txt, an index of the pages for assistants, and llms-full.txt; let a search find "W&B"."""
    lines = ["# ptfast", "", "> Train PyTorch models from YAML configs with one command.", ""]
    whole: list[str] = []
    for name, rows in sections().items():
        if not rows:
            continue
        lines += [f"## {name}", ""]
        for title, page, description in rows:
            lines.append(f"- [{title}]({page.removesuffix('.md')}.html): {description}".removesuffix(": "))
            source = next((name for name, place in FROM_ROOT.items() if place == page), f"docs/{page}")
            whole.append(f"<!-- {page} -->\n\n{(ROOT / source).read_text(encoding='utf-8')}")
        lines.append("")
    site = Path(config.site_dir)
    index = site / "search" / "search_index.json"
    index.write_text(index.read_text(encoding="utf-8").replace("W&amp;B", "W&B"), encoding="utf-8")
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(whole), encoding="utf-8")
