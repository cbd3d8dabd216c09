"""`ptfast ablate`: what each technique is worth here, and the best config of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from ptfast.config.applicability import OF_THE_RUN, ThisMachine, verdict
from ptfast.config.catalogue import CATALOGUE, Need, Technique
from ptfast.config.compose import Composed
from ptfast.config.files.frozen import redact
from ptfast.config.files.overlay import check_overlay
from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.errors import COMMAND_LINE, EXIT_INTERRUPTED, EXIT_OK, ConfigError
from ptfast.core.units import clock, duration
from ptfast.measure.ablate.ablation import Ablation
from ptfast.measure.ablate.ablation_table import draw, measured_findings, show
from ptfast.measure.ablate.findings import described
from ptfast.measure.experiment.laboratory import Laboratory
from ptfast.measure.found import RECEIPT, check_outputs, label, live_line, write_recipe
from ptfast.report.terminal.display import say

LEAST_S = 30.0
"""A budget that never suffices."""
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
    """Measure techniques by a designed experiment, show them by worth, and write the best config as a recipe.

    Args:
        budget_s: seconds for everything.
        only: measure no others.
        compiles: measure those that compile, too.
        out: folder of receipt, picture and recipe; None for a new one under `run.root`.

    Returns:
        0, or 130 after Ctrl-C, with what was found by then shown and written.

    Raises:
        ConfigError: C005 where the budget is too small.
        PtfastError, ReportedError: whatever stops a plain run in its first steps.
    """
    check_outputs(out, None)
    folder = out or run_directory.new_folder(Path(config.run.root), f"ablate-{label(config)}")
    check_overlay(folder / BEST) if folder.is_dir() else None
    if budget_s < LEAST_S:
        raise _too_short(budget_s, LEAST_S)
    code, left_out = EXIT_OK, dict[str, str]()
    with live_line() as live, Laboratory(budget_s=budget_s) as laboratory:

        def on_stage(line: str) -> None:
            live(f"{line}  {clock(max(laboratory.left_s, 0.0))} left")

        say(f"measuring for {duration(budget_s)}: torch and the data are loaded first, once for all trials")
        ablation = Ablation(laboratory, arguments, on_stage)
        try:
            plain = ablation.begin()
            techniques, left_out = choose(plain.facts["meets"], ThisMachine(), only=only, compiles=compiles)
            needed_s = ablation.needed_s(techniques)
            if needed_s > laboratory.left_s:
                raise _too_short(budget_s, budget_s - laboratory.left_s + needed_s)
            ablation.look(techniques)
            live("")
            say(
                f"{len(ablation.factors)} switches are set at once in every trial, "
                f"{len(ablation.apart)} more are measured beside the best of them"
            )
            ablation.run()
        except KeyboardInterrupt:
            live("")
            say("interrupted: this is what was found by then")
            ablation.conclude()
            code = EXIT_INTERRUPTED
    show(ablation, left_out)
    _write(ablation, folder, arguments, config, left_out, interrupted=code != EXIT_OK)
    return code


def _too_short(budget_s: float, needed_s: float) -> ConfigError:
    what = f"too short for this recipe: it takes about {duration(needed_s)}"
    hint = f"Give --budget {math.ceil(needed_s / 10) * 10}s"
    value = f"{budget_s:g}s"
    return ConfigError("C005", what, key="--budget", value=value, place=COMMAND_LINE, suggestion=hint)


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
    laboratory, name = ablation.laboratory, label(config)
    command = ["ptfast", "ablate", *arguments, "--budget", f"{laboratory.budget_s:g}s"]
    facts = {
        "command": redact(command),
        "interrupted": interrupted,
        "left_out": left_out,
        **ablation.receipt(),
    }
    run_directory.write_json(folder / RECEIPT, facts)
    if measured_findings(ablation):
        draw(folder / PICTURE, ablation, f"{name}: what each technique is worth")
    confirmed = ablation.confirmed
    if confirmed is not None:
        comment = [f"The best config of {name} on one machine, found by ptfast ablate"]
        names = ", ".join(technique.name for technique in ablation.picked)
        if ablation.best_is_pick:
            comment.append(f"On: {names}; {described(confirmed.over_plain)} plain's speed.")
        else:
            comment.append(
                f"As it was given: {names or 'plain'} came to {described(confirmed.over_given)} of it."
            )
        words = ablation.pick_words if ablation.best_is_pick else []
        write_recipe(folder / BEST, merge(arguments, words), {}, comment)
    say(f"figures: {folder}")


def choose(
    meets: Collection[Need], machine: ThisMachine, *, only: Sequence[Technique] = (), compiles: bool = False
) -> tuple[list[Technique], dict[str, str]]:
    """The techniques to measure, and why each of the others is left out.

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
    return chosen, left_out


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
