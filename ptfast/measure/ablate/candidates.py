"""Which techniques an ablation measures, in which order, and why it leaves out the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from ptfast.config.applicability import OF_THE_RUN, ThisMachine, verdict
from ptfast.config.catalogue import CATALOGUE, Need, Technique
from ptfast.config.files.presets import content

CHEAPER_STEPS = ("batching", "optimizer")
"""Families of which techniques that change the training may make a step cheaper."""
COMPILES = "it compiles: add --compile"
EVALUATES = "it acts in evaluation, not in training"
WHOLE_RUN = "it changes how fast the loss falls, not what a step costs: ptfast race"


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
