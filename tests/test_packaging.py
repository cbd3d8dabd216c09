"""Built packages hold all that a run needs: a wheel, one by way of the sdist, and an editable install."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import ptfast

pytest.importorskip("hatchling", reason="builds packages; hatchling comes with the test extra")

ROOT = Path(__file__).resolve().parent.parent
SHIPPED_AS = {"conf": "ptfast/_conf", "recipes": "ptfast/_recipes", "ptfast": "ptfast"}


def build(kind: str, source: Path, out: Path) -> Path:
    """Build an `sdist`, a `wheel` or an editable install's wheel (`wheel:editable`) from `source`."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def files_of_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as wheel:
        return {name for name in wheel.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_the_package_the_options_and_the_recipes(wheel: Path) -> None:
    expected = {
        f"{shipped}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, shipped in SHIPPED_AS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected
    assert files_of_wheel(wheel) == expected


def test_the_metadata_says_what_the_tree_says(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    citation = (ROOT / "CITATION.cff").read_text()
    assert metadata["Version"] == ptfast.__version__
    assert f"version: {ptfast.__version__}\n" in citation
    assert f"\n## [{ptfast.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert "ptfast/py.typed" in files_of_wheel(wheel)
    links = dict(link.split(", ") for link in metadata.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= {*links}
    home = links["Homepage"]
    assert f"repository-code: {home}\n" in citation
    assert f"git clone {home}.git" in (ROOT / "README.md").read_text()


def test_extras_are_those_of_the_install_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        extras = email.message_from_bytes(archive.read(name)).get_all("Provides-Extra", [])
    section = (ROOT / "docs/start/install.md").read_text().split("## Extras")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(extras)


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as sdist:
        sdist.extractall(tmp_path / "tree", filter="data")
    (tree,) = (tmp_path / "tree").iterdir()
    assert files_of_wheel(build("wheel", tree, tmp_path / "wheel")) == files_of_wheel(wheel)


def test_an_editable_install_only_points_at_the_tree(tmp_path: Path) -> None:
    built = build("wheel:editable", ROOT, tmp_path)
    (pth,) = files_of_wheel(built)
    with zipfile.ZipFile(built) as wheel:
        assert wheel.read(pth).decode().strip() == str(ROOT)


def test_the_wheel_works_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """The unpacked wheel, away from the tree, finds its options and recipes."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ptfast", "recipes"],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "resnet_digits" in done.stdout
