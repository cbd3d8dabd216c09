"""Write a trained model as files that do not need ptfast."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ptfast.core.errors import EXIT_OK, ConfigError
from ptfast.report.terminal.display import say
from ptfast.report.terminal.json_lines import emit
from ptfast.training.exports.export_run import export_run
from ptfast.training.saved_model import saved_run
from ptfast.training.user_code import naming_user_code

PLAIN = ("device=cpu", "precision=fp32")
"""Settings for every export, whatever the run was trained with."""


def export(args: Namespace) -> int:
    """Export a trained model for use without ptfast, and report how far each form is from the model."""
    where, *overrides = args.words
    if args.out is None:
        usage = "Usage: ptfast export RUN --out FOLDER [key=value ...]"
        raise ConfigError("C016", "an argument is missing", key="--out", suggestion=usage)
    if args.weights_only and args.onnx:
        what = "cannot be combined with --onnx, which writes a graph"
        raise ConfigError("C011", what, key="--weights-only", suggestion="Give one of the two")
    options = {name: getattr(args, name) for name in ("hub", "weights", "onnx")}
    words = [*PLAIN, *overrides]
    with (
        saved_run(Path(where), words, checkpoint=args.checkpoint) as saved,
        naming_user_code(saved),
    ):
        differences = export_run(saved, args.out, graph=not args.weights_only, **options)
    if emit("result", out=args.out, hub=args.hub, differences=differences):
        return EXIT_OK
    for name, difference in differences.items():
        apart = f"within {difference:.1e} of" if difference else "equal to"
        say(f"{name}: logits {apart} the model's on held-out samples")
    say(f"wrote {' and '.join(map(str, filter(None, (args.out, args.hub))))}")
    return EXIT_OK
