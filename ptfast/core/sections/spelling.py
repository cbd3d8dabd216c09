"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate closest to `word`, by the whole or the last part; None if none is close."""
    scored: list[tuple[float, str]] = []
    for candidate in candidates:
        given, whole = (re.sub("[- ]", "_", text.lower()) for text in (word, candidate))
        last_parts = _likeness(given.rpartition(".")[2], whole.rpartition(".")[2])
        score = max(_likeness(given, whole), last_parts - 0.01)
        is_part = len(given) >= 3 and (whole.startswith(given) or whole.endswith(given))
        scored.append((max(score, 0.7) if is_part else score, candidate))
    best_score, best = max(scored, key=lambda pair: (pair[0], -len(pair[1])), default=(0.0, ""))
    return best if best_score >= 0.6 else None


def _likeness(word: str, other: str) -> float:
    """Return the similarity of two words in [0, 1]; swapped, missing or repeated letters cost little."""
    if word == other:
        return 1.0
    if sorted(word) == sorted(other) or (set(word) == set(other) and abs(len(word) - len(other)) <= 2):
        return 0.95
    if not word or not other:
        return 0.0
    ratio = difflib.SequenceMatcher(None, word, other, autojunk=False).ratio()
    # The ratio penalizes an extra or missing letter too much in short words: `lrr` and `lr`.
    short, letters = min(word, other, key=len), iter(max(other, word, key=len))
    if abs(len(word) - len(other)) <= 1 and all(letter in letters for letter in short):
        ratio = max(ratio, 0.8)
    return ratio
