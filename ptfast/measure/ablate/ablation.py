"""The plan of an ablation: each technique added to plain, a stack built of them, each taken out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ptfast.config.catalogue import CATALOGUE, Technique
from ptfast.config.overrides import merge
from ptfast.measure.trials.comparison import Arm, Comparison
from ptfast.measure.trials.session import Session
from ptfast.measure.trials.verdicts import Effect, shrink

PLAIN, START = Arm("plain", ("preset=plain",)), Arm("as given")
ADDING, CHECKING = 0.6, 0.2
"""Parts of the budget: of what is left for adding to plain, and of all for measuring the stack afresh."""
AT_ONCE = 2
"""Processes that are started together."""
NOT_REACHED = "not reached"


@dataclass
class Step:
    """A technique tried on the stack.

    Args:
        comparison: of the stack with it against the stack without it.
        replaces: an alternative that it takes the place of.
        is_kept: it is in the stack from here on.
    """

    technique: Technique
    comparison: Comparison
    replaces: Technique | None = None
    is_kept: bool = False


class Ablation:
    """Measures techniques, the most telling figures first, within what is left of a session's budget.

    Args:
        session: calibrated.
        techniques: to measure, in this order.
        on_done: called after each comparison with its heading.
    """

    def __init__(
        self,
        session: Session,
        techniques: Sequence[Technique],
        on_done: Callable[[str, Comparison], None] = lambda *_: None,
    ) -> None:
        self.session, self.techniques, self._on_done = session, techniques, on_done
        self.added: dict[str, Comparison] = {}
        """Against plain, by technique."""
        self.steps: list[Step] = []
        """Of building the stack, in order."""
        self.stack: list[Technique] = []
        self.removed: dict[str, Comparison] = {}
        """The stack against itself without a technique."""
        self.over_plain: Comparison | None = None
        """The stack in new processes, against plain."""
        self.over_start: Comparison | None = None
        """The same against the config as it was given."""
        self._reserve_s = CHECKING * session.left_s

    def run(self) -> None:
        """Measure all of it, as far as the budget goes."""
        num_added = -1
        # What is left over by a stack that was built soon goes to techniques that were not reached.
        while len(self.added) > num_added:
            num_added = len(self.added)
            self.add_each()
            self.build_stack()
        self.check_stack()
        self.remove_each()

    def add_each(self) -> None:
        """Measure each technique that has not been yet, added to plain."""
        end_s = self._reserve_s + (1 - ADDING) * (self.session.left_s - self._reserve_s)
        arms = {t.name: self._arm([t], f"plain + {t.name}") for t in self.techniques}
        waiting = self.not_reached
        while waiting:
            technique, seconds = waiting[0], self._share(len(waiting), end_s)
            if seconds is None:
                break
            if arms[technique.name] not in self.session.pool.alive:
                self.session.prepare(PLAIN, *(arms[t.name] for t in waiting[:AT_ONCE]))
            comparison = self.session.compare(PLAIN, arms[technique.name], seconds=seconds)
            self.added[technique.name] = comparison
            self._on_done(f"plain + {technique.name}", comparison)
            waiting.pop(0)

    def build_stack(self) -> None:
        """Add to the stack, the best first, what makes it faster; alternatives take each other's place."""
        tried = [step.technique for step in self.steps]
        waiting = [t for t in self._best_first() if t not in tried and self.is_allowed(t)]
        while waiting:
            technique = waiting.pop(0)
            kin = technique.alternatives
            rival = next((t for t in self.stack if kin is not None and t.alternatives == kin), None)
            if rival is not None and not self._may_beat(technique, rival):
                continue
            if not self.stack:
                step = Step(technique, self.added[technique.name])
            else:
                seconds = self._share(len(waiting) + 1, self._reserve_s)
                if seconds is None:
                    break
                grown = [t for t in self.stack if t is not rival] + [technique]
                over = f" for {rival.name}" if rival else ""
                comparison = self.session.compare(
                    self._arm(self.stack),
                    self._arm(grown, f"stack + {technique.name}{over}"),
                    seconds=seconds,
                )
                self._on_done(f"stack + {technique.name}{over}", comparison)
                step = Step(technique, comparison, rival)
            step.is_kept = self._is_confirmed(step.comparison, len(waiting) + 1)
            self.steps.append(step)
            if step.is_kept:
                self.stack = [t for t in self.stack if t is not rival] + [technique]

    def check_stack(self) -> None:
        """Measure the stack in new processes, against plain and against the config as it was given."""
        winner = self._arm(self.stack)
        seconds = max(self._reserve_s, CHECKING * self.session.left_s) / 2
        if self.stack:
            self.over_plain = self.session.compare(PLAIN, winner, seconds=seconds, fresh=True)
            self._on_done(f"{winner.name} again, over plain", self.over_plain)
        self.over_start = self.session.compare(START, winner, seconds=seconds)
        self._on_done(f"{winner.name} over the config as given", self.over_start)
        self._reserve_s = 0.0

    def remove_each(self) -> None:
        """Measure what each technique is worth in the stack, but for one that was just added to it."""
        whole = self._arm(self.stack)
        known: dict[str, Comparison] = {}
        if len(self.stack) > 1 and self.steps[-1].is_kept:
            known[self.stack[-1].name] = self.steps[-1].comparison
        self.removed |= known
        waiting = [t for t in self.stack if t.name not in known] if len(self.stack) > 1 else []
        while waiting and (seconds := self._share(len(waiting), 0.0)) is not None:
            technique = waiting.pop(0)
            rest = self._arm([t for t in self.stack if t is not technique], f"stack - {technique.name}")
            comparison = self.session.compare(rest, whole, seconds=seconds)
            self.removed[technique.name] = comparison
            self._on_done(f"stack - {technique.name}", comparison)

    def is_allowed(self, technique: Technique) -> bool:
        """Return True if a technique may be in the best config without being asked for.

        What leaves the result as it is may, up to rounding. Lower precision may where the config as given has
        some, and what changes the training where that very thing is on there.
        """
        if technique.kind in ("exact", "reordered"):
            return True
        reduced = [each for each in CATALOGUE if each.kind == "reduced" and each.on]
        kin = reduced if technique.kind == "reduced" else [technique]
        return any(self.session.is_same(START, Arm(START.name, each.on)) for each in kin)

    @property
    def not_reached(self) -> list[Technique]:
        """Techniques that the budget has had no time for."""
        return [technique for technique in self.techniques if technique.name not in self.added]

    @property
    def promised(self) -> float:
        """The speed-up over plain to expect of the stack, less what the choice of its steps owes to luck."""
        allowed = [t.name for t in self.techniques if self.is_allowed(t)]
        tried = [c.effect for name, c in self.added.items() if name in allowed and c.effect is not None]
        gains = [step.comparison.effect for step in self.steps if step.is_kept]
        return math.exp(sum(shrink(effect, tried) for effect in gains if effect is not None))

    @property
    def best(self) -> Arm:
        """The faster of the stack and the config as given; plain where nothing is known to be faster."""
        if self.over_start is not None and (effect := self.over_start.effect) is not None:
            return START if effect.log_ratio < 0 else self._arm(self.stack)
        return self._arm(self.stack)

    def _arm(self, techniques: Iterable[Technique], name: str = "") -> Arm:
        """Plain with techniques on."""
        words: list[str] = []
        for technique in techniques:
            words = merge(words, technique.on)
        return Arm(name or ("stack" if words else PLAIN.name), tuple(merge(PLAIN.overrides, words)))

    def _is_confirmed(self, comparison: Comparison, num_left: int) -> bool:
        """Return True if a gain is one in a further pair of processes, too, where there is time for that."""
        if not _is_gain(comparison.effect):
            return False
        seconds = self._share(num_left, self._reserve_s)
        if seconds is not None and self.session.confirm(comparison, seconds=seconds):
            self._on_done(f"{comparison.other.name} again", comparison)
        return not comparison.why and _is_gain(comparison.effect)

    def _best_first(self) -> list[Technique]:
        """Techniques that may be gains, by what they were worth to plain at least: the surest first."""
        found: list[tuple[float, int, Technique]] = []
        for number, technique in enumerate(self.techniques):
            comparison = self.added.get(technique.name)
            effect = None if comparison is None else comparison.effect
            if comparison and effect and comparison.verdict in ("faster", "cannot tell") and effect.ratio > 1:
                found.append((-effect.interval()[0], number, technique))
        return [technique for *_, technique in sorted(found, key=lambda each: each[:2])]

    def _may_beat(self, technique: Technique, rival: Technique) -> bool:
        """Return True if an alternative is a gain, and not clearly a smaller one than `rival` is."""
        own, other = (self.added[each.name].effect for each in (technique, rival))
        if own is None or other is None or not _is_gain(own):
            return False
        return own.interval()[1] > other.interval()[0]

    def _share(self, num_left: int, until_s: float) -> float | None:
        """Seconds for the next of so many comparisons; None where not even one is left before `until_s`."""
        left_s = self.session.left_s - until_s
        least_s = self.session.least_s
        return None if left_s < least_s else max(left_s / num_left, least_s)


def _is_gain(effect: Effect | None) -> bool:
    """Return True if the interval by itself is above 1: what is added wrongly shows in measuring afresh."""
    return effect is not None and effect.interval()[0] > 1
