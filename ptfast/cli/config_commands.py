"""The commands that read a config: train, eval, and those that measure."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from ptfast.cli.commands import COMMANDS
from ptfast.cli.typed_config import read_typed, saved_run
from ptfast.core.errors import COMMAND_LINE, EXIT_OK, ConfigError

_OTHERS = ("words", "kind", "help", "traceback", "config_dir")
"""Attributes of a command line that are no options of a search."""


def train(args: Namespace) -> int:
    """Train, sweep, or show what would be trained."""
    from ptfast.core.run_directory import config_file

    _check_actions(args)
    words = args.words
    file = config_file(Path(args.config)) if args.config else None
    if args.info or args.cfg:
        from ptfast.config.multirun import show_config, show_info

        if args.info:
            # Hydra prints by logging, which would report a reader that has gone (`| head`) for each line.
            logging.raiseExceptions = False
            show_info(args.info, words)
        else:
            print(show_config(args.cfg, words, file), end="")
        return EXIT_OK
    from ptfast.core.distributed import told_of_nodes, world

    ranks = world(meets=any(word.startswith("parallel.nnodes=") for word in words))
    if args.multirun:
        from ptfast.cli.command_line import run
        from ptfast.cli.sweep_command import sweep

        if ranks is not None or told_of_nodes():
            hint = "Start it without torchrun; parallel=ddp launches the ranks of each job"
            raise ConfigError("C014", "every rank would run the whole sweep", key="-m", suggestion=hint)
        return sweep(words, run)

    def read() -> Any:
        return read_typed(words, file)

    if args.dry_run:
        from ptfast.cli.dry_run import dry_run

        if ranks is not None and not ranks.is_first:
            return EXIT_OK
        composed, config = read()
        with composed.naming_places():
            return dry_run(config)
    started = [f"--config={file}", *words] if file else words
    if ranks is not None:
        from ptfast.launch.launcher import start_rank

        return start_rank(ranks, read, started)
    composed, config = read()
    from ptfast.launch.launcher import start

    with composed.naming_places():
        return start(composed, config, started)


def _check_actions(args: Namespace) -> None:
    """Refuse flags of which one would be ignored: all but `--config` are things to do."""
    given = [flag.name for flag in COMMANDS["train"].flags if getattr(args, flag.name[2:].replace("-", "_"))]
    actions = [flag for flag in given if flag != "--config"]
    if "--config" in given and (others := [flag for flag in ("--multirun", "--info") if flag in given]):
        actions = ["--config", *others]
    if len(actions) > 1:
        what = f"cannot be combined with {actions[0]}"
        raise ConfigError("C011", what, key=actions[1], place=COMMAND_LINE, suggestion="Give one of the two")


def eval(args: Namespace) -> int:
    """Evaluate a saved state."""
    where, *overrides = args.words
    if more := [word for word in overrides if "=" not in word]:
        hint = f"Usage: ptfast eval {COMMANDS['eval'].usage}"
        raise ConfigError("C001", "one argument too many", key=more[0], suggestion=hint)
    state_folder, composed, config = saved_run(where, overrides)
    from ptfast.training.saved_model import evaluate_saved

    named = [key for key, place in composed.places.items() if place == COMMAND_LINE]
    other_data = any(key.split(".")[0] == "data" for key in named)
    with composed.naming_places():
        return evaluate_saved(config, state_folder, args.split, other_data=other_data)


def find(args: Namespace) -> int:
    """Find a number for a config."""
    if args.kind == "batch" and args.num_steps and not args.noise:
        hint = "Add --noise"
        raise ConfigError("C011", "is for --noise", key="--steps", place=COMMAND_LINE, suggestion=hint)
    composed, config = read_typed(args.words)
    options = {name: value for name, value in vars(args).items() if value is not None and name not in _OTHERS}
    with composed.naming_places():
        if args.kind == "lr":
            from ptfast.measure.lr.lr_finder import find_lr

            return find_lr(composed, config, args.words, **options)
        if args.kind == "workers":
            from ptfast.measure.loader.loader_finder import find_workers

            return find_workers(config, args.words, **options)
        from ptfast.measure.batch.batch_finder import find_batch

        return find_batch(composed, config, args.words, **options)


def ablate(args: Namespace) -> int:
    """Measure what techniques are worth for a config, or what is claimed of them."""
    if args.claims:
        from ptfast.measure.claims.hold_claims import hold_claims

        others = [flag for flag, given in (("--only", args.only), ("--compile", args.compile)) if given]
        if other := [*args.words, *others]:
            what, hint = "claims bring their own models and data", "Leave it out, or leave out --claims"
            raise ConfigError("C011", what, key=other[0], place=COMMAND_LINE, suggestion=hint)
        return hold_claims(budget_s=args.budget, out=args.out)
    from ptfast.config.catalogue import technique_named

    only = [technique_named(name, "--only") for name in args.only.split(",")] if args.only else []
    composed, config = read_typed(args.words)
    with composed.naming_places():
        from ptfast.measure.ablate.ablate_run import ablate

        how: dict[str, Any] = {"budget_s": args.budget, "compiles": args.compile, "out": args.out}
        return ablate(composed, config, args.words, only=only, **how)


def audit(args: Namespace) -> int:
    """Audit a config."""
    composed, config = read_typed(args.words)
    with composed.naming_places():
        from ptfast.measure.audit.audit_run import audit

        how: dict[str, Any] = {"budget_s": args.budget, "strict": args.strict, "fix": args.fix}
        return audit(config, args.words, out=args.out, **how)


def race(args: Namespace) -> int:
    """Race variants of a config."""
    from ptfast.measure.race.race_arms import build_arms
    from ptfast.measure.race.race_results import Target

    if args.target is None:
        hint = "Usage: ptfast race [+recipe=NAME] key=a,b --target accuracy:0.9"
        raise ConfigError("C016", "an argument is missing", key="--target", suggestion=hint)
    target = Target.parse(args.target)
    arms = build_arms(args.words, args.arms)
    from ptfast.measure.race.racer import race

    given = {"--target": args.target, "--arms": args.arms, "--seeds": args.seeds, "--out": args.out}
    command = ["ptfast", "race", *args.words, *(f"{name}={value}" for name, value in given.items() if value)]
    command += ["--tune-lr"] * args.tune_lr
    return race(arms, target, num_seeds=args.seeds, command=command, tunes=args.tune_lr, out=args.out)
