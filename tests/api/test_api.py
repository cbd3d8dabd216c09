"""`ptfast.train` and the others: as the commands, with objects of the program, and leaving it as it was."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_parts import Net, Points, Watch
from conftest import ROOT
from running import same_bits, summary, training_state, weights
from running import train as train_command

import ptfast
from ptfast.cli.command_line import run as command
from ptfast.config.compose import compose
from ptfast.config.python_words import PythonWords
from ptfast.core.errors import ConfigError, DataError, MachineError, PtfastError
from ptfast.core.sections import given
from ptfast.core.sections.given import give

DIGITS = ("model=mlp", "model.hidden=[16]", "epochs=null", "steps=6", "batch_size=32")
POINTS: dict[str, Any] = {"batch_size": 10, "optimizer": {"lr": 0.05}}
"""The config of runs on `Points`."""


@pytest.fixture(autouse=True)
def _in_tmp(in_tmp: Path) -> None:
    """Runs lie in a folder of the test."""


def train_points(**keys: Any) -> ptfast.Result:
    # A net draws its weights from torch's generator.
    given = {} if "model" in keys else {"model": Net()}
    return ptfast.train(**{**given, "data": Points(), "steps": 4, **POINTS, **keys})


def rejected(**keys: Any) -> PtfastError:
    with pytest.raises(PtfastError) as caught:
        train_points(**keys)
    return caught.value


# The same as the command.


def test_importing_ptfast_loads_nothing_heavy() -> None:
    code = (
        "import sys, ptfast; assert not {'torch', 'numpy', 'hydra', 'pydantic'} & {*sys.modules}; dir(ptfast)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        getattr(ptfast, "trian")  # noqa: B009


def test_a_run_has_the_bits_and_the_files_of_the_command() -> None:
    assert train_command("recipe=resnet_digits", *DIGITS, "optimizer.lr=0.02", "run.dir=theirs") == 0
    keys: dict[str, Any] = {"steps": 6, "optimizer": {"lr": 0.02}, "run": {"dir": "ours"}}
    result = ptfast.train("resnet_digits", *DIGITS[:3], "batch_size=32", **keys)
    assert result.path == Path("ours")
    assert same_bits(weights(Path("ours")), weights(Path("theirs")))
    assert same_bits(training_state(Path("ours")), training_state(Path("theirs")))
    hidden = {".lock"}
    assert {x.name for x in Path("ours").iterdir()} - hidden == {
        x.name for x in Path("theirs").iterdir()
    } - hidden
    texts = [Path(name, "config.yaml").read_text() for name in ("ours", "theirs")]
    assert texts[0] == texts[1]


def test_an_error_is_that_of_the_command_and_names_the_function() -> None:
    with pytest.raises(ConfigError) as caught:
        ptfast.train("resnet_digits", "optimizer.lrr=0.1", epochs=0)
    error = caught.value
    assert (error.code, error.key, error.hint) == ("C002", "optimizer.lrr", "Did you mean optimizer.lr?")
    assert str(error) == "optimizer.lrr=0.1 (ptfast.train): unknown key. Did you mean optimizer.lr?"
    notes = getattr(error, "__notes__", [""])
    assert sys.version_info < (3, 11) or "epochs" in notes[0]
    assert not Path("runs").exists()


def test_a_result_shows_what_the_run_was(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    result = ptfast.train("resnet_digits", *DIGITS)
    facts = summary(result.path)
    assert (result.status, result.best, result.summary) == ("finished", facts["best"], facts)
    frame = result.metrics
    assert {"step", "split", "loss"} <= {*frame.columns}
    assert frame[frame.split == "val"].accuracy.iloc[-1] == facts["val"]["accuracy"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = result.metrics
    assert len(rows) == len(frame)
    assert isinstance(rows, list)
    shown = result._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert "Curves" in shown
    assert "<script" not in shown.partition(">")[2], "the page is quoted"
    (result.path / "report.html").unlink()
    assert "finished" in result._repr_html_()
    assert repr(result).startswith(f"<ptfast run {result.path}: finished, best step 6, loss ")


@pytest.mark.parametrize(
    "value",
    ["a b", "it's", "x,y", "null", "true", "1", "a=b", "über", "[1]", "5%", "/a/b c.npz", "{a: 1}"],
)
def test_a_text_of_python_stays_that_text(value: str) -> None:
    words = PythonWords()
    words.add("vars", {"text": value, "list": [value, 1, None, 2.5, True], "float": 1e-5})
    composed = compose(["recipe=resnet_digits", *words.words], complete=False)
    assert composed.tree["vars"] == {
        "text": value,
        "list": [value, 1, None, 2.5, True],
        "float": 1e-5,
    }


# Objects of the program.


def test_a_module_and_a_dataset_are_trained_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    net, watch = Net(), Watch()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    result = train_points(model=net, callbacks=[watch], eval={"every": "2steps"})
    assert watch.seen == [2, 4]
    assert same_bits(net.state_dict(), before), "a copy is trained"
    told = capsys.readouterr().out
    assert told.count("handed over in Python") == 1
    model = result.model("last")
    assert type(model) is Net
    assert not model.training
    assert same_bits(dict(model.state_dict()), weights(result.path))
    again = train_points(model=net, callbacks=[Watch()], eval={"every": "2steps"})
    assert same_bits(weights(again.path), weights(result.path))


def test_classes_and_functions_have_paths_of_their_own() -> None:
    def dataset(size: int = 20) -> Points:
        return Points(size)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets)

    model = {"_target_": Net, "width": 4}
    result = train_points(model=model, data={"_target_": dataset, "size": 30}, task={"loss": loss})
    text = (result.path / "config.yaml").read_text()
    assert "_target_: api_parts.Net\n" in text, "any process can import it"
    assert re.search(r"_target_: ptfast\.given\.dataset_\w{8}\n", text)
    assert result.model().layers[0].out_features == 4


def test_held_out_datasets_may_come_beside_that_of_training() -> None:
    train, val, test = Points(40), Points(20), Points(10)
    result = train_points(data=(train, val, test))
    assert {"val", "test"} <= result.summary.keys()
    assert not hasattr(train, "val"), "the dataset itself stays as it was"
    assert set(ptfast.evaluate(result)) == {"val", "test"}


def test_a_run_on_objects_is_continued_with_the_same_ones() -> None:
    keys = {"schedule": "constant", "saving": {"every": "2steps"}}
    net = Net()
    whole = train_points(model=net, steps=8, **keys)
    run = {"dir": "r", "resume": "auto"}
    train_points(model=net, steps=4, run=run, **keys)
    extended = train_points(model=net, steps=8, run=run, **keys)
    assert same_bits(weights(extended.path), weights(whole.path))

    class Changed(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(-inputs)

    for other in (Net(width=9), Changed()):
        error = rejected(model=other, steps=9, run=run, **keys)
        assert error.code == "S003"
        assert "model._target_" in str(error)


def test_objects_of_one_kind_are_told_apart() -> None:
    first, second = Watch(), Watch()
    one, other = Points(), Points()
    result = train_points(data=one, callbacks=[first, second])
    assert first.seen == second.seen == [4]
    train_points(data=other)
    words = give(Net(), "model"), give(Net(), "model"), give(Net(9), "model")
    assert words[0][0] == words[1][0] != words[2][0]
    # The dataset of the second run has the name that the first one's had; the result knows its own.
    ptfast.evaluate(result)
    assert given._targets[next(name for name in given._targets if "Points" in name)]() is one


def test_other_processes_are_told_how_to_use_such_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    net, data = Net(), Points()
    result = train_points(model=net, data=data, callbacks=[Watch()])
    folder, metrics = result.path, ptfast.evaluate(result)
    del result
    gc.collect()
    with pytest.raises(ConfigError, match=r"not in this process\. Run the script again"):
        ptfast.evaluate(folder)
    capsys.readouterr()
    assert command(["eval", str(folder)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"error\[C009\]: ptfast\.given\.Net_\w+: handed to ptfast in Python", line)
    assert ptfast.evaluate(folder, model=net, data=data) == metrics
    # A model needs no data to predict.
    model = ptfast.load(folder, model=net)
    assert ptfast.predict(model, np.full((1, 3), 0.1))[0]["class"] in "01"
    with pytest.raises(ConfigError, match="the dataset: handed to ptfast in Python"):
        ptfast.evaluate(folder, model=net)


def test_a_run_on_importable_classes_needs_nothing_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    result = train_points(model=Net, data=Points)
    assert "handed over" not in capsys.readouterr().out
    assert command(["eval", str(result.path)]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == result.best["loss"]


def test_what_cannot_be_meant_is_rejected_in_one_line() -> None:
    error = rejected(data=lambda: Points())
    assert (error.code, error.key) == ("C009", "data")
    assert (
        str(error)
        == "data=lambda: a lambda has no name that the run's config could keep. Write def NAME(...) instead."
    )
    for keys, code, what in (
        ({"data": Net()}, "C009", "is not a dataset"),
        ({"model": Points()}, "C009", "is not a torch.nn.Module"),
        ({"data": [1, 2]}, "C009", "not a dataset"),
        ({"parallel": "ddp"}, "C011", "the ranks are other processes, where ptfast.given.Net_"),
        (
            {"parallel": {"nnodes": 2, "strategy": "ddp"}},
            "C011",
            "a Python program trains on its own machine",
        ),
    ):
        error = rejected(**keys)
        assert error.code == code
        assert what in str(error)
        assert "\n" not in str(error)
    with pytest.raises(ConfigError, match="the runs of a sweep are other processes"):
        ptfast.sweep(model=Net(), data=Points, seed=[0, 1], steps=2, **POINTS)


def test_a_fault_of_a_handed_module_is_its_own() -> None:
    class Broken(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no layers")

    class Unbuildable(Net):
        def __init__(self) -> None:
            raise ValueError("not today")

    for model, what in (
        (Broken(), "forward raises RuntimeError"),
        (Unbuildable, "its constructor raises ValueError"),
    ):
        error = rejected(model=model)
        assert error.code == "C017"
        assert what in str(error)
        assert error.__cause__ is not None


# Trained models.


def test_predictions_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    result = ptfast.train("resnet_digits", *DIGITS, ema="ema")
    images = np.random.default_rng(0).integers(0, 16, (5, 8, 8), np.uint8)
    np.save("some.npy", images)
    Image.fromarray(images[0]).save("one.png")
    capsys.readouterr()
    assert command(["predict", str(result.path), "some.npy", "one.png"]) == 0
    wanted = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ptfast.predict(result, ["some.npy", Path("one.png")]) == wanted
    net = ptfast.load(result)
    assert ptfast.predict(net, ["some.npy", "one.png"]) == wanted
    net.train()
    records = ptfast.predict(net, images)
    assert net.training, "the module's mode is as it was"
    assert [x["input"] for x in records] == [f"[{number}]" for number in range(5)]
    assert [{**x, "input": ""} for x in records] == [{**x, "input": ""} for x in wanted[:5]]
    for same in (torch.from_numpy(images), list(images), images[..., None]):
        assert ptfast.predict(result, same) == records
    assert ptfast.predict(result, images[0])[0]["top"] == pytest.approx(records[0]["top"])
    assert ptfast.predict(result, [Image.open("one.png")])[0]["top"] == pytest.approx(wanted[5]["top"])
    with torch.no_grad():
        likeliest = net.eval()(ptfast.prepare(net, images)).softmax(-1).max(-1)
    assert likeliest.values.tolist() == [record["probability"] for record in records]
    with pytest.raises(PtfastError, match=r"has shape \[9, 9, 1\], the model takes \[8, 8, 1\]"):
        ptfast.predict(result, np.zeros((2, 9, 9), np.uint8))
    with pytest.raises(ConfigError, match=r"ptfast\.load has not given this Net"):
        ptfast.predict(Net(), images)


def test_a_text_is_predicted_for_and_a_file_is_read(in_tmp: Path) -> None:
    rows = [f"{'good' if number % 2 else 'bad'} film\t{number % 2}" for number in range(40)]
    Path("texts.tsv").write_text("\n".join(rows) + "\n")
    result = ptfast.train(
        *("data=text_tsv", "model=text_encoder"),
        steps=4,
        batch_size=8,
        **{"data.path": "texts.tsv", "model.width": 8},
    )
    Path("new.txt").write_text("a good film\na bad one\n")
    texts = ptfast.predict(result, ["a good film", "a bad one"])
    assert [record.pop("input") for record in texts] == ["a good film", "a bad one"]
    files = ptfast.predict(result, "new.txt")
    assert [record.pop("input") for record in files] == ["new.txt:1", "new.txt:2"]
    assert [x["class"] for x in texts] == [x["class"] for x in files]


def test_rows_of_a_table_are_predicted_for_from_files() -> None:
    rng = np.random.default_rng(0)
    rows = [
        f"{x:.3f},{'red' if y else 'blue'},{int(x > 0)}"
        for x, y in zip(rng.normal(size=60), rng.integers(0, 2, 60), strict=True)
    ]
    Path("rows.csv").write_text("\n".join(["x,color,y", *rows]) + "\n")
    result = ptfast.train(
        data="table", steps=4, batch_size=10, **{"data.path": "rows.csv", "data.target": "y"}
    )
    Path("new.csv").write_text("x,color\n1.5,red\n-2,blue\n")
    assert len(ptfast.predict(result, "new.csv")) == 2
    # Columns are found by their names, which an array does not have.
    with pytest.raises(
        DataError, match="a ndarray of float64 \\(1, 2\\) cannot be read here, where files are"
    ):
        ptfast.predict(result, np.zeros((1, 2)))


def without_names(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "input"} for record in records]


def test_a_data_frame_is_trained_on_as_the_file_that_pandas_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")
    monkeypatch.setenv("PTFAST_CACHE", str(Path("cache").absolute()))
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"area, m2": rng.normal(size=80) / 3, 7: rng.integers(0, 9, 80)})
    frame["city"] = pandas.Categorical(rng.choice(["Oslo", "Å"], 80))
    frame["built"] = pandas.Timestamp("2020-01-01") + pandas.to_timedelta(rng.integers(0, 900, 80), "D")
    frame["lift"] = frame[7] > 4
    frame["price"] = frame["area, m2"] * 2 + frame[7]
    frame.loc[3, ["area, m2", "city", "built"]] = None
    before, keys = frame.copy(), {"steps": 6, "batch_size": 10}
    result = ptfast.train(data=frame, target="price", **keys)
    pandas.testing.assert_frame_equal(frame, before)
    frame.to_csv("rows.csv", index=False)
    ours = ptfast.train(data="table", target="price", **{"data.path": "rows.csv"}, **keys)
    assert same_bits(weights(result.path), weights(ours.path))
    # Rows are the same from a file, a frame and dicts.
    new = frame.drop(columns="price")
    new.to_csv("new.csv", index=False)
    expected = without_names(ptfast.predict(result, "new.csv"))
    assert without_names(ptfast.predict(result, new)) == expected
    assert without_names(ptfast.predict(ptfast.load(result), new.to_dict("records")))[4:] == expected[4:]
    assert ptfast.predict(result, {"area, m2": None, "7": 1, "city": "Rome", "built": None, "lift": True})
    with pytest.raises(DataError, match=r"^inputs: has no column built"):
        ptfast.predict(result, [{"area, m2": 1.0, 7: 3}])
    assert command(["eval", str(result.path)]) == 0, "commands find the rows"


def test_held_out_rows_may_be_a_data_frame_too() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"x": np.arange(60.0), "y": ["low"] * 30 + ["high"] * 30})
    result = ptfast.train(data=(frame[::2], frame[1::2]), target="y", steps=3, batch_size=10)
    assert result.summary["val"].keys() >= {"loss", "accuracy"}
    evaluated = ptfast.evaluate(result, data=frame[:20], target="y")
    assert [*evaluated] == ["val"]
    again = ptfast.train(data=frame, target="y", run={"dir": "mine"}, steps=2, batch_size=10)
    longer = ptfast.train(
        data=frame.copy(), target="y", run={"dir": "mine", "resume": "auto"}, steps=4, batch_size=10
    )
    assert longer.path == again.path, "the same rows are the same data"


def test_a_checkpoint_is_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("eval.every=2steps", "saving.every=2steps", "saving.keep=9", "stop.metric=loss", "stop.mode=max")
    result = ptfast.train("resnet_digits", *DIGITS, *words)
    assert result.best["step"] == 2
    capsys.readouterr()
    best = ptfast.evaluate(result)["val"]
    assert capsys.readouterr().err == "ptfast: best by val loss, step 2\n"
    assert best["loss"] == result.best["loss"]
    assert ptfast.evaluate(result, checkpoint="last")["val"]["loss"] == result.summary["val"]["loss"]
    assert same_bits(dict(ptfast.load(result, "step-4").state_dict()), weights(result.path, "step-4"))
    with pytest.raises(PtfastError) as caught:
        ptfast.load(result, "step-3")
    assert str(caught.value).startswith("checkpoint=step-3 (ptfast.load): not in ")
    assert caught.value.hint == "There are: step-6, step-4, step-2"


# The process stays as it was.


def state_of_process() -> dict[str, Any]:
    """What a library may not change behind the back of a program."""
    cudnn = torch.backends.cudnn
    return {
        "threads": torch.get_num_threads(),
        "interop": torch.get_num_interop_threads(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32),
        "cudnn": (cudnn.deterministic, cudnn.benchmark, cudnn.enabled),
        "attention": torch.backends.cuda.cudnn_sdp_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "denormals": (torch.tensor(1e-40) * 1).item(),
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "streams": (sys.stdout, sys.stderr, sys.excepthook),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "wakeup": read_wakeup_fd(),
        "warnings": list(warnings.filters),
        "logging": [(x.level, list(x.handlers), x.propagate, x.disabled) for x in (logging.getLogger(),)],
        "logging raises": logging.raiseExceptions,
        "start method": multiprocessing.get_start_method(allow_none=True),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "python threads": {thread.name for thread in threading.enumerate()},
        "children": [child.pid for child in multiprocessing.active_children()],
    }


def read_wakeup_fd() -> int:
    if threading.current_thread() is not threading.main_thread():
        return -1
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def processes_started_by_this() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for file in tasks for pid in file.read_text().split()}


@pytest.fixture
def unusual() -> Iterator[None]:
    """A process whose settings are none of ptfast's."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(77)
    random.seed(77)
    np.random.seed(77)
    yield
    torch.set_num_threads(before)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def test_nothing_in_the_process_stays_changed(unusual: None) -> None:
    before, processes = state_of_process(), processes_started_by_this()
    words = ("backend=deterministic", "ema=ema", "dataloader=workers", "dataloader.workers=1", "seed=5")
    with torch.no_grad():
        result = ptfast.train("resnet_digits", *DIGITS, *words, "precision=bf16")
    assert state_of_process() == before
    ptfast.evaluate(result)
    ptfast.predict(result, np.zeros((1, 8, 8), np.uint8))
    ptfast.load(result)
    assert state_of_process() == before
    with pytest.raises(PtfastError):
        ptfast.train("resnet_digits", *DIGITS, "data.root=nowhere", "data=imagefolder")
    assert state_of_process() == before
    assert processes_started_by_this() == processes


