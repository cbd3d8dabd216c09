"""Findings on the screen: by area, those with a measured price first."""

from __future__ import annotations

from collections.abc import Sequence

from ptfast.measure.audit.finding import Finding
from ptfast.report.terminal.display import is_terminal, say, standard_output


def show(findings: Sequence[Finding], notes: Sequence[str]) -> None:
    """Print findings, in a table on a terminal and a line each elsewhere."""
    groups = {
        "with a measured price": sorted(
            (f for f in findings if f.price and not f.handled),
            key=lambda f: f.price.seconds if f.price else 0.0,
            reverse=True,
        ),
        "without a price": [f for f in findings if not f.price and not f.handled],
        "handled by this config": [f for f in findings if f.handled],
    }
    stream = standard_output()
    for title, group in groups.items():
        if group:
            (_table if is_terminal(stream) else _lines)(title, group)
    for note in notes:
        say(note)
    open_count = sum(not finding.handled for finding in findings)
    say(f"{open_count} finding{'s' * (open_count != 1)}" if open_count else "nothing found that costs speed")


def price(finding: Finding) -> str:
    """What a finding costs, as measured."""
    if (price := finding.price) is None:
        return ""
    if price.verdict in ("no difference", "cannot tell"):
        return price.verdict
    words = f"{price.seconds * 1e3:.3g} ms a step"
    if price.low_s is not None and price.high_s is not None:
        words += f" [{price.low_s * 1e3:.3g} to {price.high_s * 1e3:.3g}]"
    return words


def fix(finding: Finding) -> str:
    """What mends a finding, in words."""
    return "; ".join(filter(None, [" ".join(finding.overrides), finding.mend]))


def _lines(title: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        parts = [finding.area, finding.check, finding.what, f"at {finding.where}", price(finding)]
        handled = "handled" if finding.handled else ""
        say("; ".join(filter(None, [*parts, f"fix: {fix(finding)}", handled])))


def _table(title: str, findings: Sequence[Finding]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    look = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "title_justify": "left"}
    ruled = Table(title=f"{len(findings)} {title}", title_style="bold", **look)  # type: ignore[arg-type]
    ruled.add_column("area")
    ruled.add_column("finding, place, fix", overflow="fold")
    for finding in findings:
        cost = price(finding)
        costs = (f"{cost}: " if cost else "", "yellow")
        text = Text.assemble(costs, (finding.what, "bold"), "\n", (finding.where, "cyan"), "\n", fix(finding))
        ruled.add_row(finding.area, text)
    Console(highlight=False, markup=False, emoji=False).print(ruled)
