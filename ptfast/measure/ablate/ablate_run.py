"""`ptfast ablate`: what each technique is worth here, and the best config of them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from ptfast.config.applicability import OF_THE_RUN, ThisMachine, verdict
from ptfast.config.catalogue import CATALOGUE, Need, Technique
from ptfast.config.compose import Composed
from ptfast.config.files.overlay import check_overlay
from ptfast.config.files.presets import content
from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.errors import EXIT_INTERRUPTED, EXIT_OK
from ptfast.core.units import clock, duration
from ptfast.measure.ablate.ablation import PLAIN, Ablation
from ptfast.measure.ablate.ablation_table import bounds, draw, ratio, show
from ptfast.measure.found import check_outputs, label, write_recipe
from ptfast.measure.trials.comparison import Comparison
from ptfast.measure.trials.session import RECEIPT, Session
from ptfast.report.terminal.display import is_terminal, say, standard_output

BEST, PICTURE = "best.yaml", "ablate.png"
CHEAPER_STEPS = ("batching", "optimizer")
"""Families of which techniques that change the training may make a step cheaper."""
COMPILES = "it compiles: add --compile"
EVALUATES = "it acts in evaluation, not in training"
WHOLE_RUN = "it changes how fast the loss falls, not what a step costs: ptfast race"


def ablate(
    composed: Composed,
    config: Config,
    arguments: Sequence[str],
    *,
    budget_s: float,
    only: Sequence[Technique] = (),
    compiles: bool = False,
    out: Path | None = None,
) -> int:
    """Measure techniques by paired trials, show them by worth, and write the best config as a recipe.

    Args:
        budget_s: seconds for everything; what it does not reach is named.
        only: measure no others.
        compiles: measure those that compile, too.
        out: folder of receipt, picture and recipe; None for a new one under `run.root`.

    Returns:
        0, or 130 after Ctrl-C, with what was found by then shown and written.

    Raises:
        ConfigError: C005 where the budget is too small for one comparison.
        PtfastError: whatever stops a plain run in its first steps.
    """
    check_outputs(out, None)
    folder = out or run_directory.new_folder(Path(config.run.root), f"ablate-{label(config)}")
    check_overlay(folder / BEST) if folder.is_dir() else None
    code = EXIT_OK
    with tempfile.TemporaryDirectory(prefix="ptfast-") as name, _live_line() as live:
        with Session(arguments, budget_s=budget_s, folder=Path(name)) as session:

            def on_round(comparison: Comparison) -> None:
                what, rounds = comparison.other.name, len(comparison.rounds)
                live(f"{what}: round {rounds}, {ratio(comparison)}  {clock(session.left_s)} left")

            session.on_round = on_round
            say(f"measuring for {duration(budget_s)}; a run starts first, and is compared with itself")
            session.calibrate(PLAIN)
            live("")
            say("\n".join(session.describe_floor()))
            meets = session.pool.warm[PLAIN]["meets"]
            techniques, left_out = choose(meets, ThisMachine(), only=only, compiles=compiles)
            say(f"techniques to measure: {len(techniques)}")

            def on_done(heading: str, comparison: Comparison) -> None:
                live("")
                _note(heading, comparison, session.left_s)

            ablation = Ablation(session, techniques, on_done)
            try:
                ablation.run()
            except KeyboardInterrupt:
                live("")
                say("interrupted: this is what was found by then")
                code = EXIT_INTERRUPTED
        show(ablation, left_out)
        _write(ablation, folder, arguments, config, left_out, interrupted=code != EXIT_OK)
    return code


def _note(heading: str, comparison: Comparison, left_s: float) -> None:
    """A line on a comparison that was made."""
    found = comparison.why or f"{ratio(comparison)} [{bounds(comparison)}] {comparison.verdict}"
    rounds = f", {len(comparison.rounds)} rounds" if comparison.rounds else ""
    say(f"  {heading:<40} {found}{rounds}  {clock(left_s)} left")


def _write(
    ablation: Ablation,
    folder: Path,
    arguments: Sequence[str],
    config: Config,
    left_out: dict[str, str],
    *,
    interrupted: bool,
) -> None:
    """Write the receipt, the picture and the best config."""
    run_directory.create_folder(folder)
    session, name, best = ablation.session, label(config), ablation.best
    facts = {
        "interrupted": interrupted,
        "not_reached": [technique.name for technique in ablation.not_reached],
        "left_out": left_out,
        "stack": [technique.name for technique in ablation.stack],
        "promised_speedup": ablation.promised,
        "best": best.overrides,
    }
    command = ["ptfast", "ablate", *arguments, "--budget", f"{session.budget_s:g}s"]
    session.write_receipt(folder / RECEIPT, command, **facts)
    say(f"\nfigures: {folder}")
    if ablation.stack:
        draw(folder / PICTURE, ablation, f"{name}: what each technique adds")
    elif best == PLAIN:
        return
    again, over_start = ablation.over_plain, ablation.over_start
    stack = ", ".join(technique.name for technique in ablation.stack)
    comment = [f"The best config of {name} on one machine, found by ptfast ablate"]
    if best.overrides:
        worth = "not measured again"
        if again is not None and again.effect is not None:
            worth = f"{ratio(again)} [{bounds(again)}] plain's speed"
        comment.append(f"On: {stack}; {worth}.")
    elif over_start is not None:
        worth = f"{ratio(over_start)} [{bounds(over_start)}]"
        comment.append(f"As it was given: with {stack or 'nothing'} alone on, speed is {worth} of that.")
    write_recipe(folder / BEST, merge(arguments, best.overrides), {}, comment)


@contextlib.contextmanager
def _live_line() -> Iterator[Callable[[str], None]]:
    """A line that is written over again and again on a terminal; nothing elsewhere."""
    stream = standard_output()
    shows = is_terminal(stream)

    def write(text: str) -> None:
        if shows:
            width = shutil.get_terminal_size().columns - 1
            stream.write(f"\r{text[:width]}\x1b[K")
            stream.flush()

    try:
        yield write
    finally:
        write("")


def choose(
    meets: Collection[Need], machine: ThisMachine, *, only: Sequence[Technique] = (), compiles: bool = False
) -> tuple[list[Technique], dict[str, str]]:
    """The techniques to measure, the most promising first, and why each of the others is left out.

    Those that the preset `fast` decides about come first, then others that leave the result nearly as it is,
    then those that change the training and may make its steps cheaper; within each of these one technique of
    every family, then a second one, so that a short budget reaches all families.

    Args:
        meets: needs on the model and the data that the run meets.
        only: measure no others, but these whatever their class.
        compiles: measure those that compile.
    """
    chosen: list[Technique] = []
    left_out: dict[str, str] = {}
    switches: dict[tuple[str, ...], str] = {}
    for technique in only or [each for each in CATALOGUE if each.on]:
        if why := _unfit(technique, meets, machine, compiles, bool(only)):
            left_out[technique.name] = why
        elif technique.on in switches:
            left_out[technique.name] = f"it is the same switch as {switches[technique.on]}"
        else:
            switches[technique.on] = technique.name
            chosen.append(technique)
    preset = content("fast").data.keys()
    turns: Counter[tuple[int, str]] = Counter()
    keys: dict[str, tuple[int, int]] = {}
    for technique in chosen:
        rank = _rank(technique, preset)
        keys[technique.name] = rank, turns[rank, technique.family]
        turns[rank, technique.family] += 1
    return sorted(chosen, key=lambda technique: keys[technique.name]), left_out


def _unfit(
    technique: Technique, meets: Collection[Need], machine: ThisMachine, compiles: bool, is_named: bool
) -> str:
    """Why a technique is not measured; empty where it is."""
    if not technique.on:
        return "it is always on"
    here = verdict(technique, machine)
    if not here.applies:
        return here.text.removeprefix("no: ")
    for need, where in OF_THE_RUN.items():
        # Only composing tells if the data is a pack.
        if need in technique.needs and need not in meets and need != "pack":
            return f"it acts {where}"
    if "compiler" in technique.needs and not compiles:
        return COMPILES
    if technique.family == "evaluation":
        return EVALUATES
    if technique.kind == "training" and technique.family not in CHEAPER_STEPS and not is_named:
        return WHOLE_RUN
    return ""


def _rank(technique: Technique, preset: Collection[str]) -> int:
    if technique.kind == "training":
        return 2 if technique.family == "batching" else 3
    keys = [word.partition("=")[0] for word in technique.on]
    return 0 if any(key in preset or key.partition(".")[0] in preset for key in keys) else 1
