"""`ptfast techniques`: what applies on this machine, all about one technique, and the Markdown table."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from ptfast.cli import listing_commands
from ptfast.cli.command_line import run
from ptfast.cli.completion.completion_command import complete
from ptfast.config import catalogue
from ptfast.config.catalogue import CATALOGUE, ThisMachine, default_state, verdict
from ptfast.config.compose import compose
from ptfast.core import devices
from ptfast.core.errors import shorten
from ptfast.core.sections.section import Need, Technique

Capture = pytest.CaptureFixture[str]


def needing(*needs: Need) -> Technique:
    words = dict.fromkeys(("why", "claim", "source", "avoid", "audit"), "Something.")
    return Technique(name="a", family="b", kind="exact", on=("a=b",), off=("a=c",), needs=needs, **words)


def test_every_technique_has_a_line(capsys: Capture) -> None:
    assert run(["techniques"]) == 0
    headers, *lines = capsys.readouterr().out.splitlines()
    assert headers.split() == ["family", "technique", "class", "default", "switch", "here", "worth"]
    assert len(lines) == len(CATALOGUE)
    for technique in CATALOGUE:
        (line,) = [line for line in lines if f"\t{technique.name}\t" in line]
        assert line.startswith(technique.family)
        assert all(text in line for text in (technique.kind, " ".join(technique.on), technique.claim))


def test_a_family_stands_together(capsys: Capture) -> None:
    assert run(["techniques", "dataloader"]) == 0
    assert "worker processes" in (out := capsys.readouterr().out)
    assert "pinned memory" not in out
    families = [technique.family for technique in listing_commands.in_order(CATALOGUE)]
    assert [family for family, _ in itertools.groupby(families)] == list(dict.fromkeys(families))


@pytest.mark.parametrize("words", [["pinned", "memory"], ["pinned-memory"], ["Pinned_Memory"]])
def test_one_in_full(words: list[str], capsys: Capture) -> None:
    assert run(["techniques", *words]) == 0
    out = capsys.readouterr().out
    (technique,) = (technique for technique in CATALOGUE if technique.name == "pinned memory")
    for text in (technique.why, technique.claim, technique.source, technique.avoid, technique.audit):
        assert text in out
    assert "dataloader.pin=false" in out


def test_what_was_measured_stands_beside_its_command(capsys: Capture) -> None:
    assert run(["techniques", "data in a pack"]) == 0
    out = capsys.readouterr().out
    (technique,) = (technique for technique in CATALOGUE if technique.name == "data in a pack")
    assert technique.measured in out
    assert "python scripts/bench_data.py jpeg" in out


def test_what_excludes_it_is_named(capsys: Capture) -> None:
    assert run(["techniques", "worker processes"]) == 0
    assert "instead of  data in memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["pined memory"], "C003", "Did you mean pinned memory?"),
        (["datalaoder"], "C003", "Did you mean dataloader?"),
        (["qwertz"], "C003", "Families: dataloader, "),
    ],
)
def test_a_wrong_name_is_rejected(words: list[str], code: str, says: str, capsys: Capture) -> None:
    assert run(["techniques", *words]) == 2
    err = capsys.readouterr().err
    assert f"error[{code}]" in err
    assert says in err


def test_names_complete_as_one_word() -> None:
    assert complete(["techniques", "pinned"]) == ["pinned-memory"]


def test_a_terminal_gets_families_as_headings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    assert run(["techniques", "transfers"]) == 0
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 200  # colors take characters, too
    assert any("transfers" in line and "exact" not in line for line in lines)


def test_a_terminal_of_80_columns_shows_a_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["techniques"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    states = r" (on|off|auto|not here)  "
    assert len([line for line in lines if re.search(states, line)]) == len(CATALOGUE)
    for technique in CATALOGUE:
        start = f" {shorten(technique.name, 29):<29} "
        (line,) = [line for line in lines if line.startswith(start) and re.search(states, line)]
        assert f" {technique.kind} " in line


def test_what_a_run_without_a_recipe_has_on() -> None:
    tree = compose([], complete=False).tree
    states = {technique.name: default_state(technique, tree) for technique in CATALOGUE}
    on = ("adamw", "cosine", "warm-up", "input normalization", "fused optimizer step", "inference mode")
    auto = ("data in memory", "channels last")
    off = ("selective checkpointing", "one cycle", "sgd with momentum", "gradient accumulation", "cutmix")
    assert [states[name] for name in on] == ["on"] * len(on)
    assert [states[name] for name in auto] == ["auto"] * len(auto)
    assert [states[name] for name in off] == ["off"] * len(off)


@pytest.mark.parametrize(
    ("need", "device", "reason"),
    [
        ("cuda", "cpu", "no CUDA device is visible"),
        ("cuda", "cuda", None),
        ("nvidia_tf32", "mps", "TF32 needs an NVIDIA GPU, and this is mps"),
        ("float8", "cpu", "float8 needs an NVIDIA GPU, and this is cpu"),
        ("fp16", "cpu", "float16 is no faster on this CPU"),
        ("ranks", "cpu", "it takes several GPUs or machines, and here is one CPU"),
        ("images", "cpu", None),
    ],
)
def test_what_a_machine_lacks(
    need: Need, device: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = ThisMachine()
    monkeypatch.setattr(machine, "device", device, raising=False)
    assert machine.lacks(need) == reason
    assert verdict(needing(need), machine).applies == (reason is None)


def test_cores_compilers_and_number_formats_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    machine = ThisMachine()
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.device == "cpu"
    for cores, applies_here in ((1, False), (2, True)):
        monkeypatch.setattr(catalogue, "spare_cores", lambda cores=cores: cores)
        assert verdict(needing("cores"), machine).applies == applies_here
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "cpuinfo")
    for flags, applies_here in (("avx2 avx512_bf16", True), ("avx2", False)):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        assert verdict(needing("bf16"), machine).applies == applies_here
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert verdict(needing("compiler"), machine).text == (
        "no: compiling needs a C++ compiler, and none is installed"
    )


def test_models_and_data_are_named() -> None:
    assert verdict(needing("images", "convolutions"), ThisMachine()).text == (
        "yes, on images, in models with convolutions"
    )


def test_it_loads_no_torch_where_there_is_no_gpu(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from ptfast.cli.command_line import run\nfrom ptfast.config import catalogue\n"
        f"catalogue.ROOT = Path({str(tmp_path)!r})\n"
        "assert run(['techniques']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
