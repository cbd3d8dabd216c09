"""`ptfast ablate`: what each technique is worth here, and the best config of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ptfast.config.catalogue import CATALOGUE, OF_THE_RUN, Need, Technique, ThisMachine, verdict
from ptfast.config.files.frozen import redact
from ptfast.config.files.overlay import check_overlay
from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.errors import COMMAND_LINE, EXIT_INTERRUPTED, EXIT_OK, ConfigError, name_some
from ptfast.core.units import clock, duration, num_bytes
from ptfast.measure.ablate.ablation import Ablation, Worth
from ptfast.measure.experiment.laboratory import Laboratory
from ptfast.measure.experiment.verdicts import Effect
from ptfast.measure.found import RECEIPT, check_outputs, label, live_line, save_picture, write_recipe
from ptfast.report.terminal.display import say, table

LEAST_S = 30.0
"""A budget that never suffices."""
BEST, PICTURE = "best.yaml", "ablate.png"
CHEAPER_STEPS = ("batching", "optimizer")
"""Families of which techniques that change the training may make a step cheaper."""
COMPILES = "it compiles: add --compile"


def ablate(
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
    """
    check_outputs(out)
    folder = out or run_directory.new_folder(Path(config.run.root), f"ablate-{label(config)}")
    if folder.is_dir():
        check_overlay(folder / BEST)
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
            together, beside = len(ablation.factors), len(ablation.apart)
            more = f"{beside} more are measured beside the best of them"
            say(f"{together} switches are set at once in every trial, {more}")
            ablation.run()
        except KeyboardInterrupt:
            live("")
            say("interrupted: this is what was found by then")
            if ablation.blocks and ablation.fitted is None:
                ablation.estimate()
            code = EXIT_INTERRUPTED
    show(ablation, left_out)
    _write(ablation, folder, arguments, config, left_out, interrupted=code != EXIT_OK)
    return code


def _too_short(budget_s: float, needed_s: float) -> ConfigError:
    what = f"too short for this recipe: it takes about {duration(needed_s)}"
    hint = f"Give --budget {math.ceil(needed_s / 10) * 10}s"
    value = f"{budget_s:g}s"
    return ConfigError("C005", what, key="--budget", value=value, place=COMMAND_LINE, suggestion=hint)


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
        return "it acts in evaluation, not in training"
    if technique.kind == "training" and technique.family not in CHEAPER_STEPS and not is_named:
        return "it changes how fast the loss falls, not what a step costs: ptfast race"
    return ""


HEADERS = ("technique", "class", "worth", "95 %", "verdict", "expect", "memory", "loss")


def show(ablation: Ablation, left_out: Mapping[str, str]) -> None:
    """Print the techniques by worth, what was not measured, and the pick with what it came to."""
    measured = sorted(measured_findings(ablation), key=lambda finding: -_log_ratio(finding))
    say()
    if measured:
        table(HEADERS, [_row(finding) for finding in measured])
    for line in [*_remarks(ablation, measured), *_unmeasured(ablation, left_out), "", *pick_lines(ablation)]:
        say(line)


def measured_findings(ablation: Ablation) -> list[Worth]:
    """What has a figure."""
    return [finding for finding in ablation.findings if finding.effect is not None and not finding.why]


def _log_ratio(finding: Worth) -> float:
    return finding.effect.log_ratio if finding.effect is not None else -math.inf


def _row(finding: Worth) -> list[str]:
    effect, memory, drift = finding.effect, finding.memory_bytes, finding.loss_drift
    assert effect is not None
    return [
        finding.technique.name,
        finding.technique.kind,
        f"{effect.ratio:.2f}x",
        "{:.2f}-{:.2f}".format(*effect.interval()),
        finding.words,
        "beside" if finding.is_apart else f"{math.exp(finding.expected):.2f}x",
        "-" if memory is None else f"{'-' if memory < 0 else '+'}{num_bytes(abs(memory))}",
        "-" if drift is None else f"{drift:+.1%}",
    ]


