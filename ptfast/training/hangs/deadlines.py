"""How long a run waits: one table for signals, hangs, and the launcher. All values are in seconds.

Two more waits are config keys, `run.hang_timeout` and `parallel.timeout`. Ranks wait for each other in their
store for `ptfast.core.distributed.MEET_S`. The supervisor, a standalone script, gets its times from the run.
"""

# A run without progress.
TICK_S = 1.0
"""Time between two checks of a run's progress."""
LEAST_S, TIMES = 60.0, 10
"""Default limit of a pause: `TIMES` times the longest pause so far, but at least `LEAST_S`."""

# After a signal, on a rank.
REPEATED_S = 1.0
"""Signals within this time count as one: a scheduler and a script in between may both send it."""
LATE_S = 5.0
"""How long several ranks wait for data after a signal, then for each other; also the time between checks."""
HUNG_S, HUNG_TOGETHER_S = 10.0, 30.0
"""How long a step, a batch or a callback may continue after a signal, on one rank or several."""
UNHANDLED_S, UNHEARD_S = 10.0, 20.0
"""The same for a call that keeps Python from handling the signal, such as waiting for another rank: until a
thread of the rank acts, or the supervisor. Two steps, if that is longer."""
SAVING_S, SLOW_DISK_BYTES_PER_S = 60.0, 2e6
"""The same for saving: these seconds, plus the time to write the checkpoint to a disk this slow."""
LAST_S = 10.0
"""How long a process has to exit after a second signal, or after its hang was detected."""

# In the launcher, which watches the ranks of a machine.
POLL_S = 0.1
"""Time between two checks of the ranks."""
SHUTDOWN_S = 600.0
"""How long ranks have after a signal to finish their step and save."""
LEAVE_S = 20.0
"""How long ranks may stay after one has failed or left because of a signal: less than torchrun's 30."""
AGENT_S, EXIT_BARRIER_S = 5.0, 30.0
"""How long torchrun's agent, which may wait for other machines, may outlast its ranks: after a failure, and
after success."""
VISIBLE_S = 60.0
"""How long a new file may be invisible to other machines: NFS caches folders for up to a minute."""
