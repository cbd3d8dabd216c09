"""Threads, which kernels torch takes, and the memory of the CPU."""

from __future__ import annotations

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.resolved import Resolved
from ptfast.core.sections.section import Count, Family, OrAuto, Section, Technique


class Backend(Section):
    """Threads, kernels and memory."""

    threads: Count | OrAuto = "auto"
    """Threads of each rank."""
    worker_threads: Count = 1
    """Threads of each of the loader's worker processes."""
    cudnn_benchmark: bool | OrAuto = "auto"
    """Let cuDNN time its kernels and take the quickest; `auto` while the shapes of inputs are few."""
    deterministic: bool = False
    """Only kernels that give the same bits in every run."""
    hold_memory: bool = True
    """Hold the CPU's freed memory for the next step, and do not give it back to the system."""
    expandable_segments: bool | OrAuto = "auto"
    """Let the segments of a GPU's memory grow; `auto` for texts of many lengths, without CUDA graphs."""
    cudnn_attention: bool | OrAuto = "auto"
    """Let cuDNN compute attention where it can; `auto` unless texts come in many lengths."""
    flush_denormals: bool = True
    """Take numbers below 1e-38 for 0 on a CPU, which computes with them many times slower."""


def repeatable_kernels(backend: Backend) -> PtfastError | None:
    """Refuse to choose kernels by timing where bits must repeat."""
    if not (backend.deterministic and backend.cudnn_benchmark is True):
        return None
    what = "kernels chosen by timing differ from run to run, which backend.deterministic forbids"
    hint = "Use backend.cudnn_benchmark=auto"
    return ConfigError("C011", what, key="backend.cudnn_benchmark", value=True, suggestion=hint)


def panel(backend: Backend, resolved: Resolved) -> dict[str, object]:
    """How kernels are chosen, where there is a choice, and what becomes of freed memory."""
    until = ", while inputs have few shapes" if backend.cudnn_benchmark == "auto" else ""
    searched = f"cuDNN takes the quickest by trying{until}" if resolved.cudnn_benchmark else None
    held = "freed blocks are kept for the next step" if resolved.holds_memory else None
    unplanned = "not by cuDNN, which plans anew for every length"
    return {
        "kernels": "deterministic" if resolved.deterministic else searched,
        "attention": unplanned if resolved.cudnn_attention is False else None,
        "memory": "in segments that grow" if resolved.expands_segments else held,
    }


TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="cuDNN benchmark",
        kind="reordered",
        on=("backend.cudnn_benchmark=auto",),
        off=("backend.cudnn_benchmark=false",),
        why="cuDNN times its kernels once per convolution shape and keeps the fastest.",
        claim="Quicker convolutions, for a search at every new shape; the guide gives no figure.",
        source="PyTorch Performance Tuning Guide, 'Enable cuDNN auto-tuner'.",
        avoid="Runs that must repeat bit for bit, and inputs of many shapes, which turn it off.",
        audit="torch.backends.cudnn.benchmark is off while convolutions see few shapes.",
        needs=("cuda", "convolutions"),
        trial=("model=resnet20", "batch_size=32"),
    ),
    Technique(
        name="threads by cores",
        kind="reordered",
        why="Each rank uses its share of the cores that nobody else keeps busy; torchrun would give it one.",
        claim="Up to a factor of the cores per rank; with more threads than cores they take turns.",
        source="PyTorch documentation, 'CPU threading'; torchrun sets OMP_NUM_THREADS=1.",
        avoid="Never; backend.threads and OMP_NUM_THREADS set the number.",
        audit="torch.get_num_threads() is not the number of cores over that of local ranks.",
        about=("backend/default",),
    ),
    Technique(
        name="held memory",
        kind="exact",
        on=("backend.hold_memory=true",),
        why="Each step reuses freed memory, so the kernel need not unmap, clear and map pages again.",
        claim="Allocators that reuse memory beat the default; the guide gives no figure.",
        source="PyTorch Performance Tuning Guide, 'Switch memory allocator'; mallopt(3).",
        avoid="Other processes need memory that this one uses only at times, as in a large first evaluation.",
        audit="Thousands of minor page faults a step, as getrusage counts them, on a CPU with glibc.",
        trial=("model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="expandable segments",
        kind="exact",
        on=("backend.expandable_segments=true",),
        why="Segments grow in place, so batches of ever new lengths leave no fragments that nothing fits.",
        claim="Handles allocations whose sizes change frequently better; the documentation gives no figure.",
        source="PyTorch notes, 'CUDA semantics', expandable_segments.",
        avoid="Batches have few shapes, or other processes open this one's CUDA tensors.",
        audit="Much more GPU memory reserved than allocated, with batches of many lengths.",
        about=("backend/default",),
        needs=("cuda", "sequences"),
        trial=("data=text_file", "data.path={text}", "model=gpt", "optimizer=sgd"),
    ),
    Technique(
        name="attention without cuDNN",
        kind="reordered",
        on=("backend.cudnn_attention=false",),
        why="Torch prefers cuDNN's attention on new GPUs, and cuDNN plans anew for every length.",
        claim="None: no figure by others is known.",
        source="PyTorch 2.5 release notes, 'cuDNN backend for SDPA'.",
        measured="The first epoch of SST-2 took 1.8 s instead of 18.7, the next one 0.87 and 0.98.",
        command="python scripts/bench_peers.py --task sst2 --precision bf16 --device cuda",
        avoid="Batches have few shapes: then cuDNN's kernels are as quick or quicker.",
        audit="An epoch over texts of many lengths that is much slower than the next one.",
        needs=("cuda", "sequences"),
        trial=("data=text_file", "data.path={text}", "model=gpt", "optimizer=sgd"),
    ),
    # Reordered, as it rounds; the 12 configurations of compare_bits end with the same bits without it.
    Technique(
        name="denormals flushed to zero",
        kind="reordered",
        on=("backend.flush_denormals=true",),
        why="Adam's moments of rare words fall below 1e-38 in some 800 steps, where CPUs are far slower.",
        claim="Calculations with denormal values can be very slow; the documentation gives no figure.",
        source="torch.set_flush_denormal; Intel 64 and IA-32 Architectures Optimization Reference Manual.",
        measured="1.53x the samples a second in the last tenth of text_sst2, after 785 steps.",
        command="python scripts/bench_denormals.py",
        avoid="Values below 1e-38 matter in your model; short runs gain nothing.",
        audit="A CPU's steps grow slower in the course of training, and torch.set_flush_denormal is off.",
        trial=("model=mlp", "model.hidden=[16]"),
    ),
)

FAMILY = Family(
    name="backend",
    rules=(repeatable_kernels,),
    free_keys=("backend.hold_memory", "backend.expandable_segments"),
    panel=panel,
    techniques=TECHNIQUES,
)
