"""A designed experiment: the plan, in which every run informs all switches, and the estimates.

Runs come in blocks of four, two fold-over pairs: the second run of a pair flips every two-level switch of
the first. The runs of a block are measured at the same time, so that drift affects all four and cancels.

Times are logarithms of seconds per token or sample. Errors are computed between processes, because turns of
one process cannot show them.
Sources: Box, Hunter and Hunter, Statistics for Experimenters, chapters 5 and 6; Plackett and Burman 1946;
Kalibera and Jones 2013; Efron and Morris 1975 (https://doi.org/10.1080/01621459.1975.10479864) for the
shrinkage; Huber 1981, chapter 7, for the robust fit.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ptfast.measure.experiment.verdicts import Effect

Run = tuple[int, ...]
"""The level of each factor; level 0 is the baseline."""
Block = Sequence[Run]
Floats = NDArray[np.float64]
Name = TypeVar("Name")
_REDRAWS, _ITERATIONS = 50, 10
SPARE_DOF = 3
"""Degrees of freedom that a plan leaves for the error."""
HUBER_K = 1.345


@dataclass(frozen=True)
class Factor:
    """A switch, or a group of mutually exclusive alternatives."""

    name: str
    levels: tuple[str, ...] = ("off", "on")
    """Names, starting with the baseline."""


def draw_blocks(
    factors: Sequence[Factor], seed: int, is_allowed: Callable[[Run], bool] = lambda run: True
) -> Iterator[Block]:
    """Yield the blocks of a balanced plan forever; the same seed gives the same blocks.

    Two-level factors follow the columns of a Hadamard matrix, which are orthogonal; factors of more levels
    take all pairs of levels equally often. Rows are in random order; a run that is not allowed is redrawn.
    """
    rng, matrix = random.Random(seed), hadamard(len(factors) + 1)
    alternatives: dict[int, Iterator[tuple[int, ...]]] = {}
    for index, factor in enumerate(factors):
        if len(factor.levels) > 2:
            levels = list(itertools.permutations(range(len(factor.levels)), 2))
            rng.shuffle(levels)
            alternatives[index] = itertools.cycle(levels)
    while True:
        # Each pass uses the matrix with newly drawn columns and signs.
        chosen = rng.sample(range(1, len(matrix)), len(factors))
        flips = [rng.random() < 0.5 for _ in factors]
        rows = list(range(len(matrix)))
        rng.shuffle(rows)
        runs: list[Run] = []
        for row in rows:
            signs = (bool(matrix[row, column] > 0) for column in chosen)
            first = [int(sign != flip) for sign, flip in zip(signs, flips, strict=True)]
            second = [1 - level for level in first]
            for index, pairs in alternatives.items():
                first[index], second[index] = next(pairs)
            # Random levels of the pair are swapped until both runs are allowed.
            for _ in range(_REDRAWS):
                pair = tuple(first), tuple(second)
                if all(map(is_allowed, pair)):
                    break
                index = rng.randrange(len(factors))
                first[index], second[index] = second[index], first[index]
            else:
                plain = tuple(0 for _ in factors)
                pair = plain, plain
            runs += pair
            if len(runs) == 4:
                rng.shuffle(runs)
                yield tuple(runs)
                runs = []


def columns(factors: Sequence[Factor]) -> list[tuple[int, int]]:
    """Return the effects to estimate: each factor at each of its levels above 0."""
    return [(index, level) for index, factor in enumerate(factors) for level in range(1, len(factor.levels))]


def blocks_to_tell_apart(factors: Sequence[Factor]) -> int:
    """Return the number of blocks that a plan needs to estimate all effects jointly, with their errors.

    A block has three comparisons; fold-over pairs leave two of them for two-level switches. A whole matrix
    separates all of these switches, and so does a part of one with two extra blocks.
    """
    num_switches = sum(len(factor.levels) == 2 for factor in factors)
    of_switches = min(math.ceil(num_switches / 2) + 2, len(hadamard(len(factors) + 1)) // 2)
    return max(math.ceil((len(columns(factors)) + SPARE_DOF) / 3), of_switches)


def separable(factors: Sequence[Factor], num_blocks: float) -> list[Factor]:
    """Return the first factors, at least one, whose effects `num_blocks` can estimate jointly."""
    count = len(factors)
    while count > 1 and blocks_to_tell_apart(factors[:count]) > num_blocks:
        count -= 1
    return [*factors[:count]]


def hadamard(least: int) -> NDArray[np.int64]:
    """Return the smallest Hadamard matrix with at least `least` rows from two constructions.

    Paley's gives sizes q + 1 for primes q of the form 4k + 3; Sylvester's doubles a matrix.
    """
    sizes = (
        (2**doublings * base, base)
        for doublings in range(12)
        for base in (2, *(q + 1 for q in range(3, 4 * least + 8, 4) if all(q % k for k in range(2, q))))
    )
    size, base = min(found for found in sizes if found[0] >= least)
    matrix = np.array([[1, 1], [1, -1]])
    if base > 2:
        q = base - 1
        squares = {value * value % q for value in range(1, q)}
        residue = np.array([0, *(1 if value in squares else -1 for value in range(1, q))])
        matrix = np.ones((base, base), np.int64)
        matrix[1:, 0] = -1
        differences = np.subtract.outer(np.arange(q), np.arange(q)) % q
        matrix[1:, 1:] = residue[differences] + np.eye(q, dtype=np.int64)
        # Flip signs of rows, so that the first column is all ones and drops out as the mean.
        matrix = matrix * matrix[:, :1]
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@dataclass(frozen=True)
class Fit:
    """The estimated effects of a plan."""

    effects: list[Effect | None]
    """One for each level, in the order of `columns`; None if the runs cannot separate it from others."""
    shrunk: list[float]
    """Expected log ratios: the effects, corrected for selection bias."""
    residual_sd: float
    """Standard deviation between processes of one block, as a logarithm."""
    dof: float
    """Degrees of freedom of `residual_sd`."""


def turn_means(times: Sequence[Sequence[float]]) -> list[float]:
    """Return the log time of each process measured in turns, with the effect of slow rounds removed."""
    values = np.asarray(times, np.float64)
    num_rounds, processes = values.shape
    of_rounds = np.repeat(np.eye(num_rounds), processes, axis=0)[:, 1:]
    design = np.hstack([of_rounds, np.tile(np.eye(processes), (num_rounds, 1))])
    found, _ = _huber(design, values.ravel(), max((num_rounds - 1) * (processes - 1), 1))
    return [float(mean) for mean in found[num_rounds - 1 :] + found[: num_rounds - 1].sum() / num_rounds]


def fit(factors: Sequence[Factor], blocks: Sequence[Block], times: Sequence[Sequence[float]]) -> Fit:
    """Estimate the effects of all levels of all factors jointly.

    Runs are assigned at random, so a disturbed process only widens the intervals of least squares. Huber's
    estimator keeps them narrow, but is reliable only if half of the runs are left for the error.

    Args:
        times: log times of the runs of each block; `nan` for a failed run.
    """
    rows, values, num_blocks = [np.zeros((0, len(columns(factors))))], [np.zeros(0)], 0
    for block, block_times in zip(blocks, times, strict=True):
        # Levels above 0 are one-hot encoded; the means of the block are subtracted below.
        levels = np.array([[float(run[i] == level) for i, level in columns(factors)] for run in block])
        there, logs = np.isfinite(block_times), np.asarray(block_times)
        if there.any():
            num_blocks += 1
            rows.append(levels[there] - levels[there].mean(axis=0))
            values.append(logs[there] - logs[there].mean())
    design, found = np.concatenate(rows), np.concatenate(values)
    inverse = np.linalg.pinv(design)
    # A level whose column is a linear combination of others has no estimate.
    known = np.isclose(np.diag(inverse @ design), 1)
    dof = len(design) - num_blocks - (int(np.linalg.matrix_rank(design)) if design.size else 0)
    slopes, sd = inverse @ found, math.inf
    if dof > 0 and 2 * dof >= len(design):
        slopes, sd = _huber(design, found, dof)
    elif dof > 0:
        sd = float(np.linalg.norm(found - design @ slopes)) / math.sqrt(dof)
    scales = np.sqrt((inverse**2).sum(axis=1))
    effects = [
        Effect(-float(slope), sd * float(scale), max(dof, 1)) if is_known else None
        for slope, scale, is_known in zip(slopes, scales, known, strict=True)
    ]
    return Fit(effects, shrink(effects), sd, max(dof, 1))


def compare(base: Name, blocks: Sequence[Sequence[tuple[Name, float]]]) -> tuple[dict[Name, Effect], Fit]:
    """Return the speed-up of each config over `base`, and the fit.

    Args:
        blocks: the configs measured at the same time, each with its name and log time.
    """
    names = list(dict.fromkeys([base, *(name for block in blocks for name, _ in block)]))
    runs = [[(names.index(name),) for name, _ in block] for block in blocks]
    fitted = fit([Factor("config", tuple(map(str, names)))], runs, [[time for _, time in b] for b in blocks])
    known = zip(names[1:], fitted.effects, strict=True)
    return {name: effect for name, effect in known if effect is not None}, fitted


def shrink(effects: Sequence[Effect | None]) -> list[float]:
    """Return the expected log ratios of effects: estimates shrunk toward 0, as the best are partly lucky.

    Empirical Bayes: true log ratios are assumed normal around 0, with the variance not explained by errors.
    """
    known = [effect for effect in effects if effect is not None]
    if not known:
        return [0.0] * len(effects)
    true = max(0.0, float(np.mean([effect.log_ratio**2 - effect.se**2 for effect in known])))
    return [
        0.0 if effect is None or not true else effect.log_ratio * true / (true + effect.se**2)
        for effect in effects
    ]


def _huber(design: Floats, values: Floats, dof: float) -> tuple[Floats, float]:
    """Return the slopes by Huber's estimator, which downweights outliers, and the error's deviation."""
    slopes, distances, limit = np.zeros(design.shape[1]), np.zeros(len(values)), 1.0
    for _ in range(_ITERATIONS):
        root = np.sqrt(limit / np.maximum(distances, limit))
        slopes = np.linalg.lstsq(design * root[:, None], values * root, rcond=None)[0].astype(np.float64)
        distances = np.abs(values - design @ slopes)
        limit = max(HUBER_K * 1.4826 * float(np.median(distances)) * math.sqrt(len(values) / dof), 1e-12)
    trusted = float(np.mean(distances <= limit))
    correction = (1 + (1 - dof / len(values)) * (1 - trusted) / trusted) / trusted
    return slopes, correction * float(np.linalg.norm(np.minimum(distances, limit))) / math.sqrt(dof)
