"""Calls of ptfast from a Python program: one at a time, with all process-wide settings restored."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import signal_handling

from ptfast.config.schema import Config
from ptfast.core.distributed import world
from ptfast.core.errors import (
    COMMAND_LINE,
    ConfigError,
    MachineError,
    ParallelError,
    PtfastError,
    ReportedError,
    error_line,
)
from ptfast.core.machine import on_main_thread
from ptfast.core.tensors.torch_internals import set_allocator
from ptfast.techniques.precision.mixed_precision import set_float32

_busy = threading.Lock()
_forked = False
_MALLOC = {-1: ("MALLOC_TRIM_THRESHOLD_", 128 * 1024), -4: ("MALLOC_MMAP_MAX_", 65536)}
"""Options of mallopt(3) that a run changes: the environment variable and the default of each."""


def _note_fork() -> None:
    global _busy, _forked
    _busy, _forked = threading.Lock(), True


os.register_at_fork(after_in_child=_note_fork)


@contextlib.contextmanager
def borrowed(function: str) -> Iterator[None]:
    """Lock this process for one call of ptfast, and restore its process-wide settings afterwards.

    Args:
        function: name of the called function, for messages.

    Raises:
        MachineError: E005 while another call runs (in a thread, or one that contains this call), or in a
            process forked after torch was used, because torch's threads do not survive a fork.
    """
    _check_fork(function)
    lock = _busy
    if not lock.acquire(blocking=False):
        what = "another call of ptfast runs in this process, but both would set torch's threads and seeds"
        hint = "Wait for it to end, or start this one in a separate process"
        raise MachineError("E005", what, key=function, suggestion=hint)
    try:
        with _kept(), torch.inference_mode(False), torch.enable_grad():
            yield
    except (PtfastError, ReportedError) as error:
        known = error.error if isinstance(error, ReportedError) else error
        if known is None:
            raise
        raise _told(known, function).with_traceback(error.__traceback__) from error.__cause__
    finally:
        lock.release()


def _told(error: PtfastError, function: str) -> PtfastError:
    """Return the error with the function as its place, and the argument's name instead of the flag's."""
    if error.place == COMMAND_LINE:
        error = error.changed(place=f"ptfast.{function}", key=(error.key or "").lstrip("-").replace("-", "_"))
    if error.others and (add_note := getattr(error, "add_note", None)):
        add_note(error_line(error))
    return error


def check_processes(config: Config, names: Sequence[str]) -> None:
    """Reject configs that need other processes; the objects `names` exist only in this process."""
    if (ranks := world(meets=True)) is not None and ranks.distributed:
        what = f"{ranks.world_size} processes were started, each of which would train the whole run"
        hint = "Start one process and set parallel=ddp, or use torchrun -m ptfast train"
        raise ParallelError("P002", what, key="train", suggestion=hint)
    if config.parallel.nnodes > 1:
        what, hint = "a Python program trains on its own machine", "Start ptfast train on each machine"
        raise ConfigError("C011", what, key="parallel.nnodes", value=config.parallel.nnodes, suggestion=hint)
    if config.parallel.strategy != "single" and names:
        what = f"the ranks are other processes, where {names[0]} does not exist"
        hint = "Define it in a module and pass its class or function, or set parallel=single"
        raise ConfigError("C011", what, key="parallel", value=config.parallel.strategy, suggestion=hint)


@contextlib.contextmanager
def without_script() -> Iterator[None]:
    """Keep processes started by multiprocessing from running the user's script again."""
    main = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(hidden)


def _check_fork(function: str) -> None:
    forked = _forked or (
        multiprocessing.parent_process() is not None
        and multiprocessing.get_start_method(allow_none=True) == "fork"
    )
    # Without a GPU, asking for one is enough to make torch reject the fork.
    lost_gpu = torch.cuda._is_in_bad_fork() and torch.cuda.device_count() > 0
    if forked and (lost_gpu or torch.get_num_threads() > 1):
        what = "this process was forked from one that had loaded torch, and a fork has no threads"
        hint = "Start it by multiprocessing.get_context('spawn'), or run ptfast train as a command"
        raise MachineError("E005", what, key=function, suggestion=hint)


def _matmul_precision() -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API")
        return torch.get_float32_matmul_precision()


def _set_environment(variables: dict[str, str]) -> None:
    for name in {*os.environ} - {*variables}:
        del os.environ[name]
    os.environ.update(variables)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_matmul_precision, set_float32),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (lambda: bool((torch.tensor(1e-40, dtype=torch.float32) * 1).item() == 0), torch.set_flush_denormal),
    (lambda: dict(os.environ), _set_environment),
    (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    (
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda method: multiprocessing.set_start_method(method, force=True),
    ),
)
"""How to read and restore each process-wide setting that a run changes."""


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Restore random states, switches of torch, variables, signal handlers, logging and warnings."""
    cuda, cudnn, compiler = torch.cuda, torch.backends.cudnn, sys.modules.get("torch._dynamo.config")
    settings = [(put_back, read()) for read, put_back in _SETTINGS]
    cuda_states, seed = cuda.get_rng_state_all() if cuda.is_initialized() else None, torch.initial_seed()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    places: list[tuple[Any, str]] = [(cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")]
    places += [(sys, "stdout"), (logging, "raiseExceptions")]
    places += [(compiler, "recompile_limit")] if compiler is not None else []
    for logger in (logging.getLogger(), *logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            # Give the run a copy of the list, so that its handlers are not added to the original.
            logger.handlers = [*(before := logger.handlers)]
            places += [(logger, "propagate"), (logger, "level")]
            settings.append((partial(setattr, logger, "handlers"), before))
    attributes = [(place, name, getattr(place, name)) for place, name in places]
    caught = {each: signal.getsignal(each) for each in signal.valid_signals() if on_main_thread()}
    torch.set_default_dtype(torch.float32)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for put_back, value in settings:
            put_back(value)
        for attribute in attributes:
            setattr(*attribute)
        logging.disable(logging.root.manager.disable)  # loggers remember their levels
        if cuda_states is not None:
            cuda.set_rng_state_all(cuda_states)
        elif cuda.is_initialized():
            cuda.manual_seed_all(seed)
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for number, handler in caught.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
                # Lets the next DataLoader install torch's own handler again.
                signal_handling._SIGCHLD_handler_set &= number != signal.SIGCHLD
        gc.collect()
        if cuda.is_initialized():
            cuda.empty_cache()
            has_own = any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")))
            if not has_own and torch.version.hip is None:
                set_allocator("expandable_segments:False")
        _free_memory()


def _free_memory() -> None:
    """Let the C library return memory to the system again; a run on the CPU makes it keep memory."""
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    for option, (variable, default) in _MALLOC.items():
        text = os.environ.get(variable, "")
        libc.mallopt(option, int(text) if text.isdecimal() else default)
    libc.malloc_trim(0)
