"""`ptfast audit`: find slow code in a model, its data, its loop and the machine, and say how to fix it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ptfast.config.files.frozen import redact
from ptfast.config.overrides import merge
from ptfast.config.schema import Config
from ptfast.core import run_directory
from ptfast.core.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK
from ptfast.core.machine import is_memory_error
from ptfast.core.units import counted
from ptfast.launch.rank_main import out_of_memory
from ptfast.measure.audit.audit_context import Finding, Price, audit_context
from ptfast.measure.audit.model_checks import check_model
from ptfast.measure.audit.step_checks import check_data, check_loop, check_machine
from ptfast.measure.experiment.laboratory import NOT_REACHED, Comparison, Laboratory
from ptfast.measure.experiment.verdicts import judge
from ptfast.measure.outputs import check_outputs, label, write_recipe, write_results
from ptfast.report.terminal.display import Display, build_display, say, table

FIX = "--fix"
CHECKS = check_model, check_data, check_loop, check_machine
"""docs/speed/audit.md describes the findings of each check."""


def audit(
    config: Config,
    arguments: Sequence[str],
    *,
    budget_s: float,
    strict: bool,
    fix: Path | None,
    out: Path | None = None,
) -> int:
    """Train some steps, print findings with their cost per step, and write a recipe with the fixes.

    Args:
        budget_s: seconds for measuring the cost of findings; 0 skips it.
        strict: return 8 if there is a finding that the run does not fix by itself.
        fix: path of the recipe to write.
    """
    check_outputs(out, fix, FIX)
    display = build_display()
    findings: list[Finding] = []
    notes: list[str] = []
    trials: dict[str, Any] = {}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="ptfast-") as scratch,
            audit_context(config, Path(scratch), display) as context,
        ):
            for check in CHECKS:
                findings += check(context)
            if context.untraced:
                notes.append(f"operators could not be traced: {context.untraced}")
        if budget_s and any(finding.overrides and not finding.handled for finding in findings):
            trials = price_by_override(findings, arguments, budget_s, display)
            if missed := [each["overrides"] for each in trials["comparisons"] if each["why"] == NOT_REACHED]:
                notes.append(f"{NOT_REACHED}, for {', '.join(missed)}")
    except KeyboardInterrupt:
        if findings:
            show(findings, [*notes, "interrupted: these are the findings so far"])
        else:
            say("interrupted before anything was found")
        return EXIT_INTERRUPTED
    except Exception as error:
        if not is_memory_error(error):
            raise
        raise out_of_memory(config) from error
    finally:
        display.close()
    show(findings, notes)
    budget = f"--budget={budget_s:g}s" if budget_s else "--budget=0"
    command = redact(["ptfast", "audit", *arguments, budget, *["--strict"] * strict])
    records = [vars(each) | {"price": each.price and asdict(each.price)} for each in findings]
    facts = {"command": command, "environment": run_directory.environment(command), **trials}
    write_results("audit", out, config, {**facts, "notes": notes, "findings": records})
    if fix is not None:
        _write_fix(fix, config, arguments, findings)
    return EXIT_FINDINGS if strict and any(not finding.handled for finding in findings) else EXIT_OK


def price_by_override(
    findings: Sequence[Finding], arguments: Sequence[str], budget_s: float, display: Display
) -> dict[str, Any]:
    """Measure the gain of overrides in separate processes, set the prices of findings, and return records."""
    tried = {" ".join(each.overrides): each for each in findings if each.overrides and not each.handled}
    others = {name: merge(arguments, finding.overrides) for name, finding in tried.items()}
    comparison = Comparison(arguments, others)
    status = display.status("measuring the gain of overrides", budget_s)
    with Laboratory(budget_s=budget_s) as laboratory, status:
        comparison.measure(laboratory)
    effects, _ = comparison.effects()
    records: list[dict[str, Any]] = []
    for name, verdict in zip(tried, judge([effects.get(name) for name in tried]), strict=True):
        if (effect := effects.get(name)) is not None and math.isfinite(effect.se):
            ratios = effect.ratio, *effect.interval()
            prices = [comparison.median("step_s") * (1 - 1 / ratio) for ratio in ratios]
            for finding in findings:
                if " ".join(finding.overrides) == name:
                    finding.price = Price(*prices, verdict=verdict)
        record = {"overrides": name, "why": comparison.why(name), "verdict": verdict}
        records.append(record | {"effect": effect and effect.record()})
    blocks = [[{"overrides": name} | run.record() for name, run in block] for block in comparison.blocks]
    return {"budget_s": budget_s, "comparisons": records, "blocks": blocks}


def _write_fix(file: Path, config: Config, arguments: Sequence[str], findings: Sequence[Finding]) -> None:
    """Write a recipe with the overrides that keep the result, except those without a gain in a trial."""
    kept: list[Finding] = []
    left: list[Finding] = []
    for finding in findings:
        if finding.overrides and not finding.handled:
            gains = finding.price is None or finding.price.verdict in (None, "faster")
            (kept if gains and finding.kind in ("exact", "reordered") else left).append(finding)
    if not kept:
        say(f"{file} is not written: no override fixes a finding and keeps the result")
        return
    words = [word for finding in kept for word in finding.overrides]
    comment = [f"Fixes of ptfast audit for {label(config)}"]
    comment += [f"{finding.check}: {' '.join(finding.overrides)}" for finding in kept]
    comment += [f"left out ({finding.kind}): {' '.join(finding.overrides)}" for finding in left]
    write_recipe(file, merge(arguments, words), {}, comment, FIX)


def show(findings: Sequence[Finding], notes: Sequence[str]) -> None:
    """Print the findings, the most expensive first and those without a price last, and the notes."""

    def cost_s(finding: Finding) -> float:
        return finding.price.seconds if finding.price else -math.inf

    rows: list[list[str]] = []
    for each in sorted(findings, key=cost_s, reverse=True):
        handled = "handled by this config" * each.handled
        mend = "; ".join(filter(None, [" ".join(each.overrides), each.mend, handled]))
        rows.append([each.check, str(each.price or "-"), f"{each.what}; at {each.where}; fix: {mend}"])
    if rows:
        table(["check", "costs", "finding"], rows)
    for note in notes:
        say(note)
    count = sum(not finding.handled for finding in findings)
    say(counted(count, "finding") if count else "no slow code found")
