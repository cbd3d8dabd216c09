"""Files and texts into arrays."""

from __future__ import annotations

from ptfast.core.sections.section import Family

FAMILY = Family(panel=lambda skips_unreadable: {"corrupt files": "skipped" if skips_unreadable else None})
