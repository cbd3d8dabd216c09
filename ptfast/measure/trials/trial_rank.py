"""One rank of a search: `python -m ptfast.measure.trials.trial_rank WHAT KEYWORDS FOLDER PARENT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ptfast.config.read import load_config
from ptfast.core import run_directory
from ptfast.core.distributed import Ranks, barrier, destroy_process_group, init_process_group, world
from ptfast.core.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, PtfastError
from ptfast.launch.launcher import FOUND
from ptfast.launch.rank_main import die_with_parent, leave, report_failure


def main() -> None:
    """Search on this rank; the first leaves what was found in FOLDER."""
    what, keywords, folder, parent = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    die_with_parent(parent)
    try:
        found = _search(what, folder, keywords)
        if found is not None:
            run_directory.write_json(folder / FOUND, found)
    except KeyboardInterrupt:
        # The launcher was sent it as well, and says so.
        leave(EXIT_INTERRUPTED)
    except Exception as error:
        report_failure(folder, error)
        leave(error.exit_code if isinstance(error, PtfastError) else EXIT_BUG)
    leave(EXIT_OK)


def _search(what: str, folder: Path, keywords: dict[str, Any]) -> dict[str, Any] | None:
    from ptfast.techniques.backend.torch_settings import resolve_device

    _, config = load_config(folder / run_directory.CONFIG, trusted=True)
    ranks = world() or Ranks()
    if ranks.distributed:
        init_process_group(resolve_device(config.device, ranks), config.parallel.timeout.seconds)
    found: dict[str, Any] | None = None
    if what == "lr":
        from ptfast.measure.lr.lr_finder import measure_here

        found = measure_here(config, folder, ranks, **keywords)
    elif what == "noise":
        from ptfast.measure.batch.gradient_noise import train_for_noise

        train_for_noise(config, folder, ranks, **keywords)
    elif what == "workers":
        from ptfast.measure.loader.loader_throughput import time_loaders

        time_loaders(config, folder, ranks, **keywords)
    else:
        from ptfast.measure.batch.batch_throughput import time_batches

        time_batches(config, folder, ranks, **keywords)
    barrier(ranks)
    destroy_process_group()
    return found if ranks.is_first else None


if __name__ == "__main__":
    main()
