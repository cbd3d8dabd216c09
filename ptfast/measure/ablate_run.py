"""`ptfast ablate`: what each technique is worth here, and the best config of them."""

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
from ptfast.measure.outputs import check_outputs, label, write_figures, write_recipe
from ptfast.report.terminal.display import say, table

LEAST_S = 30.0
"""A shorter budget is refused at once."""
BEST = "best.yaml"
CHEAPER_STEPS = "batching"
"""The family whose techniques change the training but can make a step cheaper."""
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
    """
    check_outputs(out)
    if out is not None and out.is_dir():
        check_overlay(out / BEST)
    if budget_s < LEAST_S:
        raise _too_short(budget_s, LEAST_S)
    interrupted, left_out = False, dict[str, str]()
    with Laboratory(budget_s=budget_s) as laboratory:
        say(f"measuring for {duration(budget_s)}: torch and the data are loaded first, once for all trials")
        ablation = Ablation(laboratory, arguments)
        try:
            plain = ablation.begin()
            techniques, left_out = choose(plain.facts["meets"], ThisMachine(), only=only, compiles=compiles)
            needed_s = ablation.needed_s(techniques)
            if needed_s > laboratory.left_s:
                raise _too_short(budget_s, budget_s - laboratory.left_s + needed_s)
            ablation.look(techniques)
            switches = (
                "1 switch is" if len(ablation.factors) == 1 else f"{len(ablation.factors)} switches are"
            )
            say(f"{switches} set at once in every trial, and {len(ablation.apart)} measured beside the best")
            ablation.run()
        except KeyboardInterrupt:
            say("interrupted: this is what was found by then")
            interrupted = True
            if ablation.blocks and not ablation.fitted.effects:
                ablation.estimate()
    _show(ablation, left_out)
    command = redact(["ptfast", "ablate", *arguments, "--budget", f"{budget_s:g}s"])
    facts = {"command": command, "interrupted": interrupted, "left_out": left_out, **_receipt(ablation)}
    folder, name = write_figures("ablate", out, config, facts), label(config)
    if (confirmed := ablation.confirmed) is not None:
        names = ", ".join(technique.name for technique in ablation.picked)
        how = f"As it was given: {names or 'plain'} came to {confirmed.over_given} of it."
        if ablation.best_words:
            how = f"On: {names}; {confirmed.over_plain} plain's speed."
        comment = [f"The best config of {name} on one machine, found by ptfast ablate", how]
        write_recipe(folder / BEST, merge(arguments, ablation.best_words), {}, comment)
    return EXIT_INTERRUPTED if interrupted else EXIT_OK


def _receipt(ablation: Ablation) -> dict[str, Any]:
    """Everything that was measured, for `measure.json`."""
    laboratory, confirmed = ablation.laboratory, ablation.confirmed
    environment = (ablation.plain.facts if ablation.plain else {}).get("environment", {})
    findings = [
        vars(each) | {"technique": each.technique.name, "effect": each.effect and each.effect.receipt()}
        for each in ablation.findings
    ]
    effects = {name: getattr(confirmed, name).receipt() for name in ("over_plain", "over_given") if confirmed}
    pairs = [(*([each.name for each in term] for term in pair), more) for *pair, more in ablation.pairs]
    return {
        "environment": environment | {"usable_cores": usable_cores()},
        "budget_s": laboratory.budget_s,
        "took_s": laboratory.budget_s - laboratory.left_s,
        "timed_s": laboratory.timed_s,
        "turn_s": laboratory.turn_s,
        "seed": SEED,
        "factors": [asdict(factor) for factor in ablation.factors],
        "plan": [[list(run) for run in block] for block in ablation.blocks],
        "weights": ablation.fitted.weights,
        "process_sd": ablation.process_sd,
        "findings": findings,
        "pick": [technique.name for technique in ablation.picked],
        "pairs": pairs,
        "predicted_speedup": ablation.predicted,
        "confirmed": confirmed and vars(confirmed) | effects,
        "best": ablation.best_words,
        "blocks": [[measured.receipt() for measured in block] for block in laboratory.blocks],
    }


def _too_short(budget_s: float, needed_s: float) -> ConfigError:
    what = f"too short for this recipe: it takes about {duration(needed_s)}"
    hint = f"Give --budget {math.ceil(needed_s / 10) * 10}s"
    value = f"{budget_s:g}s"
    return ConfigError("C005", what, key="--budget", value=value, place=COMMAND_LINE, suggestion=hint)


def choose(
    meets: Collection[Need], machine: ThisMachine, *, only: Sequence[Technique] = (), compiles: bool = False
) -> tuple[list[Technique], dict[str, str]]:
    """The techniques to measure of a run that meets some needs, and why each other one is left out.

    Those named by `only` are measured whatever their class.
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
    """Why a technique is not measured; empty if it is."""
    if not technique.on:
        return "it is always on"
    here = verdict(technique, machine)
    if not here.applies:
        return here.text.removeprefix("no: ")
    for need, where in OF_THE_RUN.items():
        # Whether the data is a pack shows only when the config is composed.
        if need in technique.needs and need not in meets and need != "pack":
            return f"it acts {where}"
    if "compiler" in technique.needs and not compiles:
        return COMPILES
    if technique.family == "evaluation":
        return "it acts in evaluation, not in training"
    if technique.kind == "training" and technique.family != CHEAPER_STEPS and not is_named:
        return "it changes how fast the loss falls: ptfast race"
    return ""


