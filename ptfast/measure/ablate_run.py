"""`ptfast ablate`: measure the effect of each technique here, and find the fastest config."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptfast.config.catalogue import CATALOGUE, OF_THE_RUN, ThisMachine, verdict
from ptfast.config.files.frozen import redact
from ptfast.config.files.overlay import check_overlay
from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core.errors import COMMAND_LINE, EXIT_INTERRUPTED, EXIT_OK, ConfigError, name_some
from ptfast.core.machine import usable_cores
from ptfast.core.sections.section import Need, Technique
from ptfast.core.units import duration, num_bytes
from ptfast.measure.ablation import SEED, Ablation
from ptfast.measure.experiment.laboratory import Laboratory
from ptfast.measure.outputs import check_outputs, label, write_recipe, write_results
from ptfast.report.terminal.display import say, table

LEAST_S = 30.0
"""A shorter budget is rejected at once."""
BEST = "best.yaml"
CHEAPER_STEPS = "batching"
"""The family that is measured although it changes the training, because it can make steps cheaper."""
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
    """Measure techniques in a designed experiment, rank them, and write the best config as a recipe.

    Args:
        budget_s: seconds for the whole command.
        only: measure only these techniques.
        compiles: also measure techniques that compile.
    """
    check_outputs(out)
    if out is not None and out.is_dir():
        check_overlay(out / BEST)
    if budget_s < LEAST_S:
        raise _too_short(budget_s, LEAST_S)
    interrupted, left_out = False, dict[str, str]()
    with Laboratory(budget_s=budget_s) as laboratory:
        say(f"measuring for {duration(budget_s)}: loading torch and the data once for all trials")
        ablation = Ablation(laboratory, arguments)
        try:
            plain = ablation.begin()
            techniques, left_out = choose(plain.facts["meets"], ThisMachine(), only=only, compiles=compiles)
            needed_s = ablation.needed_s(techniques)
            if needed_s > laboratory.left_s:
                raise _too_short(budget_s, budget_s - laboratory.left_s + needed_s)
            ablation.try_each(techniques)
            switches = (
                "1 switch varies" if len(ablation.factors) == 1 else f"{len(ablation.factors)} switches vary"
            )
            say(f"{switches} in every trial, {len(ablation.apart)} more measured on top of the best")
            ablation.run()
        except KeyboardInterrupt:
            say("interrupted: these are the results so far")
            interrupted = True
            if ablation.blocks and not ablation.fitted.effects:
                ablation.estimate()
    _show(ablation, left_out)
    command = redact(["ptfast", "ablate", *arguments, "--budget", f"{budget_s:g}s"])
    facts = {"command": command, "interrupted": interrupted, "left_out": left_out, **_record(ablation)}
    folder, name = write_results("ablate", out, config, facts), label(config)
    if (confirmed := ablation.confirmed) is not None:
        names = ", ".join(technique.name for technique in ablation.selected)
        how = f"Techniques: {names or 'plain'}. Speed over the config as given: {confirmed.over_given}."
        if ablation.best_words:
            how = f"Techniques: {names}. Speed over plain: {confirmed.over_plain}."
        comment = [f"The best config of {name} on one machine, found by ptfast ablate", how]
        write_recipe(folder / BEST, merge(arguments, ablation.best_words), {}, comment)
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


def _record(ablation: Ablation) -> dict[str, Any]:
    """Return all results, for `measure.json`."""
    laboratory, confirmed = ablation.laboratory, ablation.confirmed
    environment = (ablation.plain.facts if ablation.plain else {}).get("environment", {})
    findings = [
        vars(each) | {"technique": each.technique.name, "effect": each.effect and each.effect.record()}
        for each in ablation.findings
    ]
    effects = {name: getattr(confirmed, name).record() for name in ("over_plain", "over_given") if confirmed}
    return {
        "environment": environment | {"usable_cores": usable_cores()},
        "budget_s": laboratory.budget_s,
        "took_s": laboratory.budget_s - laboratory.left_s,
        "timed_s": laboratory.timed_s,
        "turn_s": laboratory.turn_s,
        "seed": SEED,
        "factors": [asdict(factor) for factor in ablation.factors],
        "plan": [[list(run) for run in block] for block in ablation.blocks],
        "process_sd": ablation.process_sd,
        "findings": findings,
        "selected": [technique.name for technique in ablation.selected],
        "predicted_speedup": ablation.predicted,
        "confirmed": confirmed and vars(confirmed) | effects,
        "best": ablation.best_words,
        "blocks": [[measured.record() for measured in block] for block in laboratory.blocks],
    }


def _too_short(budget_s: float, needed_s: float) -> ConfigError:
    what = f"too short for this recipe: it needs about {duration(needed_s)}"
    hint = f"Give --budget {math.ceil(needed_s / 10) * 10}s"
    value = f"{budget_s:g}s"
    return ConfigError("C005", what, key="--budget", value=value, place=COMMAND_LINE, suggestion=hint)


def choose(
    meets: Collection[Need], machine: ThisMachine, *, only: Sequence[Technique] = (), compiles: bool = False
) -> tuple[list[Technique], dict[str, str]]:
    """Return the techniques to measure for a run that meets `meets`, and why others are left out, by name.

    Techniques named in `only` are measured even if they change the training.
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
    """Return why a technique is not measured, or an empty string if it is measured."""
    if not technique.on:
        return "it is always on"
    here = verdict(technique, machine)
    if not here.applies:
        return here.text.removeprefix("no: ")
    for need, where in OF_THE_RUN.items():
        # Whether the data is a pack is known only once the config is composed.
        if need in technique.needs and need not in meets and need != "pack":
            return f"it acts {where}"
    if "compiler" in technique.needs and not compiles:
        return COMPILES
    if technique.family == "evaluation":
        return "it acts in evaluation, not in training"
    if technique.kind == "training" and technique.family != CHEAPER_STEPS and not is_named:
        return "it changes how fast the loss falls: measure it with ptfast race"
    return ""


