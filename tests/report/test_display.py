"""The display: plain lines without escape codes, one live line on terminals, nothing on other ranks."""

from __future__ import annotations

import io
import logging
import os
import pty
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ptfast.core import units
from ptfast.core.plain_display import closing, each_once, show_warnings_once
from ptfast.report.terminal.display import Display, LiveDisplay, build_display, say, table

METRICS = {"loss": 0.231, "lr": 3.2e-3, "samples_per_s": 3412.4}
ESCAPE = "\x1b"
SUMMARY = {
    "status": "finished",
    "steps": 1300,
    "wall_s": 72.3,
    "train_samples_per_s": 3412.4,
    "peak_memory_bytes": 432 * 2**20,
    "val": {"loss": 0.08, "accuracy": 0.9833},
    "best": {"loss": 0.07, "accuracy": 0.9876, "step": 1170},
    "train": {"loss": 0.0512, "lr": 1e-5},
    "best_metric": "val.accuracy",
    "test": {},
    "time_budget": {"start_up": 12.0, "data": 0.2, "forward": 20.0, "backward": 40.0, "saving": 0.1},
    "recipe": "resnet_digits",
    "run_dir": "runs/resnet_digits/x",
    "error": None,
}


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def plain(total_steps: int | None = 1300) -> tuple[Display, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    display = Display(stream, clock)
    display.start(0, total_steps, 130)
    return display, stream, clock


def live(stream: io.StringIO, total_steps: int | None = 1300) -> LiveDisplay:
    display = LiveDisplay(stream)
    display.start(0, total_steps, 130)
    return display


def test_a_progress_line_tells_place_figures_and_time_left() -> None:
    display, stream, clock = plain()
    display.start(300, 1300, 130)
    clock.now_s = 2.0
    display.progress(400, 3.1, METRICS)
    line = stream.getvalue()
    assert re.sub(" +", " ", line) == (
        "step 400/1300 epoch 3.1 loss 0.2310 lr 3.2e-03 3,412 samples/s eta 0:18\n"
    )


def test_columns_stay_put_while_figures_change_width() -> None:
    display, stream, clock = plain()
    for step, rate in ((10, 1200.0), (100, 900.0), (1000, 1500.0)):
        clock.now_s += 60
        display.progress(step, step / 130, {**METRICS, "samples_per_s": rate})
    lines = stream.getvalue().splitlines()
    assert len({line.index("epoch") for line in lines}) == 1
    assert len({line.index("samples/s") for line in lines}) == 1


def test_time_left_is_unknown_without_a_number_of_steps() -> None:
    display, stream, clock = plain(total_steps=None)
    clock.now_s = 5.0
    display.progress(50, 0, METRICS)
    assert "step 50" in stream.getvalue()
    assert "eta" not in stream.getvalue()


def test_what_has_no_epochs_shows_none() -> None:
    display, stream, _ = plain()
    display.start(0, 140, None)
    display.progress(1, 0.0, {"loss": 2.0})
    assert stream.getvalue() == "step 1/140    loss 2.0000  eta 0:00\n"


def test_progress_lines_thin_out_and_evaluations_do_not() -> None:
    display, stream, clock = plain(total_steps=100_000)
    for step in range(1, 101):
        clock.now_s += 0.1
        display.progress(step, 0, METRICS)
        display.evaluation(step, 1, "val", {"loss": 0.1})
    lines = stream.getvalue().splitlines()
    assert sum("samples/s" in line for line in lines) <= 11
    assert sum("val" in line for line in lines) == 100


def test_plain_output_has_no_escape_codes_and_a_line_stays_a_line() -> None:
    display, stream, _ = plain()
    with display.status("loading data"):
        pass
    display.panel("ptfast train", [("device", "cpu"), ("model", "a\nb\x1b[31m")], ["debug=anomaly is on"])
    display.progress(10, 0, METRICS)
    display.evaluation(130, 1, "val", {"accuracy": 0.9833, "loss": 0.08}, is_best=True)
    display.note("a note")
    display.warn("mind this")
    display.finish(SUMMARY)
    text = stream.getvalue()
    assert ESCAPE not in text
    assert "  model   a\\nb\\x1b[31m\n" in text
    assert "warning: debug=anomaly is on\n" in text
    assert "val   loss 0.0800  accuracy 98.33%  best\n" in text


def test_the_closing_summary_names_what_was_reached_and_where_it_lies() -> None:
    display, stream, _ = plain()
    display.finish(SUMMARY)
    text = stream.getvalue()
    assert text.startswith("resnet_digits: finished after 1m 12s\n")
    for part in (
        "1,300 steps, 3,412 samples/s, 432 MiB peak memory",
        "  time      backward    40.0s   55%\n"
        "            forward     20.0s   28%\n"
        "            start-up    12.0s   17%\n"
        "            rest        0.30s    0%\n",
        "  train     loss 0.0512\n",
        "loss 0.0700  accuracy 98.76%  at step 1,170, by val accuracy\n",
        "runs/resnet_digits/x",
    ):
        assert part in text
    assert "test" not in text
    assert "resume" not in text
    display.finish({**SUMMARY, "status": "interrupted", "resume": "ptfast train run.resume=auto"})
    assert stream.getvalue().endswith("saved at step 1,300; resume with: ptfast train run.resume=auto\n")


def test_the_closing_summary_ends_with_the_next_commands() -> None:
    for kind in (Display, LiveDisplay):
        stream = io.StringIO()
        kind(stream).finish({**SUMMARY, "next": ["ptfast eval r", "ptfast predict r FILE..."]})
        lines = stream.getvalue().splitlines()
        assert [line.split("\x1b")[0] for line in lines[-2:]] == [
            "next: ptfast eval r",
            "      ptfast predict r FILE...",
        ]


def test_a_run_of_one_step_is_not_one_steps() -> None:
    assert closing({"steps": 1})[1] == [("training", "1 step")]


def test_the_roofline_is_shown_once_the_machine_is_measured() -> None:
    roofline = {"line": "12 GFLOP/s; this machine's peak is not measured yet"}
    assert "GFLOP" not in str(closing({"roofline": roofline}))
    roofline = {"line": "40 % of the peak", "floors": "compute 40 %", "mfu": 0.4}
    assert ("roofline", "40 % of the peak") in closing({"roofline": roofline})[1]


def test_a_run_too_short_to_tell_shows_no_throughput() -> None:
    display, stream, _ = plain()
    display.finish({**SUMMARY, "train_samples_per_s": None})
    said = "  training  1,300 steps, too short to measure samples/s, 432 MiB peak memory\n"
    assert said in stream.getvalue()


@pytest.mark.parametrize("summary", [{}, {"status": "failed", "error": "N001: the loss is nan", "val": None}])
def test_a_summary_may_lack_anything(summary: dict[str, Any]) -> None:
    for kind in (Display, LiveDisplay):
        stream = io.StringIO()
        kind(stream).finish(summary)
        assert str(summary.get("error", "")) in stream.getvalue()


def test_a_reader_that_has_gone_does_not_end_the_training() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    for kind in (Display, LiveDisplay):
        display = kind(Gone())
        display.panel("title", [("a", "b")])
        display.progress(1, 0, METRICS)
        display.note("text")
        display.close()


def test_a_stream_that_knows_ascii_only_gets_replacements() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Display(stream).note("größe")
    assert raw.getvalue() == b"gr??e\n"


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = build_display(rank=1)
    assert type(display) is Display
    with display.status("loading"):
        display.panel("title", [("a", "b")], ["loud"])
        display.start()
        display.progress(1, 0, METRICS)
        display.evaluation(5, 1, "val", METRICS, True)
        display.finish(SUMMARY)
        display.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("term", "kind"), [("xterm-256color", LiveDisplay), ("dumb", Display)])
