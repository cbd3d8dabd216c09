"""What each rank writes and holds as a state is saved under parallel=fsdp, and as it is loaded again.

    python scripts/bench_sharded.py                         a GPT of 25 million weights on four CPU ranks
    python scripts/bench_sharded.py --ranks 8 --width 1024

AdamW and averaged weights make the state four times the weights. The rises are those of a rank's own memory
while it does so, above what it held before; mapped files, which the kernel takes back, are not counted.
Loading leaves half of the share behind: a run that resumes has no optimizer state yet. The last column is for
a first rank that gathers all tensors whole, which is what a state in one file takes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MB = 1e6


def rise_bytes(action: Callable[[], Any]) -> int:
    """By how much this process's own memory rises while `action` runs, looked at each millisecond."""
    gc.collect()
    # What was let go of before, and kept for later, would be taken again unseen.
    ctypes.CDLL(None).malloc_trim(0)
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = action()
    peak = max(peak, anonymous_bytes())
    done.set()
    watcher.join()
    del kept
    return peak - before


def anonymous_bytes() -> int:
    """Memory of this process that no file can give back."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split(maxsplit=1)[0]) * 1024


def measure(width: int, depth: int) -> None:
    """One rank's part: train a step, save, gather, load; the first prints what all have found."""
    import torch
    from bench_tools import machine

    from ptfast.config.read import read_config
    from ptfast.core.distributed import Ranks, barrier, broadcast_object, on_all_ranks
    from ptfast.core.plain_display import Display
    from ptfast.core.tensors.checkpoint_files import read_checkpoint
    from ptfast.core.tensors.dtensors import is_sharded, local_part
    from ptfast.core.tensors.trees import tensors_in
    from ptfast.training.build import build
    from ptfast.training.fit import fit

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = Ranks(rank, rank, world_size, world_size)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    folder = Path(broadcast_object(tempfile.mkdtemp() if ranks.is_first else None, ranks))
    text = folder / "text.txt"
    if ranks.is_first:
        text.write_text("so it goes, and on it goes. " * 200)
    barrier(ranks)
    words = ("data=text_file", f"data.path={text}", "data.context_length=16", f"batch_size={world_size}")
    words = (*words, "model=gpt", f"model.width={width}", f"model.depth={depth}", "model.heads=8", "ema=ema")
    words = (*words, "optimizer=adamw", "parallel=fsdp", f"parallel.nproc={world_size}", "device=cpu")
    words = (*words, "steps=1")
    run = build(read_config(words)[1], ranks=ranks, folder=folder, display=Display())
    fit(run)
    assert run.ema is not None
    parts = [run.model.state_dict(), run.optimizer.state_dict(), run.ema.state_dict()]
    tensors = list(tensors_in(parts))

    def gather() -> list[torch.Tensor]:
        wholes = (tensor.full_tensor() if is_sharded(tensor) else tensor for tensor in tensors)
        return [whole for whole in wholes if ranks.is_first]

    def load() -> None:
        state = read_checkpoint(folder / "saved" / "last", check=False)
        run.checkpointer.restore_model(state)
        run.checkpointer.restore(state, 0)

    share = sum(part.numel() * part.element_size() for part in map(local_part, tensors))
    saving = rise_bytes(lambda: run.checkpointer.save())
    gathering = rise_bytes(gather)
    tensors.clear()
    parts.clear()
    run.optimizer.state.clear()
    loading = rise_bytes(load)
    [file] = (folder / "saved" / "last").glob(f"shard-{rank + 1:05}-*")
    rows = on_all_ranks((share, file.stat().st_size, saving, loading, gathering), world_size)
    if ranks.is_first:
        weights = sum(parameter.numel() for parameter in run.model.parameters())
        print(f"{weights / 1e6:.1f} million weights, AdamW, EMA, {world_size} ranks, gloo; MB")
        print("rank   share  written  rise saving  rise loading  rise where the first gathers all")
        for number, row in enumerate(rows):
            held, written, *rises = (value / MB for value in row)
            print(f"{number:4} {held:7.1f} {written:8.1f} {rises[0]:12.1f} {rises[1]:13.1f} {rises[2]:33.1f}")
        print(f"torch {torch.__version__}, {machine()}")
        shutil.rmtree(folder)
    barrier(ranks)
    sys.stdout.flush()
    # Threads that gloo leaves behind may abort the interpreter's own way out.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.width, given.depth)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}", __file__)
    done = subprocess.run([sys.executable, *launcher, *sys.argv[1:]])
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
