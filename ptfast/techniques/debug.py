"""Debugging aids, which are off unless asked for."""

from __future__ import annotations

from ptfast.techniques.record import Technique

TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="debugging aids off",
        family="debug",
        kind="exact",
        on=(),
        off=(),
        why="Anomaly detection, profilers and checks of gradients look at every operation; off, they leave "
        "nothing in the loop.",
        claim="What looking at every operation takes; the guide gives no figure.",
        source="PyTorch Performance Tuning Guide, 'Disable debugging APIs'.",
        avoid="A loss turns NaN, or nobody knows where the time goes: debug=anomaly, debug=profiler.",
        audit="set_detect_anomaly(True), emit_nvtx, a profiler or gradcheck left in a training script.",
        options=("debug/anomaly", "debug/profiler", "debug/nvtx", "debug/gradcheck", "debug/memory"),
    ),
)
