"""The page and the notebooks on ptfast in Python run as they stand."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import IMPORT_PATHS, ROOT
from shown import fences

from ptfast.report.terminal.display import build_display, say
from ptfast.report.terminal.notebook_display import MOST_ROWS, NotebookDisplay

NOTEBOOKS = sorted((ROOT / "docs/start/notebooks").glob("*.ipynb"))


def test_the_page_runs_from_top_to_bottom(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for code in fences("docs/reference/python.md", "python"):
        if "import pandas" in code and find_spec("pandas") is None:
            continue
        exec(compile(code, "python.md", "exec"), names)
    assert "C002 optimizer.lrr Did you mean optimizer.lr?" in capsys.readouterr().out
    assert len(names["records"]) == len(names["logits"]) == 5
    assert names["result"].best["accuracy"] > 0.8


def test_the_table_of_a_long_run_keeps_the_newest_and_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    screen = SimpleNamespace(display=lambda content, **_: shown.append(content) or screen)
    screen.update = lambda content, **_: shown.append(content)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", screen)
    display = NotebookDisplay(sys.stdout)
    display.start(0, 40, 1)
    for step in range(1, 41):
        display.evaluation(step, step, "val", {"loss": 1.0}, is_best=step in (3, 7))
    display.close()
    last = shown[-1]["text/html"]
    assert last.count("<tr>") == MOST_ROWS + 1
    assert "<th>step</th>" in last
    assert [step for step in range(1, 41) if f"<tr><td>{step}</td>" in last] == [7, *range(30, 41)]


def test_a_notebook_shows_no_remark_in_red(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say("best by val accuracy", sys.stderr)
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    )
    say("best by val loss", sys.stderr)
    assert capsys.readouterr() == ("best by val loss\n", "best by val accuracy\n")


def test_notebooks_are_kept_without_their_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for notebook in NOTEBOOKS:
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        assert len(cells) <= 10
        assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ipykernel", "nbclient", "pandas"):
        pytest.importorskip(module, reason="the extra notebook is not installed")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", IMPORT_PATHS[0])
    read = nbformat.read(notebook, as_version=4)
    NotebookClient(read, timeout=300, resources={"metadata": {"path": str(in_tmp)}}).execute()
    outputs = [output for cell in read.cells for output in cell.get("outputs", ())]
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("<progress" in page and "<table>" in page for page in pages), "progress is updated in place"
    assert sum("<progress" in page for page in pages) <= 3, "one output for each run"
    printed = "".join(output.get("text", "") for output in outputs)
    assert "warning" not in printed
    assert "step 1/" not in printed, "no line of the terminal's"


def test_progress_in_a_notebook_is_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []
    made: list[Any] = []

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        shown.append(content)
        made.append(SimpleNamespace(update=lambda content, raw: shown.append(content)))
        return made[-1]

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=None))
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    found = build_display()
    assert isinstance(found, NotebookDisplay)
    found.start(0, 10, 5)
    for step in range(1, 11):
        found.progress(step, step / 5, {"loss": 1 / step})
        if step % 5 == 0:
            found.evaluation(step, step / 5, "val", {"loss": 0.5, "accuracy": step / 10}, step == 10)
    found.close()
    assert len(made) == 1
    assert len(shown) < 10, "it is drawn twice a second at most, and for evaluations"
    last = shown[-1]
    assert '<progress value="1.0000"' in last["text/html"]
    assert "step 10/10" in last["text/plain"]
    assert last["text/html"].count("<tr>") == 3
    assert "100.00%" in last["text/plain"]
    found.start(0, 4)
    found.progress(1, 0.0, {"loss": 1.0})
    found.close()
    assert len(made) == 2, "another run has an output of its own"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not isinstance(build_display(), NotebookDisplay)