@pytest.mark.gpu
def test_nothing_on_the_gpu_stays_changed() -> None:
    torch.cuda.manual_seed(7)
    torch.empty(1, device="cuda")

    def state() -> dict[str, Any]:
        kept = state_of_process() | {"cuda": torch.cuda.get_rng_state().tolist()}
        return {name: value for name, value in kept.items() if name != "python threads"}

    before = state()
    result = train_points(model=Net, data=Points, device="cuda")
    assert state() == before
    net = ptfast.load(result)
    assert next(net.parameters()).is_cuda
    assert len(ptfast.predict(net, np.zeros((2, 3)))) == 2
    assert len(ptfast.predict(net.cpu(), np.zeros((2, 3)))) == 2, "a module that was moved takes inputs there"
    assert state() == before


@pytest.mark.slow
def test_ten_trainings_leave_no_thread_process_or_memory(capsys: pytest.CaptureFixture[str]) -> None:
    def used_kib() -> int:
        return int(re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[0])

    sizes: list[int] = []
    threads, processes = threading.active_count(), processes_started_by_this()
    for number in range(10):
        train_points(steps=2, data=Points(20_000), seed=number)
        sizes.append(used_kib())
    assert (threading.active_count(), processes_started_by_this()) == (threads, processes)
    assert sizes[-1] - sizes[3] < 8 * 1024, sizes
    gc.collect()
    assert len(given._targets) <= 2, "of results that are gone, nothing is held"


