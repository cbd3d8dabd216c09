"""The process of a Python program that calls ptfast: one call at a time, and nothing stays changed in it."""

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
from ptfast.core.world import world
from ptfast.techniques.precision.number_formats import set_float32

_busy = threading.Lock()
_forked = False
_MALLOC = {-1: ("MALLOC_TRIM_THRESHOLD_", 128 * 1024), -4: ("MALLOC_MMAP_MAX_", 65536)}
"""Options of mallopt(3) that a run changes: the variable that sets each, and its default."""


def _note_fork() -> None:
    global _busy, _forked
    _busy, _forked = threading.Lock(), True


os.register_at_fork(after_in_child=_note_fork)


@contextlib.contextmanager
def borrowed(function: str) -> Iterator[None]:
    """Let a call of ptfast have this process; what it changes for the whole process is put back afterwards.

    Args:
        function: the name of the function that was called, for messages.

    Raises:
        MachineError: E005 while another call runs, in a thread or around this one, and in a process that was
            forked from one that had used torch, whose threads it does not have.
    """
    _check_fork(function)
    lock = _busy
    if not lock.acquire(blocking=False):
        what = "another call of ptfast runs in this process, and both would set torch's threads and seeds"
        hint = "Wait for it to end, or start this one in a process of its own"
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
    """An error with the function for its place, and the name of an argument where a flag is named."""
    if error.place == COMMAND_LINE:
        error = error.changed(place=f"ptfast.{function}", key=(error.key or "").lstrip("-").replace("-", "_"))
    if error.others and (add_note := getattr(error, "add_note", None)):
        add_note(error_line(error))
    return error


def check_processes(config: Config, names: Sequence[str]) -> None:
    """Reject what takes other processes than this one; `names` are of objects that only this one has."""
    if (ranks := world(meets=True)) is not None and ranks.distributed:
        what = f"{ranks.num_ranks} processes were started, which would each train the whole run"
        hint = "Start one process and set parallel=ddp, or use torchrun -m ptfast train"
        raise ParallelError("P002", what, key="train", suggestion=hint)
    if config.parallel.nnodes > 1:
        what, hint = "a Python program trains on its own machine", "Start ptfast train on each machine"
        raise ConfigError("C011", what, key="parallel.nnodes", value=config.parallel.nnodes, suggestion=hint)
    if config.parallel.strategy != "single" and names:
        what = f"the ranks are other processes, which do not have {names[0]}"
        hint = "Define it in a module and hand over its class or function, or set parallel=single"
        raise ConfigError("C011", what, key="parallel", value=config.parallel.strategy, suggestion=hint)


@contextlib.contextmanager
def without_script() -> Iterator[None]:
    """Keep processes that multiprocessing starts from running the user's script once more."""
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
    # Without a GPU, asking for one is enough for torch to call the fork bad.
    lost_gpu = torch.cuda._is_in_bad_fork() and torch.cuda.device_count() > 0
    if forked and (lost_gpu or torch.get_num_threads() > 1):
        what = "this process was forked from one that had loaded torch, whose threads did not come along"
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
"""How each setting of the process that a run changes is read and put back."""


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Put back random states, switches of torch, variables, handlers of signals, logging and warnings."""
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
            # A list of its own, which no other handler is added to.
            logger.handlers = [*(before := logger.handlers)]
            places.append((logger, "propagate"))
            settings += [(partial(setattr, logger, "handlers"), before), (logger.setLevel, logger.level)]
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
        if cuda_states is not None:
            cuda.set_rng_state_all(cuda_states)
        elif cuda.is_initialized():
            cuda.manual_seed_all(seed)
        if deterministic != torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        for number, handler in caught.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
                # The next DataLoader is to set torch's own again.
                signal_handling._SIGCHLD_handler_set &= number != signal.SIGCHLD
        gc.collect()
        if cuda.is_initialized():
            cuda.empty_cache()
            has_own = any(map(os.environ.get, ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")))
            if not has_own and torch.version.hip is None:
                set_allocator("expandable_segments:False")
        _free_memory()


def _free_memory() -> None:
    """Let the C library give memory back to the system again, which a run on the CPU holds."""
    if not sys.platform.startswith("linux") or not hasattr(libc := ctypes.CDLL(None), "mallopt"):
        return
    for option, (variable, default) in _MALLOC.items():
        text = os.environ.get(variable, "")
        libc.mallopt(option, int(text) if text.isdecimal() else default)
    libc.malloc_trim(0)
