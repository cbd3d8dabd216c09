"""Records of what torch.compile can be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Literal

from ptfast.core import devices
from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.section import Family, OrAuto, Section, Technique, Unused
from ptfast.techniques.gradients import Gradients
from ptfast.techniques.parallel import Parallel


class Compile(Section):
    """The parts that `torch.compile` compiles, and how."""

    mode: Literal["none", "pointwise", "blocks", "model", "reduce_overhead", "max_autotune"] = "none"
    """Elementwise chains, blocks, the model; the model in CUDA graphs, or autotuned."""
    blocks: str | tuple[str, ...] = "auto"
    """For `blocks`: a pattern or patterns of module names; `auto` for the blocks that recur."""
    dynamic: bool | OrAuto = "auto"
    """One code for batches of any length; `auto` for texts that come in more than a few lengths."""
    keep: bool = False
    """Keep the code in the cache folder, which outlives /tmp, so that a restart does not compile again."""


def accumulating_in_graphs() -> PtfastError:
    """The error of CUDA graphs under accumulation."""
    what = "a CUDA graph overwrites the gradients of the micro-batch before"
    hint = "Use one micro-batch for each rank, or compile=model"
    return ConfigError("C011", what, key="compile", value="reduce_overhead", suggestion=hint)


def allowed_by_ranks(
    compile: Compile, parallel: Parallel, gradients: Gradients, micro_batches: int | None
) -> Iterator[PtfastError]:
    """Refuse CUDA graphs if a step has several micro-batches on a rank, and whole models under fsdp."""
    many = parallel.strategy == "single" and (micro_batches or 1) > 1
    if compile.mode == "reduce_overhead" and (many or gradients.accumulate > 1):
        yield accumulating_in_graphs()
    if parallel.strategy == "fsdp" and compile.mode not in ("none", "blocks"):
        what = "parallel=fsdp gathers weights between blocks, where a whole model cannot be compiled"
        yield ConfigError("C011", what, key="compile", value=compile.mode, suggestion="Use compile=blocks")


def compiler(compile: Compile, device: str) -> PtfastError | None:
    """Refuse to compile if a tool or device is missing."""
    if compile.mode == "none":
        return None
    device = devices.usable_type(device)
    lack = devices.lack_of_compiler(device)
    if lack is None and compile.mode == "reduce_overhead" and device != "cuda":
        what = f"CUDA graphs need a CUDA device, and this is {device}"
        lack = devices.Unsupported(what, "Use compile=model")
    return devices.cannot_run(lack, "compile", compile.mode)


_TRIAL = ("model=resnet_digits", "model.width=4", "model.depth=8", "optimizer=sgd")

_compile = partial(
    Technique,
    kind="reordered",
    off=("compile=none",),
    alternatives="compile",
    needs=("compiler",),
    trial=_TRIAL,
)

TECHNIQUES: tuple[Technique, ...] = (
    _compile(
        name="compiled elementwise chains",
        on=("compile=pointwise",),
        why="Elementwise operations are bound by memory; a fused chain reads and writes its tensors once.",
        claim="One read and write per chain, for activations or losses written by hand; no figure is given.",
        source="PyTorch Performance Tuning Guide, 'Fuse operations'; torch.compile.",
        avoid="Activations are torch's own, each one kernel already; compile=model does more where it works.",
        audit="Several elementwise operations in a row, such as an activation or a loss written by hand.",
    ),
    _compile(
        name="compiled blocks",
        on=("compile=blocks",),
        why="Each block becomes a few fused kernels with little Python; identical blocks compile once.",
        claim="Nearly the speed of a compiled model in many cases, while only one block is compiled.",
        source="PyTorch tutorial on regional compilation.",
        avoid="Few blocks are identical, or the run is short. Dropout draws other masks when compiled.",
        audit="A model of repeated blocks that runs for hours without a compiler.",
    ),
    _compile(
        name="compiled model",
        on=("compile=model",),
        why="Fused kernels touch memory less often and need little Python to launch.",
        claim="A geometric mean of 1.41 times in training over more than 180 models on an A100.",
        source="Ansel et al. 2024, 'PyTorch 2', ASPLOS.",
        measured="On one CPU thread a GPT of 12 blocks takes 1,777 ms a step instead of 1,283, with a peak "
        "of 436 MiB instead of 630.",
        command="python scripts/bench_memory.py gpt --compile --batch-size 4",
        avoid="The run is short, or shapes change all the time. Dropout draws other masks when compiled.",
        audit="A run of hours on a GPU without a compiler.",
    ),
    _compile(
        name="compiled into CUDA graphs",
        on=("compile=reduce_overhead",),
        why="A whole forward or backward pass is one launch, so small kernels do not wait for the host.",
        claim="A large gain for small kernels, little for large ones.",
        source="PyTorch blog 2021, 'Accelerating PyTorch with CUDA Graphs'; torch.compile.",
        avoid="Steps have several micro-batches (refused), or memory is short: graphs keep their own.",
        audit="Idle gaps between the kernels of a GPU in a trace, or a small batch.",
        needs=("cuda", "compiler"),
    ),
    _compile(
        name="autotuned kernels",
        on=("compile=max_autotune",),
        why="CUDA graphs launch the fastest of many kernels for each product and convolution.",
        claim="A gain over a compiled model, for minutes of compiling; no figure is given.",
        source="torch.compile, mode max-autotune.",
        avoid="Bits must repeat: a resumed run may choose other kernels without the compiler's cache.",
        audit="A compiled model that will run for a day.",
    ),
    _compile(
        name="compiled code kept",
        kind="exact",
        on=("compile.keep=true",),
        off=("compile.keep=false",),
        why="Compiled code is cached in a folder that survives restarts, other nodes and a wiped /tmp.",
        claim="A warm start skips all of the compiler but its front; no figure is given.",
        source="PyTorch tutorial 'Compile Time Caching in torch.compile'.",
        avoid="The cache folder is on a slow network, or TORCHINDUCTOR_CACHE_DIR names a better place.",
        audit="Compiled runs that are preempted, or whose containers are new every time.",
        trial=("compile=model", *_TRIAL),
        alternatives=None,
    ),
)

FAMILY = Family(
    name="compile",
    rules=(allowed_by_ranks,),
    machine_rules=(compiler,),
    unused=(
        Unused.unless("compile.mode", ("blocks",), "compile.blocks"),
        Unused(
            ("compile.dynamic", "compile.keep"),
            lambda compile: compile.mode != "none",
            "without compiling",
            "compile=model",
        ),
    ),
    free_keys=("compile.keep",),
    panel=lambda compile, compiled: {"compile": compiled and compiled + "; the code is kept" * compile.keep},
    techniques=TECHNIQUES,
)