@pytest.mark.parametrize(
    ("number", "raises"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_an_interrupted_run_is_saved_and_ends_the_call(number: int, raises: type[BaseException]) -> None:
    net, keys = Net(), {"schedule": "constant"}
    before = state_of_process()
    run = {"dir": "r", "resume": "auto"}
    stop = Watch(lambda: signal.raise_signal(number), at=3)
    with pytest.raises(raises) as caught:
        train_points(model=net, steps=6, run=run, callbacks=[stop], **keys)
    assert caught.value.args[0] == (
        75 if raises is SystemExit else "the run is saved: r; resume it with run.resume=auto"
    )
    facts = summary(Path("r"))
    assert (facts["status"], facts["steps"]) == ("preempted" if raises is SystemExit else "interrupted", 3)
    assert facts["resume"].startswith("ptfast.train(...")
    after = state_of_process()
    assert {name: after[name] for name in after if after[name] != before[name]} == {}
    resumed = train_points(model=net, steps=6, run=run, callbacks=[Watch()], **keys)
    assert not summary(Path("r")).get("next")  # no command has the objects of this call
    assert same_bits(weights(resumed.path), weights(train_points(model=net, steps=6, **keys).path))


def test_a_thread_may_train_and_signals_are_left_to_the_program() -> None:
    found: dict[str, Any] = {}
    handlers = state_of_process()["signals"]

    def work() -> None:
        watch = Watch(lambda: found.update(state_of_process()["signals"]), at=2)
        found["result"] = train_points(callbacks=[watch])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found.pop("result").status == "finished"
    assert found == handlers


def test_two_calls_at_once_are_rejected() -> None:
    errors: list[Exception] = []

    def again() -> None:
        for act in (train_points, lambda: ptfast.load("r")):
            with pytest.raises(MachineError) as caught:
                act()
            errors.append(caught.value)

    def in_thread() -> None:
        thread = threading.Thread(target=again)
        thread.start()
        thread.join()

    train_points(callbacks=[Watch(again, at=1), Watch(in_thread, at=2)])
    assert len(errors) == 4
    assert all("another call of ptfast runs in this process" in str(error) for error in errors)
    train_points()


def test_a_running_event_loop_does_not_matter() -> None:
    async def main() -> ptfast.Result:
        await asyncio.sleep(0)
        result = train_points()
        await asyncio.sleep(0)
        return result

    assert asyncio.run(main()).status == "finished"


def in_a_fork(act: Any) -> str:
    """What `act` returns in a process that is forked from this one."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(act()).encode())
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as file:
        return file.read()


def test_a_forked_process_trains_only_where_torch_can() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        told = in_a_fork(train_points)
        assert told.startswith("MachineError: train: this process was forked from one that had loaded torch")
        assert "spawn" in told
        torch.set_num_threads(1)
        assert "finished" in in_a_fork(lambda: train_points().status)
    finally:
        torch.set_num_threads(before)
    # The lock of a call that was running in the parent is not held in the child.
    told = []
    train_points(callbacks=[Watch(lambda: told.append(in_a_fork(lambda: ptfast.load("nowhere"))), at=2)])
    assert "no such folder" in told[0]


def test_torchrun_is_not_misunderstood(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    error = rejected()
    assert error.code == "P002"
    assert "2 processes were started" in str(error)


# Processes of their own.

SCRIPT = """
import sys, torch, ptfast
sys.path += {path}
from api_parts import Net, Points, Watch
import os, signal
torch.manual_seed(3)
class Mine(Net):
    pass

act = Watch((lambda: os.kill(os.getpid(), signal.SIGKILL)), at=int(sys.argv[1]))
result = ptfast.train(
    model=Mine(), data=Points(), callbacks=[act], steps=9, batch_size=10, schedule="constant",
    saving={{"every": "2steps"}}, run={{"dir": sys.argv[2], "resume": "auto"}})
print(result.status)
"""


@pytest.mark.slow
def test_a_killed_script_resumes_to_the_same_bits(in_tmp: Path) -> None:
    Path("script.py").write_text(SCRIPT.format(path=[str(ROOT), str(Path(__file__).parent)]))

    def start(kill_at: int, folder: str) -> int:
        return subprocess.run([sys.executable, "script.py", str(kill_at), folder], timeout=120).returncode

    assert start(-1, "whole") == 0
    assert start(5, "r") == -signal.SIGKILL
    assert (Path("r/saved/last").resolve().name, start(-1, "r")) == ("step-4", 0)
    assert same_bits(weights(Path("r")), weights(Path("whole")))
    assert same_bits(training_state(Path("r")), training_state(Path("whole")))


@pytest.mark.slow
def test_ranks_train_what_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from running import WITH_TESTS

    for name, value in WITH_TESTS.items():
        monkeypatch.setenv(name, value)
    before = state_of_process()
    result = train_points(model=Net, data=Points, parallel="ddp", **{"parallel.nproc": 2})
    assert result.status == "finished"
    assert json.loads((result.path / "environment.json").read_text())["ranks"] == 2
    after = state_of_process()
    assert {name: after[name] for name in after if after[name] != before[name]} == {}
    with pytest.raises(DataError) as caught:
        train_points(
            model=Net, data=Points, parallel="ddp", **{"parallel.nproc": 2, "data.val": "100samples"}
        )
    assert caught.value.key == "data.val", "a rank's error is that of its kind"


@pytest.mark.slow
def test_a_sweep_gives_a_result_for_each_combination() -> None:
    before = state_of_process()
    results = ptfast.sweep(
        "resnet_digits", DIGITS[0], *DIGITS[2:], seed=[0, 1], **{"model.hidden": [[8], [16]]}
    )
    assert [result.status for result in results] == ["finished"] * 4
    sizes = [next(iter(result.model().parameters())).shape[0] for result in results]
    assert sorted(sizes) == [8, 8, 16, 16]
    alone = ptfast.train("resnet_digits", *DIGITS[:1], "model.hidden=[8]", *DIGITS[2:], seed=0)
    assert same_bits(weights(results[0].path), weights(alone.path))
    after = state_of_process()
    assert {name: after[name] for name in after if after[name] != before[name]} == {}
