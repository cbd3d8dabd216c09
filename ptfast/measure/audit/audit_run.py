"""`ptfast audit`: what in a model, its data, its loop and the machine costs speed, and what mends it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ptfast.config.compose import Composed
from ptfast.config.schema import Config
from ptfast.core.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK
from ptfast.core.machine import is_memory_error
from ptfast.launch.rank_main import out_of_memory
from ptfast.measure.audit import data_checks, loop_checks, machine_checks, model_checks
from ptfast.measure.audit.audit_report import show
from ptfast.measure.audit.examined import Examined, examining
from ptfast.measure.audit.finding import Finding
from ptfast.report.terminal.display import Display, build_display

Check = Callable[[Examined], Iterator[Finding]]
AREAS: dict[str, tuple[Check, ...]] = {
    "model": model_checks.CHECKS,
    "data": data_checks.CHECKS,
    "loop": loop_checks.CHECKS,
    "machine": machine_checks.CHECKS,
}
"""All checks: a function's name is that of the check, its docstring what it finds."""


def audit(
    composed: Composed,
    config: Config,
    arguments: Sequence[str],
    *,
    strict: bool = False,
    fix: Path | None = None,
) -> int:
    """Train for some steps, print what costs speed in them, and write a recipe that mends what overrides can.

    Args:
        strict: return 8 where something is found that the run does not mend itself.
        fix: file of the recipe.

    Returns:
        0 or 8; 130 where Ctrl-C has ended it, with what was found by then.

    Raises:
        PtfastError: whatever would stop the run in its first steps.
    """
    display, findings, notes, interrupted = build_display(), list[Finding](), list[str](), False
    try:
        with tempfile.TemporaryDirectory(prefix="ptfast-") as name:
            examine(config, Path(name), display, findings, notes)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        display.close()
    show(findings, notes + ["interrupted: this is what was found so far"] * interrupted)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FINDINGS if strict and any(not finding.handled for finding in findings) else EXIT_OK


def examine(
    config: Config, folder: Path, display: Display, findings: list[Finding], notes: list[str]
) -> None:
    """Add to `findings` what the checks find in some steps of a run, and to `notes` what they cannot see."""
    try:
        with examining(config, folder, display) as examined:
            findings += run_checks(examined)
            if examined.untraced:
                notes.append(f"operators of the model could not be traced: {examined.untraced}")
    except Exception as error:
        if not is_memory_error(error):
            raise
        raise out_of_memory(config) from error


def run_checks(examined: Examined, areas: Iterable[str] = AREAS) -> Iterator[Finding]:
    """Yield what each check finds, area by area."""
    for area in areas:
        for check in AREAS[area]:
            for finding in check(examined):
                yield replace(finding, area=area, check=name_of(check))


def name_of(check: Check) -> str:
    """The name of a check, in words."""
    return check.__name__.replace("_", " ")
