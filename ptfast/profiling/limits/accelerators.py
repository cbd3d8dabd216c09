"""Devices by name, with what their vendors' data sheets promise: for runs that are planned somewhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ptfast.core.errors import COMMAND_LINE, ConfigError
from ptfast.core.machine import memory_limit
from ptfast.core.sections.nearest_name import did_you_mean
from ptfast.profiling.limits.machine_peaks import device_name, known_peaks, measured_peaks

CALL_S = 5e-6
"""Assumed of every operator that PyTorch calls for a GPU, compiled models aside."""
LOOPBACK_PASSES = 4
"""Times that gloo moves a byte through memory between two processes of a machine, assumed."""


@dataclass(frozen=True)
class Accelerator:
    """A device that a rank trains on, at its peak."""

    name: str
    source: str
    """Whose figures these are."""
    flops_per_s: Mapping[str, float]
    """Of dense matrix products, by number format."""
    memory_bytes: int
    bytes_per_s: float
    """From its memory and to it."""
    link_bytes_per_s: float
    """To the other ranks of its machine, each way."""
    network_bytes_per_s: float | None
    """Each way to other machines, for each device of a machine; None where the vendor says nothing."""
    call_s: float = CALL_S
    """For each operator, however small."""
    overlaps: bool = True
    """Ranks exchange tensors while they compute."""

    def peak(self, name: str) -> float:
        """Floating-point operations a second in a number format, or in float32 where it has no such."""
        return self.flops_per_s.get(name, self.flops_per_s["fp32"])


_HOPPER = {"fp32": 67.0, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp64": 67.0}
_AMPERE = {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0, "fp64": 19.5}
_SHEETS = (
    ("h100", "NVIDIA H100 SXM, DGX H100", 80, 3350, 450, 400, _HOPPER),
    ("h200", "NVIDIA H200 SXM, DGX H200", 141, 4800, 450, 400, _HOPPER),
    ("a100-40", "NVIDIA A100 SXM, DGX A100", 40, 1555, 300, 200, _AMPERE),
    ("a100-80", "NVIDIA A100 SXM, DGX A100", 80, 2039, 300, 200, _AMPERE),
    ("l4", "NVIDIA L4", 24, 300, 32, None, {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0}),
    ("l40s", "NVIDIA L40S", 48, 864, 32, None, {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0}),
    ("rtx4090", "NVIDIA Ada", 24, 1008, 32, None, {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2}),
    ("v100", "NVIDIA V100 SXM2, DGX-1", 32, 900, 150, 50, {"fp32": 15.7, "fp16": 125.0, "fp64": 7.8}),
)
"""Name, data sheets, GiB of memory, GB/s of it; of each device, each way, GB/s of NVLink or PCIe and Gbit/s
of network; TFLOP/s. Where a sheet has sparse products, or a link both ways, it is half of that."""
GPUS = {
    name: Accelerator(
        name,
        f"{source} (data sheet)",
        {key: value * 1e12 for key, value in teraflops.items()},
        memory_gib * 2**30,
        bandwidth * 1e9,
        link * 1e9,
        network and network * 1e9 / 8,
    )
    for name, source, memory_gib, bandwidth, link, network, teraflops in _SHEETS
}
NAMES = (*GPUS, "cpu")


def find_accelerator(name: str, num_local_ranks: int) -> Accelerator:
    """The device of a name; `cpu` is this machine's, measured, of which each of its ranks has a share.

    Raises:
        ConfigError: C003 for an unknown name.

    Cost: about a second for `cpu`, the first time.
    """
    if name in GPUS:
        return GPUS[name]
    if name != "cpu":
        hint = did_you_mean(name, NAMES) or f"There are: {', '.join(NAMES)}"
        raise ConfigError(
            "C003", "no such device is known", key="--device", value=name, place=COMMAND_LINE, suggestion=hint
        )
    cpu = torch.device("cpu")
    peaks = known_peaks(cpu) or measured_peaks(cpu)
    return Accelerator(
        name,
        f"measured here, {device_name(cpu)}",
        {key: value / num_local_ranks for key, value in peaks.flops_per_s.items()},
        memory_limit("cpu")[0] // num_local_ranks,
        peaks.bytes_per_s / num_local_ranks,
        peaks.bytes_per_s / LOOPBACK_PASSES / num_local_ranks,
        None,
        peaks.op_s,
        overlaps=False,
    )
