"""The designed experiment: its plan, what is estimated from it, and trials in forked processes."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ptfast.core.distributed import Ranks
from ptfast.measure.experiment.laboratory import NOT_REACHED, Comparison, Laboratory, TrialResult
from ptfast.measure.experiment.plan import (
    Block,
    Factor,
    blocks_to_tell_apart,
    compare,
    draw_blocks,
    fit,
    hadamard,
    separable,
    turn_means,
)
from ptfast.measure.experiment.trial import mean_over_ranks
from ptfast.measure.experiment.warm_parent import Request, plan_turns


@pytest.mark.parametrize("least", [2, 4, 5, 12, 13, 20, 36, 45])
def test_columns_are_orthogonal(least: int) -> None:
    matrix = hadamard(least)
    assert len(matrix) >= least
    assert (matrix @ matrix.T == len(matrix) * np.eye(len(matrix))).all()
    assert (matrix[:, 0] == 1).all()


def test_a_plan_is_balanced_and_its_pairs_are_fold_overs() -> None:
    factors = [Factor(str(number)) for number in range(11)]
    blocks = list(itertools.islice(draw_blocks(factors, seed=1), 6))
    runs = np.array([run for block in blocks for run in block])
    assert (runs.mean(axis=0) == 0.5).all()
    signs = 2 * runs - 1
    assert (signs.T @ signs == len(runs) * np.eye(11)).all()
    assert blocks == list(itertools.islice(draw_blocks(factors, seed=1), 6))
    for block in blocks:
        inverses = {tuple(1 - level for level in run) for run in block}
        assert inverses == set(block)


def test_what_is_forbidden_is_not_drawn() -> None:
    factors = [Factor("a"), Factor("b", ("plain", "one", "two", "three")), Factor("c")]
    blocks = list(itertools.islice(draw_blocks(factors, 0, lambda run: run[:2] != (1, 2)), 30))
    runs = [run for block in blocks for run in block]
    assert {run[1] for run in runs} == {0, 1, 2, 3}
    assert not any(run[:2] == (1, 2) for run in runs)


def simulate(
    effects: dict[int, float], factors: list[Factor], num_blocks: int, seed: int, process_sd: float = 0.02
) -> tuple[list[Block], list[list[float]]]:
    """Times of a plan: a block drifts as a whole, a process is as slow as it is dealt, a round is noisy."""
    draws = random.Random(seed)
    blocks = list(itertools.islice(draw_blocks(factors, seed), num_blocks))
    times = []
    for block in blocks:
        drift = draws.gauss(0, 0.1)
        own = [
            drift + draws.gauss(0, process_sd) - sum(effects.get(i, 0) * level for i, level in enumerate(run))
            for run in block
        ]
        times.append(turn_means([[time + draws.gauss(0, 0.01) for time in own] for _ in range(4)]))
    return blocks, times


def test_turns_are_on_the_same_batches_or_equally_long() -> None:
    def warm(step_s: float, steps: int, lead_steps: int) -> dict[str, float]:
        return {"step_s": step_s, "least_turn_s": step_s, "lead_steps": lead_steps, "steps": steps}

    request = Request([], turn_s=0.05)
    assert plan_turns(request, [warm(0.01, 9, 1), warm(0.02, 5, 0)]) == [(5, 1, 0), (5, 1, 4)]
    # A step of the one takes as long as 300 of the other.
    assert plan_turns(request, [warm(0.09, 5, 0), warm(0.0003, 900, 1)]) == [(1, 0, 0), (167, 1, 0)]


def test_a_rank_alone_asks_no_device_for_its_time() -> None:
    """One that computes nothing, such as an emulated GPU, would let a warm-up go on forever."""
    alone = SimpleNamespace(ranks=Ranks(), device=torch.device("meta"))
    assert mean_over_ranks(0.5, alone) == 0.5  # type: ignore[arg-type]


def test_a_plan_has_as_many_factors_as_its_blocks_separate() -> None:
    factors = [Factor(str(number)) for number in range(20)]
    assert separable(factors, 12) == factors
    few = separable(factors, 6)
    assert len(few) == 11
    fitted = fit(few, *simulate({0: 0.2}, few, 6, seed=0))
    assert all(effect is not None for effect in fitted.effects)
    assert len(separable(factors, 0)) == 1


def test_one_level_has_no_effect() -> None:
    assert fit([Factor("loader", ("plain",))], [((0,), (0,))], [[0.1, 0.2]]).effects == []
    assert fit([Factor("0")], [((0,), (0,))], [[0.1, math.nan]]).effects == [None]


@pytest.mark.parametrize("num_switches", [6, 9, 14])
def test_enough_blocks_tell_all_effects_apart(num_switches: int) -> None:
    factors = [Factor("any", ("a", "b", "c", "d")), *(Factor(str(n)) for n in range(num_switches))]
    fitted = fit(factors, *simulate({1: 0.2}, factors, blocks_to_tell_apart(factors), seed=0))
    degrees = {effect.dof for effect in fitted.effects if effect is not None}
    assert degrees == {fitted.dof}
    assert fitted.dof >= 3


def test_effects_are_found_and_their_intervals_cover_them() -> None:
    factors = [Factor(str(number)) for number in range(20)]
    truth = {0: 0.2, 1: 0.1, 2: -0.1}
    covered = found = 0
    for seed in range(20):
        fitted = fit(factors, *simulate(truth, factors, blocks_to_tell_apart(factors), seed))
        for index, effect in enumerate(fitted.effects):
            assert effect is not None
            low, high = effect.interval()
            covered += low <= math.exp(truth.get(index, 0.0)) <= high
        found += all(fitted.shrunk[index] > 0.05 for index in (0, 1))
        assert abs(fitted.shrunk[0]) < abs(fitted.effects[0].log_ratio)
    assert covered >= 0.93 * 20 * 20
    assert found >= 18


def test_a_lost_run_leaves_the_rest_as_it_is() -> None:
    factors = [Factor(str(number)) for number in range(4)]
    blocks, times = simulate({0: 0.2}, factors, 10, seed=3)
    times[2][1] = math.nan
    effect = fit(factors, blocks, times).effects[0]
    assert effect is not None
    assert effect.dof == 3 * 10 - 1 - 4
    low, high = effect.interval()
    assert low < math.exp(0.2) < high


def test_one_disturbed_turn_hardly_moves_the_mean_of_a_process() -> None:
    times = [[0.0, 0.1, 0.2, 0.3] for _ in range(8)]
    times[3][1] += 1.0
    assert turn_means(times) == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=0.01)


@pytest.mark.parametrize(("num_switches", "num_blocks"), [(2, 4), (6, 5), (6, 8), (12, 24)])
def test_a_disturbed_process_widens_intervals_and_does_not_deceive(
    num_switches: int, num_blocks: int
) -> None:
    factors = [Factor(str(number)) for number in range(num_switches)]
    covered = total = 0
    widened = list[float]()
    for seed in range(40):
        blocks, times = simulate({0: 0.1}, factors, num_blocks, seed, process_sd=0.01)
        calm = fit(factors, blocks, times)
        times[seed % num_blocks][seed % 4] += 0.4
        disturbed = fit(factors, blocks, times)
        for index, effect in enumerate(disturbed.effects):
            assert effect is not None
            low, high = effect.interval()
            covered += low <= math.exp(0.1 * (index == 0)) <= high
            total += 1
        widened.append(disturbed.residual_sd / calm.residual_sd)
    assert covered >= 0.92 * total
    # By least squares they would be six to twelve times as wide.
    if 2 * fit(factors, blocks, times).dof >= 4 * num_blocks:
        assert np.median(widened) < 4


def test_configs_are_compared_within_the_blocks_that_they_share() -> None:
    draws, covered = np.random.default_rng(0), 0
    gains = {"base": 0.0, "a": 0.1, "b": 0.0}
    for _ in range(100):
        blocks = []
        for names in (["base", "a", "a", "base"], ["base", "b", "base"], ["b", "a", "base", "b"]):
            drift = draws.normal(0, 0.1)
            blocks.append([(name, drift + draws.normal(0, 0.02) - gains[name]) for name in names])
        blocks[2].append(("lost", math.nan))
        effects, fitted = compare("base", blocks)
        assert effects.keys() == {"a", "b"}
        assert fitted.dof == 11 - 3 - 2
        for name, effect in effects.items():
            low, high = effect.interval()
            covered += low <= math.exp(gains[name]) <= high
    assert covered >= 180
    assert compare("base", [])[0] == {}


class Clock(Laboratory):
    """A laboratory whose blocks take ten seconds each, and in which every config is as fast as its number."""

    def measure(self, configs: Sequence[Sequence[str]]) -> list[TrialResult]:
        self.budget_s, self.block_s = self.budget_s - 10, 10.0
        found = [
            TrialResult(
                (name,), math.nan if name == "bad" else -math.log(float(name)), "lost" * (name == "bad")
            )
            for (name,) in configs
        ]
        self.blocks.append(found)
        return found


def test_a_comparison_takes_its_configs_in_turn_while_the_budget_lasts() -> None:
    comparison = Comparison(["1"], {name: [name] for name in ("2", "bad", "3", "4", "5")})
    comparison.measure(Clock(budget_s=35))
    effects, _ = comparison.effects()
    assert {name: round(effect.ratio, 6) for name, effect in effects.items()} == {
        name: float(name) for name in ("2", "3", "4", "5")
    }
    assert [comparison.why(name) for name in ("2", "bad", "5")] == ["", "lost", ""]
    short = Comparison(["1"], {name: [name] for name in ("2", "3", "4", "5")})
    short.measure(Clock(budget_s=5))
    assert short.why("5") == NOT_REACHED
    alone = Comparison(["1"], {"2": ["2"]})
    alone.measure(Clock(budget_s=5))
    assert [name for name, _ in alone.blocks[0]] == ["base", "2", "2", "base"]


def test_a_failing_trial_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    brief = functools.partial(Request, warm_s=0.1)
    monkeypatch.setattr("ptfast.measure.experiment.laboratory.Request", brief)
    words = ["data=digits", "model=mlp", "model.hidden=[16]", "device=cpu", "preset=plain"]
    configs = [
        words,
        [*words, "batch_size=100000", "dataloader.drop_last=true"],
        [*words, "optimizer=lamb"],
        words,
    ]
    with Laboratory(budget_s=300, timed_s=0.1) as laboratory:
        first, failed, other, again = laboratory.measure(configs)
        process = laboratory._process
    assert not process.is_alive()
    assert math.isnan(failed.time)
    assert failed.why
    for trial in (first, other, again):
        assert math.isfinite(trial.time)
        assert len(trial.facts["times"]) == 4
    # The same batches and weights in every process.
    assert first.facts["loss"] == again.facts["loss"] != other.facts["loss"]
