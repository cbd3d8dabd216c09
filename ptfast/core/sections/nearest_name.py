"""The valid name nearest to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `word` is most likely a misspelling of, or None if none is near.

    Besides the share of common letters, swapped, missing, added and repeated letters are recognised, and so
    is a word that matches only the last part of a dotted candidate.
    """
    word_plain = _plain(word)
    scored = [(_score(word_plain, candidate), candidate) for candidate in candidates]
    best_score, best = max(scored, key=lambda pair: (pair[0], -len(pair[1])), default=(0.0, ""))
    return best if best_score >= 0.6 else None


def did_you_mean(word: str, candidates: Iterable[str], template: str = "{}") -> str | None:
    """The sentence `Did you mean lr?` for the candidate nearest to `word`, or None.

    Args:
        word: what was given.
        candidates: what would be valid.
        template: how the candidate is shown, e.g. `optimizer.{}`.
    """
    found = nearest(word, candidates)
    return None if found is None else f"Did you mean {template.format(found)}?"


def _score(word: str, candidate: str) -> float:
    """Likeness from 0 to 1 of a plain word to a candidate."""
    whole = _plain(candidate)
    last = _plain(candidate.rpartition(".")[2])
    score = max(_likeness(word, whole), _likeness(word.rpartition(".")[2], last) - 0.01)
    if len(word) >= 3 and (whole.startswith(word) or whole.endswith(word)):
        score = max(score, 0.7)
    return score


def _likeness(word: str, other: str) -> float:
    if word == other:
        return 1.0
    if sorted(word) == sorted(other) or (set(word) == set(other) and abs(len(word) - len(other)) <= 2):
        return 0.95
    if not word or not other:
        return 0.0
    ratio = SequenceMatcher(None, word, other, autojunk=False).ratio()
    # One letter too many or too few weighs heavily in a short word: `lrr` and `lr`.
    if abs(len(word) - len(other)) <= 1 and _is_subsequence(*sorted((word, other), key=len)):
        ratio = max(ratio, 0.8)
    return ratio


def _is_subsequence(short: str, long: str) -> bool:
    letters = iter(long)
    return all(letter in letters for letter in short)


def _plain(word: str) -> str:
    return word.lower().replace("-", "_").replace(" ", "_")
