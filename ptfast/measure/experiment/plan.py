"""The plan of an experiment: which levels each run has, so that every run informs every switch.

Runs come in blocks of four, two fold-over pairs: the second of a pair has every two-level switch the other
way round. A block is measured at the same time, so that what drifts takes all four along and cancels.

Source: Box, Hunter and Hunter, Statistics for Experimenters, chapters 5 and 6; Plackett and Burman 1946.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, ...]
"""The level of each factor; 0 is the one that others are compared with."""
Block = tuple[Run, Run, Run, Run]
_REDRAWS = 50
T = TypeVar("T")


@dataclass(frozen=True)
class Factor:
    """A switch, or a group of alternatives of which a run has one.

    Args:
        levels: by name, the one to compare with first.
    """

    name: str
    levels: tuple[str, ...] = ("off", "on")


def draw_blocks(
    factors: Sequence[Factor], seed: int, is_allowed: Callable[[Run], bool] = lambda run: True
) -> Iterator[Block]:
    """The blocks of a balanced plan, without end, the same for the same seed.

    Two-level factors follow the columns of a Hadamard matrix, which are orthogonal; factors of more levels
    take all pairs of levels equally often. Rows are in random order; a run not allowed is drawn again.
    """
    rng = random.Random(seed)
    pairs = _pairs(factors, rng)
    while True:
        runs = [run for _ in range(2) for run in _allowed_pair(next(pairs), factors, rng, is_allowed)]
        rng.shuffle(runs)
        yield runs[0], runs[1], runs[2], runs[3]


def _pairs(factors: Sequence[Factor], rng: random.Random) -> Iterator[tuple[list[int], list[int]]]:
    """Fold-over pairs without end: the rows of one matrix after another, columns and signs drawn anew."""
    matrix = hadamard(len(factors) + 1)
    alternatives = {
        index: itertools.cycle(_shuffled(itertools.permutations(range(len(factor.levels)), 2), rng))
        for index, factor in enumerate(factors)
        if len(factor.levels) > 2
    }
    while True:
        columns = rng.sample(range(1, len(matrix)), len(factors))
        flips = [rng.random() < 0.5 for _ in factors]
        for row in _shuffled(range(len(matrix)), rng):
            first = [
                int(bool(matrix[row, column] > 0) != flip)
                for column, flip in zip(columns, flips, strict=True)
            ]
            second = [1 - level for level in first]
            for index, levels in alternatives.items():
                first[index], second[index] = next(levels)
            yield first, second


def _allowed_pair(
    pair: tuple[list[int], list[int]],
    factors: Sequence[Factor],
    rng: random.Random,
    is_allowed: Callable[[Run], bool],
) -> tuple[Run, Run]:
    """A pair as runs, with random levels changed on both sides until both are allowed."""
    first, second = pair
    for _ in range(_REDRAWS):
        runs = tuple(first), tuple(second)
        if all(map(is_allowed, runs)):
            return runs
        index = rng.randrange(len(factors))
        first[index], second[index] = second[index], first[index]
    plain = tuple(0 for _ in factors)
    return plain, plain


def indicators(factors: Sequence[Factor], run: Run) -> NDArray[np.float64]:
    """1 for the level above 0 that each factor has in a run, in the order of `columns`."""
    return np.array([float(run[index] == level) for index, level in columns(factors)])


def columns(factors: Sequence[Factor]) -> list[tuple[int, int]]:
    """The effects to estimate: each factor, at each of its levels above 0."""
    return [(index, level) for index, factor in enumerate(factors) for level in range(1, len(factor.levels))]


def hadamard(least: int) -> NDArray[np.int64]:
    """The smallest matrix of at least `least` rows of +1 and -1, all orthogonal, that two constructions give.

    Paley's for the sizes q + 1 with q a prime of 4k + 3, and Sylvester's doubling of these.
    """
    sizes = (
        (2**doublings * base, base)
        for doublings in range(12)
        for base in (2, *(q + 1 for q in range(3, 4 * least + 8, 4) if _is_prime(q)))
    )
    size, base = min(found for found in sizes if found[0] >= least)
    matrix = np.array([[1, 1], [1, -1]]) if base == 2 else _paley(base - 1)
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _paley(q: int) -> NDArray[np.int64]:
    squares = {value * value % q for value in range(1, q)}
    residue = np.array([0, *(1 if value in squares else -1 for value in range(1, q))])
    jacobsthal = residue[np.subtract.outer(np.arange(q), np.arange(q)) % q]
    matrix = np.ones((q + 1, q + 1), np.int64)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = jacobsthal + np.eye(q, dtype=np.int64)
    # Signs of rows, so that the first column is all ones and drops out as the mean.
    return matrix * matrix[:, :1]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))


def _shuffled(values: Iterable[T], rng: random.Random) -> list[T]:
    found = list(values)
    rng.shuffle(found)
    return found
