"""The documentation site builds offline and strict, and lists every page for people and for assistants."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("material", reason="the extra docs")


SEARCHED = {
    "W&B": "how-to/operate/trackers",
    "multi-GPU": "how-to/operate/several-gpus",
    "OOM": "how-to/operate/out-of-memory",
    "early stopping": "how-to/operate/saving",
    "mixed precision": "speed/start-here",
    "batch size": "speed/find",
    "hyperparameter": "how-to/operate/sweeps",
    "transfer learning": "how-to/models/fine-tune",
    "num_workers": "how-to/data/loaders",
}
"""Words that users type, and the page that answers them."""


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def test_the_site_builds_without_a_warning_and_without_the_network(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    html = {
        page: tmp_path / ("index.html" if page.name == "README.md" else f"{page.stem}.html") for page in pages
    }
    texts = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert len(list(tmp_path.rglob("*.html"))) > len(html)  # the changelog and others come from the root
    loaded = re.findall(r'<(?:script|img|iframe)[^>]*src="(\w+:)?//|<link[^>]*href="https?:', texts)
    assert loaded == [], "loads something from the network"
    listed = (tmp_path / "llms.txt").read_text()
    for page in pages - {Path("README.md")}:
        assert f"({page.with_suffix('.html')})" in listed, page
    assert "optimizer.freeze_backbone" in (tmp_path / "llms-full.txt").read_text()
    index = json.loads((tmp_path / "search/search_index.json").read_text())["docs"]
    for words, page in SEARCHED.items():
        found = [part for part in index if words.lower() in f"{part['title']} {part['text']}".lower()]
        assert any(part["location"].startswith(f"{page}.html") for part in found), words


def test_mistakes_fail_the_build_and_are_named(tmp_path: Path) -> None:
    for each in ("docs", "scripts"):
        shutil.copytree(ROOT / each, tmp_path / each, ignore=shutil.ignore_patterns("__pycache__"))
    for each in ("mkdocs.yml", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / each, tmp_path / each)
    with (tmp_path / "docs/help/faq.md").open("a") as page:
        page.write("\n[x](../reference/errors.md#nowhere)\n[x](nowhere.md)\n")
    (tmp_path / "docs/help/unlisted.md").write_text("# A page that the start page does not list\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert done.stderr.count("WARNING -") == 3, done.stderr
    for warning in ("does not contain an anchor", "not found", "unlisted.md"):
        assert warning in done.stderr
