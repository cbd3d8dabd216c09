"""`ptfast audit`: each planted defect is found in its place, and nothing else is."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import planted
import pytest
import torch
from toys import callback

from ptfast.cli import command_line
from ptfast.config.read import read_config
from ptfast.measure.audit import audit_context as examination
from ptfast.measure.audit import audit_run, step_checks
from ptfast.measure.audit.audit_context import AuditContext, Finding, Price, audit_context
from ptfast.measure.audit.audit_run import CHECKS
from ptfast.report.terminal.display import Display

NET = ("model=custom", "model._target_=planted.Net")
POINTS = ("data=custom", "data._target_=planted.Points")
PLAIN = ("batch_size=16", "dataloader=plain", "dataloader.pin=auto")


def changed(context: AuditContext, **facts: Any) -> AuditContext:
    """The same, but for some of its attributes."""
    other = copy.copy(context)
    vars(other).update(facts)
    return other


def findings(tmp_path: Path, *words: str, waiting: float = 0.0, **facts: Any) -> list[Finding]:
    """What an audit finds in a run of `words`, the machine left out."""
    chosen = {word.partition("=")[0]: word for word in (*NET, *POINTS, *PLAIN, *words)}
    config = read_config([*chosen.values()])[1]
    with audit_context(config, tmp_path, Display()) as context:
        context = changed(context, waiting=waiting, **facts)
        return [finding for check in CHECKS[:3] for finding in check(context)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(examination, "STEPS_S", 0.0)
    monkeypatch.setattr(step_checks, "spare_cores", lambda: 1)
    yield
    torch.autograd.set_detect_anomaly(False)


MODELS = {
    "bias": ("bias before a norm", "first"),
    "rms": ("hand-written rms norm", "norm"),
    "attention": ("hand-written attention", "line"),
    "gelu": ("hand-written gelu", "line"),
    "gelu_tanh": ("hand-written gelu", "line"),
    "parallel": ("data parallel", "inner"),
    "unused": ("unused parameters", "spare.weight, spare.bias"),
    "float64": ("float64", "line"),
    "item": ("reads on the host", "line"),
    "cpu": ("reads on the host", "line"),
    "branch": ("reads on the host", "line"),
    "nonzero": ("reads on the host", "line"),
    "mask": ("reads on the host", "line"),
    "print": ("reads on the host", "line"),
    "made": ("tensors made on the host", "line"),
    "anomaly": ("debugging left on", "your code"),
    "evaluation": ("gradients in evaluation", "line"),
}


def line_of(thing: Any) -> str:
    """The place of the first line of a function or class that is marked as planted."""
    lines, first = inspect.getsourcelines(thing)
    return f"planted.py:{first + next(n for n, line in enumerate(lines) if '# planted' in line)}"


@pytest.mark.parametrize("defect", MODELS)
def test_a_defect_of_a_model_is_found_in_its_place(tmp_path: Path, defect: str) -> None:
    check, where = MODELS[defect]
    found = findings(tmp_path, f"model.defect={defect}")
    place = line_of(getattr(planted.Net, f"_{defect}")) if where == "line" else where
    assert places(found) == [(check, place)]


def places(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.where.rpartition("/")[2]) for finding in found]


RAGGED = ("data._target_=planted.Ragged", "model._target_=planted.Sums")
TEXT = ("model._target_=planted.Sums",)
DATA = {
    "copy": (("data.defect=copy",), "arrays copied", planted.Points.copied),
    "single": (("data.defect=single",), "work on single samples", planted.Points.changed),
    "transforms": (
        ("data._target_=planted.Augmented",),
        "work on single samples",
        planted.Augmented.__getitem__,
    ),
    "decoding": (
        ("data._target_=planted.Pictures",),
        "decoding in every epoch",
        planted.Pictures.__getitem__,
    ),
    "scale": (("data.defect=scale",), "inputs not normalized", planted.Points),
    "padded": (("data._target_=planted.Padded", *TEXT), "padding", planted.Padded.__getitem__),
    "ragged": (("data._target_=planted.Ragged", *TEXT), "padding", "batching"),
}


@pytest.mark.parametrize("defect", DATA)
def test_a_defect_of_the_data_is_found_in_its_place(tmp_path: Path, defect: str) -> None:
    words, check, place = DATA[defect]
    waiting = 0.5 if check in ("work on single samples", "decoding in every epoch") else 0.0
    found = findings(tmp_path, *words, waiting=waiting)
    wanted = place if isinstance(place, str) else line_of(place)
    assert (check, wanted) in places(found)
    assert {finding.check for finding in found} == {check}


def test_slow_samples_want_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_checks, "spare_cores", lambda: 4)
    monkeypatch.setattr(step_checks, "HAND_OVER_S", 0.0)
    (found,) = findings(tmp_path, waiting=0.5)
    assert (found.check, found.overrides) == ("no workers", ("dataloader=workers",))
    assert found.where.startswith("tests/support/planted.py:")


OWN_CODE = {
    "callback": ((callback("Reading").replace("toys", "planted"),), planted.Reading.on_step),
    "task": (("task=planted.Reads",), planted.Reads.loss),
}


@pytest.mark.parametrize("part", OWN_CODE)
def test_a_read_in_a_callback_or_task_is_found_in_its_place(tmp_path: Path, part: str) -> None:
    words, where = OWN_CODE[part]
    (found,) = findings(tmp_path, *words)
    assert places([found]) == [("reads on the host", line_of(where))]
    assert (found.price.seconds if found.price else 0) > 0


CUDA = {
    "widths unsuited to tensor cores": (("model.defect=width", "precision=bf16"), "first, last"),
    "memory not pinned": (("dataloader.pin=false",), "dataloader.pin"),
}


@pytest.mark.parametrize("check", CUDA)
def test_what_matters_on_a_gpu_alone_is_found_there_alone(tmp_path: Path, check: str) -> None:
    words, where = CUDA[check]
    assert findings(tmp_path, *words) == []
    found = findings(tmp_path, *words, device_type="cuda")
    assert places(found) == [(check, where)]


def test_nothing_is_found_where_nothing_is_planted(tmp_path: Path) -> None:
    assert findings(tmp_path, "model.defect=clean") == []


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AuditContext]:
    """A run without a defect, for checks of the machine to be tried on."""
    config = read_config([*NET, *POINTS, *PLAIN])[1]
    with (
        pytest.MonkeyPatch.context() as patch,
        audit_context(config, tmp_path_factory.mktemp("run"), Display()) as it,
    ):
        patch.setattr(examination, "STEPS_S", 0.0)
        yield it


def machine(context: AuditContext) -> list[str]:
    return [finding.check for finding in step_checks.check_machine(context)]


def test_what_a_machine_lacks_is_found(context: AuditContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_checks, "usable_cores", lambda hyperthreads=False: torch.get_num_threads())
    monkeypatch.setattr(step_checks.devices, "check_precision", lambda mode, device: None)
    assert machine(context) == []
    with monkeypatch.context() as patch:
        patch.setattr(step_checks, "usable_cores", lambda hyperthreads=False: 4 * torch.get_num_threads())
        assert machine(context) == ["threads not matching cores"]
    assert machine(changed(context, device_type="cuda")) == ["tf32 off"]


def test_overrides_are_measured_and_written(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def priced(findings: list[Finding], *others: Any) -> dict[str, Any]:
        for found in findings:
            found.price = Price(0.002, 0.001, 0.003, "faster")
        return {"budget_s": others[1], "comparisons": []}

    monkeypatch.setattr(audit_run, "price_by_override", priced)
    file = in_tmp / "mended.yaml"
    words = ["batching=none", *NET, *POINTS, "batch_size=16", "dataloader=plain"]
    words = [*{word.partition("=")[0]: word for word in [*words, *RAGGED]}.values()]
    assert command_line.run(["audit", *words, f"--fix={file}", "--strict", "--out=results"]) == 8
    record = json.loads(Path("results/measure.json").read_text())
    assert record["budget_s"] == 120
    prices_of = {found["check"]: found["price"] for found in record["findings"]}
    assert prices_of["padding"]["verdict"] == "faster"
    shown = capsys.readouterr().out
    assert "padding" in shown
    assert "2 ms a step [1 to 3]" in shown
    assert read_config([f"recipe={file}"])[1].batching.padding == "longest"


def test_an_interrupted_audit_shows_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(audit_run, "price_by_override", interrupted)
    words = ["batching=none", *NET, *POINTS, "batch_size=16", "dataloader=plain"]
    words = [*{word.partition("=")[0]: word for word in [*words, *RAGGED]}.values()]
    assert command_line.run(["audit", *words]) == 130
    shown = capsys.readouterr().out
    assert "padding" in shown
    assert "interrupted" in shown


def test_a_model_that_cannot_be_traced_is_audited_without(
    in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.run(["audit", *NET, *POINTS, *PLAIN, "model.defect=untraced", "--budget=0"]) == 0
    assert "could not be traced: RuntimeError: not under a mode" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_break_of_the_compiled_graph_is_found(tmp_path: Path) -> None:
    found = findings(tmp_path, "model.defect=broken", "compile=model")
    assert places(found) == [("graph breaks", "compile")]
    assert findings(tmp_path, "model.defect=", "compile=model") == []
