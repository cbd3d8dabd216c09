"""Predictions of a saved model for the user's files, one JSON record a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ptfast.config.schema import Config
from ptfast.core.errors import EXIT_OK, cannot_write
from ptfast.data.new_inputs import read_inputs
from ptfast.training.evaluation.test_time_views import averaged_over_views
from ptfast.training.saved_model import load_saved
from ptfast.training.user_code import naming_user_code


def predict_files(config: Config, state_folder: Path, paths: list[str], out: str | None = None) -> int:
    """Write one record per input: where it came from, and what the task predicts.

    Inputs are read as in training: the same size, statistics and vocabulary, which the state carries.

    Args:
        paths: image files or folders of them, `.npy`/`.npz` arrays, or text files with one input a line.
        out: file to write; standard output if not given.

    Raises:
        DataError: D001, D005 for what cannot be read.
    """
    saved = load_saved(config, state_folder)
    if saved.average is not None:
        saved.average.copy_to_model()
    model = averaged_over_views(saved.model, flip=config.eval.flip, shift=config.eval.shift)
    lines: list[str] = []
    with torch.inference_mode(), saved.precision.autocast(), naming_user_code(saved):
        for name, inputs in read_inputs(
            saved.info,
            paths,
            device=saved.device,
            channels_last=bool(saved.context.resolved.channels_last),
            normalize=config.data.normalize,
        ):
            records = saved.task.predict(model, inputs)
            names = name if isinstance(name, list) else [name]
            for source, record in zip(names, records, strict=True):
                lines.append(json.dumps({"input": source, **record}))
                if out is None:
                    print(lines.pop(), flush=True)
    if out is not None:
        try:
            Path(out).write_text("".join(line + "\n" for line in lines))
        except OSError as error:
            raise cannot_write(error, "--out", out) from error
        print(f"wrote {len(lines):,} predictions to {out}", file=sys.stderr)
    return EXIT_OK