def _remarks(ablation: Ablation, measured: list[Worth]) -> Iterator[str]:
    """What the figures mean, and what speaks against them."""
    fitted, laboratory = ablation.fitted, ablation.laboratory
    if fitted is not None:
        runs = sum(math.isfinite(time) for times in ablation.times for time in times)
        half = statistics.median(
            math.expm1(math.log(effect.interval()[1] / effect.ratio)) for effect in fitted.effects if effect
        )
        yield (
            f"{runs} runs of {len(ablation.factors)} switches at once; processes of one config differ by "
            f"{ablation.process_sd or 0.0:.1%} here, and intervals reach {half:.1%} to either side"
        )
        for first, second, more in ablation.pairs:
            names = (" or ".join(each.name for each in term) for term in (first, second))
            yield f"together {math.exp(more):.2f}x of what each does alone: {', and '.join(names)}"
        if ablation.fits_poorly:
            yield "some switches do other things together than alone, which widens the intervals: try --only"
        doubted = sum(weight < 0.5 for weight in fitted.weights)
        if doubted:
            noun = "run lies" if doubted == 1 else "runs lie"
            yield f"{doubted} {noun} far from the rest; all count (their weights are in measure.json)"
    if any(finding.is_apart for finding in measured):
        yield "beside: measured in a block with the pick, not in the plan"
    if any(finding.words.endswith("per step") for finding in measured):
        yield "faster per step: ptfast race measures if the same loss is reached sooner"
    if laboratory.num_again:
        yield f"{laboratory.num_again} blocks were measured again: other processes took a core meanwhile"


def _unmeasured(ablation: Ablation, left_out: Mapping[str, str]) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    failed = {finding.technique.name: finding.why for finding in ablation.findings if finding.why}
    for name, why in {**failed, **left_out}.items():
        reasons.setdefault(why.rstrip("."), []).append(name)
    for why, names in reasons.items():
        yield f"not measured ({why}): {name_some(names)}"


def pick_lines(ablation: Ablation) -> Iterator[str]:
    """The pick, what the plan predicts of it, and what fresh processes confirm."""
    if not measured_findings(ablation):
        yield "no technique was measured: give a longer --budget"
        return
    names = ", ".join(technique.name for technique in ablation.picked)
    yield f"the pick: {names}" if names else "the pick: plain, as nothing is expected to be faster"
    confirmed = ablation.confirmed
    if confirmed is None:
        yield "it was not confirmed: give a longer --budget"
        return
    # Effects that do not multiply predict nothing.
    predicted = "" if ablation.fits_poorly else f"predicted {ablation.predicted:.2f}x, "
    yield f"over plain: {predicted}confirmed in fresh processes {confirmed.over_plain}"
    yield f"over the config as given: {confirmed.over_given}"
    if not ablation.best_is_pick:
        yield "the config as given is no slower, so best.yaml holds that"


def draw(path: Path, ablation: Ablation, title: str) -> None:
    """Write a PNG of every effect with its interval, the pick's confirmed speed below them."""
    from matplotlib.figure import Figure

    found = sorted(measured_findings(ablation), key=_log_ratio)
    picture = Figure(figsize=(8, 1.4 + 0.26 * (len(found) + 2)), layout="constrained")
    axes = picture.add_subplot()
    rows: list[tuple[str, Effect, str]] = []
    if ablation.confirmed is not None:
        rows.append(("the pick, confirmed", ablation.confirmed.over_plain, "C2"))
    for finding in found:
        assert finding.effect is not None
        clear = finding.verdict in ("faster", "slower")
        rows.append((finding.technique.name, finding.effect, "C0" if clear else "0.6"))
    for place, (_, effect, color) in enumerate(rows):
        axes.plot(effect.interval(), [place, place], color=color, lw=2, solid_capstyle="butt")
        axes.plot(effect.ratio, place, "o", color=color, ms=5)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.axvline(1.0, color="0.4", lw=0.8)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0]
    axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], minor=False)
    axes.minorticks_off()
    bounds = [bound for _, effect, _ in rows for bound in effect.interval()] or [1.0]
    axes.set_xlim(max(min(bounds) * 0.97, 0.3), min(max(bounds) * 1.03, 4.0))
    axes.set_xlabel("speed with it over speed without it, 95 % interval; grey: not told apart from 1")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    save_picture(picture, path)


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
            comment.append(f"On: {names}; {confirmed.over_plain} plain's speed.")
        else:
            comment.append(f"As it was given: {names or 'plain'} came to {confirmed.over_given} of it.")
        words = ablation.pick_words if ablation.best_is_pick else []
        write_recipe(folder / BEST, merge(arguments, words), {}, comment)
    say(f"figures: {folder}")
