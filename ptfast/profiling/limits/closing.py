"""The entry of summary.json on the machine's limits, made when a run is over."""

from __future__ import annotations

from typing import Any

from ptfast.core.clock import STEP
from ptfast.core.machine import is_memory_error
from ptfast.profiling.limits import roofline
from ptfast.profiling.limits.machine_peaks import COST_S, Peaks, known_peaks, measured_peaks
from ptfast.profiling.limits.step_counting import StepCounter
from ptfast.run import Run

PAYS_AFTER = 50
"""A run trains so many times as long as measuring the machine takes, or leaves it to a longer one."""
SHORT_S = 10
"""A run that trains for less is not kept for a fraction of a second."""


def speed_of_light(run: Run, *, may_measure: bool) -> dict[str, Any] | None:
    """The entry `speed_of_light` of summary.json; None where the run was too short to say anything.

    The machine's limits are measured when training is over, where nothing is disturbed by it, and once for a
    machine: another run finds them in the cache folder. A run of less than a minute measures nothing, and one
    of seconds reports nothing.

    Args:
        may_measure: whether there is time to.

    Cost: a second, the first time; 0.2 s otherwise. Booked as `measuring`.
    """
    counter: StepCounter = run.counter
    counted, seconds = counter.counted, run.clock.ledger()
    steps = run.progress.step - counter.first_counted - (counted.steps if counted is not None else 0)
    if counter.compiled and counted is not None:
        steps += counted.steps  # of none that was trained
    train_s = sum(seconds[name] for name in STEP)
    if steps < 1 or train_s < SHORT_S:
        return None
    if counted is None:
        return {"line": f"operations are not counted: {counter.why_not}"} if counter.why_not else None
    run.clock.to("measuring")
    try:
        work = roofline.count_work(run, counted)
        cost = {"counting_s": seconds["measuring"]}
        peaks = known_peaks(run.device, work.flops)
        pays = may_measure and train_s >= PAYS_AFTER * COST_S
        if peaks is not None and pays and roofline.weigh(work, peaks, seconds, steps).mfu > 1:
            peaks = None  # taken while something else kept the machine busy
        if peaks is None and pays:
            peaks = _measure(run, work)
            cost["measuring_s"] = peaks.seconds if peaks is not None else 0.0
        if peaks is None:
            enough = f"{PAYS_AFTER * COST_S:.0f} s"
            why = f"this machine's peak is not measured yet; a run that trains for {enough} measures it"
            return roofline.unmeasured(work, seconds, steps, why) | cost
        step = roofline.weigh(work, peaks, seconds, steps)
        return roofline.describe(step) | cost | {"padding_share": run.resolved.padding_share}
    finally:
        run.clock.to("closing")


def _measure(run: Run, work: roofline.Work) -> Peaks | None:
    """The machine's limits; None where training has left no memory for it."""
    try:
        with run.display.status("measuring this machine's peak rates"):
            return measured_peaks(run.device, work.flops)
    except (MemoryError, RuntimeError) as error:
        if not is_memory_error(error):
            raise
        return None