def _show(ablation: Ablation, left_out: Mapping[str, str]) -> None:
    """Print the ranked techniques, the reasons for unmeasured ones, and the selected config."""
    say()
    rows: list[list[str]] = []
    for finding, effect in ablation.measured:
        memory, drift = finding.memory_bytes, finding.loss_drift
        rows.append(
            [
                finding.technique.name,
                finding.technique.kind,
                f"{effect.ratio:.2f}x",
                "{:.2f}-{:.2f}".format(*effect.interval()),
                finding.verdict + " per step" * finding.is_faster_per_step,
                "on top" if finding.is_apart else f"{math.exp(finding.expected):.2f}x",
                "-" if memory is None else f"{'-' if memory < 0 else '+'}{num_bytes(abs(memory))}",
                "-" if drift is None else f"{drift:+.1%}",
            ]
        )
    if rows:
        table(["technique", "class", "worth", "95 %", "verdict", "expect", "memory", "loss"], rows)
    known = [effect for effect in ablation.fitted.effects if effect is not None]
    if known:
        runs = [run for block in ablation.laboratory.blocks[: len(ablation.blocks)] for run in block]
        num_runs = sum(not run.why for run in runs)
        count = len(ablation.factors)
        switches = "1 switch" if count == 1 else f"{count} switches"
        half = statistics.median(effect.interval()[1] / effect.ratio - 1 for effect in known)
        say(
            f"{num_runs} runs that vary {switches}; processes of one config differ by "
            f"{ablation.process_sd or 0.0:.1%} here; intervals extend {half:.1%} to either side"
        )
        if ablation.fits_poorly:
            say("some switches interact, which widens the intervals: try --only")
    if any(finding.is_apart for finding, _ in ablation.measured):
        say("on top: measured with the selected config, not in the plan")
    if any(finding.is_faster_per_step for finding, _ in ablation.measured):
        say("faster per step: use ptfast race to check that the same loss is reached sooner")
    reasons: dict[str, list[str]] = {}
    failed = {finding.technique.name: finding.why for finding in ablation.findings if finding.why}
    for name, why in {**failed, **left_out}.items():
        reasons.setdefault(why.rstrip("."), []).append(name)
    for why, names in reasons.items():
        say(f"not measured ({why}): {name_some(names)}")
    say()
    if not rows:
        say("no technique was measured: give a longer --budget")
        return
    selected = ", ".join(technique.name for technique in ablation.selected)
    say(f"selected config: {selected or 'plain, because no technique is expected to be faster'}")
    if (confirmed := ablation.confirmed) is None:
        say("it was not confirmed: give a longer --budget")
        return
    # If switches interact, the product of their effects is no prediction.
    predicted = "" if ablation.fits_poorly else f"predicted {ablation.predicted:.2f}x, "
    say(f"over plain: {predicted}confirmed in fresh processes {confirmed.over_plain}")
    say(f"over the config as given: {confirmed.over_given}")
    if not ablation.best_words:
        say("the config as given is at least as fast, so best.yaml contains it")
