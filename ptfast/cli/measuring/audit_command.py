"""`ptfast audit`: reads what is asked for, and calls the audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ptfast.cli.flags import read_seconds
from ptfast.cli.typed_config import read_typed


def audit(flags: dict[str, Any], arguments: list[str]) -> int:
    """Audit the config that the arguments mean.

    Raises:
        PtfastError: whatever is wrong with the config, or stops its first steps.
    """
    budget_s = 0.0 if flags.get("--budget") == "0" else read_seconds(flags, "--budget", "2m")
    composed, config = read_typed(arguments)
    with composed.naming_places():
        from ptfast.measure.audit.audit_run import audit

        return audit(
            config,
            arguments,
            budget_s=budget_s,
            strict="--strict" in flags,
            fix=Path(flags["--fix"]).expanduser() if "--fix" in flags else None,
            out=Path(flags["--out"]).expanduser() if "--out" in flags else None,
        )