def test_only_a_terminal_that_can_redraw_gets_the_live_display(
    term: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as stream:
        assert type(build_display(stream=stream)) is kind
    os.close(parent)
    assert type(build_display(stream=io.StringIO())) is Display


@pytest.mark.parametrize("total_steps", [1300, None])
@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_the_live_line_fits_the_terminal_and_keeps_the_loss(
    columns: int, total_steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    display = live(io.StringIO(), total_steps)
    display.progress(400, 3, METRICS)
    lines = display._console.render_lines(display, pad=False)  # pyright: ignore[reportArgumentType]
    text = "".join(segment.text for segment in lines[0])
    display.close()
    assert len(lines) == 1
    assert len(text) <= columns
    if columns >= 40:
        assert "loss 0.2310" in text
    if columns >= 80:
        assert all(part in text for part in ("3,412 samples/s", "step 400"))
        assert "lr 3.2e-03" in text or columns == 80
        assert ("eta" in text) == (total_steps is not None)


def test_a_crash_leaves_the_terminal_with_a_cursor_and_the_streams_as_they_were() -> None:
    import sys

    streams = (sys.stdout, sys.stderr)
    stream = io.StringIO()
    display = live(stream)
    display.progress(1, 0, METRICS)
    # Shown again as soon as the live line stands: a SIGKILL would leave it as it is now.
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    display.close()
    display.close()
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    assert (sys.stdout, sys.stderr) == streams


def test_the_live_line_is_drawn_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    display, stream, clock = live(io.StringIO()), io.StringIO(), Clock()
    monkeypatch.setattr(display, "_stream", stream)
    monkeypatch.setattr(display, "_now", clock)
    display.progress(1, 0, METRICS)
    drawn = len(stream.getvalue())
    for step in range(2, 100):
        display.progress(step, 0, METRICS)
    assert len(stream.getvalue()) == drawn
    clock.now_s = 0.6
    display.progress(100, 0, METRICS)
    assert len(stream.getvalue()) > drawn
    display.close()


def test_brackets_in_values_are_no_markup_and_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    display = live(stream)
    display.panel("title", [("shape", "[red]3[/red]")], ["debug=anomaly is on"])
    assert "[red]3[/red]" in stream.getvalue()
    assert "debug=anomaly is on" in stream.getvalue()
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", stream.getvalue())


class Terminal(io.StringIO):
    """A terminal that somebody reads later."""

    def isatty(self) -> bool:
        return True


def test_what_a_terminal_shows_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    say(f"  + {'fused ' * 9}/a/path/that/is/longer/than/the/terminal\nend", stream)
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("    fused")
    assert lines[-2:] == ["    /a/path/that/is/longer/than/the/terminal", "end"]
    assert all(len(line) < 40 for line in lines[:-2])
    table(["setting", "95 %"], [["word " * 12, "0.9"]], stream=stream)
    assert "95 %" in stream.getvalue()


def test_tables_align_numbers_to_the_right() -> None:
    stream = io.StringIO()
    rows = [["1", "sgd", "98.70%", "52.1s"], ["10", "adamw", "-", "1m 02s"], ["", "lamb", "", ""]]
    table(["#", "optimizer", "accuracy", "wall"], rows, title="runs", stream=stream)
    assert stream.getvalue().splitlines() == [
        "runs",
        " #  optimizer  accuracy    wall",
        " 1  sgd          98.70%   52.1s",
        "10  adamw             -  1m 02s",
        "    lamb",
    ]
    empty = io.StringIO()
    table(["a", "b"], [], stream=empty)
    assert empty.getvalue() == "a  b\n"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (units.short_count(999), "999"),
        (units.short_count(272_474), "272k"),
        (units.short_count(999_700), "1M"),
        (units.short_count(1_234_567), "1.2M"),
        (units.short_count(7_000_000_000), "7B"),
        (units.duration(0.42), "0.42s"),
        (units.duration(59.97), "1m 00s"),
        (units.duration(72), "1m 12s"),
        (units.duration(3599.7), "1h 00m"),
        (units.duration(7500), "2h 05m"),
        (units.duration(273_600), "3d 04h"),
        (units.clock(20.2), "0:21"),
        (units.clock(3723), "1:02:03"),
        (units.num_bytes(512), "512 B"),
        (units.num_bytes(1536), "1.5 KiB"),
        (units.num_bytes(432 * 2**20), "432 MiB"),
        (units.labelled("samples_per_s", 3412.4), "3,412 samples/s"),
        (units.labelled("accuracy", 0.98333), "accuracy 98.33%"),
        (units.labelled("perplexity", 1234.5), "perplexity 1234.5"),
        (units.labelled("loss", float("nan")), "loss nan"),
        (units.labelled("loss", None), "loss not finite"),
    ],
)
def test_numbers_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected


def test_each_line_of_a_library_warns_once() -> None:
    library, shown = str(Path(torch.__file__).with_name("a.py")), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: shown.append(str(message))
        show_warnings_once()
        for number in range(3):
            warnings.warn_explicit(f"file {number} is odd", UserWarning, library, 7)
            warnings.warn_explicit(f"mine {number}", UserWarning, "/home/me/mine.py", 7)
        warnings.warn_explicit("file 9 is odd", UserWarning, library, 8)
    assert shown == ["file 0 is odd", "mine 0", "mine 1", "mine 2", "file 9 is odd"]
    records = [logging.LogRecord("a", 30, library, 1, text, None, None) for text in "xyx"]
    assert [each_once(record) for record in records] == [True, True, False]
