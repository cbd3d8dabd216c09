"""Tests marked `gpu` on a machine without a GPU: torch's own CUDA code over a driver of ours.

    PYTHONPATH=tests/support python -m pytest -m gpu -p emulated_gpu tests/training/test_gpu_loop.py
    python tests/support/emulated_gpu.py python scripts/gpu_check --quick --out FOLDER

torch's allocator, streams, events, pinned memory, autograd threads and sync-debug mode are the real ones. Its
kernels do nothing; in a test, the CPU computes each op as well, in the same memory. A test that needs more of
a GPU names it in its marker and is skipped: `@pytest.mark.gpu("TF32")`. The emulation shows no speed, none of
a GPU's rounding, no triton, no CUDA graphs, no NCCL and no segments of memory that grow. In processes that a
test starts, ops compute nothing, and those of cuDNN (convolutions, fused attention) fail.

Needs Linux, a CUDA build of torch, gcc with binutils, and CUDA's headers (triton ships them).
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import pytest

SOURCE = Path(__file__).with_suffix(".c")
NEEDS_STUB = re.compile(r"(cuda[A-Z]|cu[A-Z]|cublas|cudnn|cufft|cusolver|cusparse|nccl)\w+")
LEFT_ALONE = re.compile(r"\w+(Version|String|Name)|ncclGetLastError")
"""Calls that return text or a version, which the real libraries know without a driver."""


class CannotEmulateError(Exception):
    """What is missing here."""


def build_library() -> Path:
    """Build the driver for this interpreter's torch, once: our calls, and stubs that return 0."""
    package = find_spec("torch")
    if package is None or package.origin is None:
        raise CannotEmulateError("there is no torch")
    torch = Path(package.origin).parent
    facts = runpy.run_path(str(torch / "version.py"))
    if facts["cuda"] is None:
        raise CannotEmulateError(f"torch {facts['__version__']} is not a build for CUDA")
    if lacking := [tool for tool in ("gcc", "nm") if shutil.which(tool) is None]:
        raise CannotEmulateError(f"there is no {lacking[0]}")
    headers = [*torch.parent.glob("nvidia/*/include"), torch.parent / "triton/backends/nvidia/include"]
    headers = [folder for folder in headers if (folder / "driver_types.h").exists()]
    if not headers:
        raise CannotEmulateError("there is no driver_types.h, which triton has")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    made_of = crc32(SOURCE.read_bytes() + Path(__file__).read_bytes())
    library = cache / "ptfast-emulated-gpu" / f"{facts['__version__']}-{made_of:x}.so"
    if library.exists():
        return library
    users = [
        *torch.glob("lib/lib*cuda*.so"),
        *torch.glob("lib/lib*nvrtc*.so"),
        torch / "lib/libtorch_python.so",
    ]
    listed = subprocess.run(["nm", "-D", "-u", *users], capture_output=True, text=True, check=True).stdout
    wanted = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if " U " in line}
    wanted -= set(re.findall(r"^CALL (\w+)", SOURCE.read_text(), flags=re.MULTILINE))
    names = (name for name in wanted if NEEDS_STUB.fullmatch(name) and not LEFT_ALONE.fullmatch(name))
    major, minor = map(int, facts["cuda"].split("."))
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        stubs, built = Path(scratch) / "stubs.c", Path(scratch) / "built.so"
        stubs.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in names))
        # By this name torch opens the driver, and finds that it is loaded.
        flags = ["-w", "-O1", "-shared", "-fPIC", "-fno-builtin", "-Wl,-soname,libcuda.so.1"]
        flags += [f"-DCUDART_VERSION={1000 * major + 10 * minor}", *(f"-I{folder}" for folder in headers)]
        done = subprocess.run(["gcc", *flags, SOURCE, stubs, "-o", built], capture_output=True, text=True)
        if done.returncode:
            raise CannotEmulateError(f"gcc: {done.stderr[:500]}")
        built.replace(library)
    return library


def start(command: list[str]) -> None:
    """Become `command`, with the driver loaded before torch's libraries."""
    # No address space is reserved here, in which segments of memory could grow, and cuDNN plans no attention.
    fixed = {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    os.execvpe(command[0], command, {**fixed, **os.environ, "LD_PRELOAD": str(build_library())})


def pytest_configure(config: pytest.Config) -> None:
    """Start again with the driver where it is not loaded."""
    if not hasattr(ctypes.CDLL(None), "cudaEventRecord"):
        config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
        start(sys.orig_argv)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what takes a real GPU."""
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is not None and marker.args:
            item.add_marker(pytest.mark.skip(reason=f"not emulated: {', '.join(marker.args)}"))


@pytest.fixture(autouse=True)
def _emulation(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    from emulated_ops import EmulatedOps

    with EmulatedOps():
        yield


if __name__ == "__main__":
    # Tests that the command runs compute their ops, too.
    os.environ["PYTEST_ADDOPTS"] = f"{os.environ.get('PYTEST_ADDOPTS', '')} -p emulated_gpu"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SOURCE.parent), os.environ.get("PYTHONPATH", "")])
    try:
        start(sys.argv[1:])
    except CannotEmulateError as error:
        sys.exit(f"emulated_gpu: {error}")
