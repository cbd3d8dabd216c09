"""The arms of a race: the values of a sweep, or overrides written out, each over what all have in common."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ptfast.config.checks.validate import validate
from ptfast.config.compose import compose
from ptfast.config.overrides import merge, parse
from ptfast.config.schema import Config
from ptfast.core.errors import COMMAND_LINE, ConfigError

_OWN = {"seed": "--seeds", "run.dir": "--out", "run.resume": "--out", "run.name": "--out"}
"""Keys that are set for each run of a race, and the flag that says how."""
_RATE = "optimizer.lr"


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Args:
        name: as tables show it.
        words: all its overrides, those in common included.
        own: those of its own.
    """

    name: str
    words: tuple[str, ...]
    own: tuple[str, ...]
    config: Config

    @property
    def lr(self) -> float | None:
        """Its learning rate; None where the optimizer has its own."""
        return self.config.optimizer.target.kwargs.get("lr")

    def at_rate(self, lr: float) -> Arm:
        """The same arm at another learning rate."""
        return _build(self.name, tuple(merge(self.words, [f"{_RATE}={lr:g}"])), self.own)

    @property
    def sets_rate(self) -> bool:
        """True if its own overrides say the learning rate."""
        return any(word.lstrip("+").startswith(f"{_RATE}=") for word in self.own)


def build_arms(arguments: Sequence[str], written: str | None) -> list[Arm]:
    """The arms that the words of a command mean, checked.

    Args:
        arguments: `key=value` words; those with several values, `key=a,b`, give an arm for each, several such
            words one for each combination.
        written: arms written out, overrides by spaces and arms by semicolons.

    Raises:
        ConfigError: C016 for a single arm, C011 for keys that each run has of its own, C014 for values that
            are not listed; whatever is wrong with the config of an arm.
    """
    given = parse(arguments, sweep=True)
    for argument in given:
        if flag := _OWN.get(argument.key):
            what = "is not the same for all runs of a race"
            hint = f"Leave it out; {flag} says it"
            raise ConfigError("C011", what, key=argument.key, place=COMMAND_LINE, suggestion=hint)
        if argument.is_interval:
            hint = "List the values: key=a,b"
            raise ConfigError("C014", "an interval has no arms", key=argument.key, suggestion=hint)
    common = [word for word, argument in zip(arguments, given, strict=True) if not argument.is_sweep]
    swept = [[argument.at(value) for value in argument.values] for argument in given if argument.is_sweep]
    points = [tuple(word.lstrip("+") for word in point) for point in itertools.product(*swept)]
    if written is not None:
        lines = [tuple(shlex.split(line)) for line in written.split(";")]
        points = [(*point, *line) for line in lines for point in points]
    if len(points) < 2:
        hint = (
            'Give several values, such as schedule=cosine,onecycle, or --arms "schedule=onecycle; epochs=5"'
        )
        raise ConfigError("C016", "a race takes two arms", key="race", suggestion=hint)
    return [_build(" ".join(own) or "as configured", tuple(merge(common, own)), own) for own in points]


def _build(name: str, words: tuple[str, ...], own: tuple[str, ...]) -> Arm:
    composed = compose(list(words))
    return Arm(name, words, own, validate(composed.tree, composed.place))


def describe_rates(arms: Sequence[Arm]) -> str:
    """What is to be known about the arms' learning rates where nothing was tuned for each."""
    sets = [arm.name for arm in arms if arm.sets_rate]
    tuned = "ptfast race --tune-lr gives each arm its own by find lr"
    if sets and len(sets) < len(arms):
        return f"only {', '.join(sets)} has a learning rate of its own, which favours it; {tuned}"
    rates = {arm.lr for arm in arms}
    if len(rates) == 1 and not sets and (lr := rates.pop()) is not None:
        return f"all arms train at a learning rate of {lr:g}, which may suit one better; {tuned}"
    return f"the learning rates are as configured; {tuned}" if len(rates) > 1 and not sets else ""