def _show(ablation: Ablation, left_out: Mapping[str, str]) -> None:
    """Print the techniques by worth, those not measured and why, and the pick with its speed."""
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
                finding.verdict_text,
                "beside" if finding.is_apart else f"{math.exp(finding.expected):.2f}x",
                "-" if memory is None else f"{'-' if memory < 0 else '+'}{num_bytes(abs(memory))}",
                "-" if drift is None else f"{drift:+.1%}",
            ]
        )
    if rows:
        table(["technique", "class", "worth", "95 %", "verdict", "expect", "memory", "loss"], rows)
    known = [effect for effect in ablation.fitted.effects if effect is not None]
    if known:
        runs = [run for block in ablation.laboratory.blocks[: len(ablation.blocks)] for run in block]
        num_runs = sum(run.time is not None for run in runs)
        half = statistics.median(effect.interval()[1] / effect.ratio - 1 for effect in known)
        say(
            f"{num_runs} runs of {len(ablation.factors)} switches at once; processes of one config differ by "
            f"{ablation.process_sd or 0.0:.1%} here, and intervals reach {half:.1%} to either side"
        )
        for first, second, more in ablation.pairs:
            names = (" or ".join(each.name for each in term) for term in (first, second))
            say(f"together {math.exp(more):.2f}x of what each does alone: {', and '.join(names)}")
        if ablation.fits_poorly:
            say("some switches interact, which widens the intervals: try --only")
        if doubted := sum(weight < 0.5 for weight in ablation.fitted.weights):
            noun = "run lies" if doubted == 1 else "runs lie"
            say(f"{doubted} {noun} far from the rest; all count (their weights are in measure.json)")
    if any(finding.is_apart for finding, _ in ablation.measured):
        say("beside: measured with the pick, not in the plan")
    if any(finding.verdict_text.endswith("per step") for finding, _ in ablation.measured):
        say("faster per step: ptfast race measures if the same loss is reached sooner")
    if again := ablation.laboratory.num_again:
        say(f"{again} blocks were measured again: other processes took a core meanwhile")
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
    picked = ", ".join(technique.name for technique in ablation.picked)
    say(f"the pick: {picked or 'plain, as nothing is expected to be faster'}")
    if (confirmed := ablation.confirmed) is None:
        say("it was not confirmed: give a longer --budget")
        return
    # Effects that do not multiply predict nothing.
    predicted = "" if ablation.fits_poorly else f"predicted {ablation.predicted:.2f}x, "
    say(f"over plain: {predicted}confirmed in fresh processes {confirmed.over_plain}")
    say(f"over the config as given: {confirmed.over_given}")
    if not ablation.best_words:
        say("the config as given is no slower, so best.yaml holds that")
