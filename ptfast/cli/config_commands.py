"""The commands that read a config: train, eval, and the measuring commands."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from ptfast.cli.commands import COMMANDS
from ptfast.config.checks.rules import unused_keys
from ptfast.config.compose import Composed
from ptfast.config.read import load_config, read_config
from ptfast.config.schema import Config
from ptfast.core.distributed import Ranks, nodes_from_environment, world
from ptfast.core.errors import COMMAND_LINE, EXIT_OK, ConfigError
from ptfast.core.run_directory import CONFIG
from ptfast.core.units import duration, num_bytes
from ptfast.report.terminal.display import build_display, say, table


def train(args: Namespace) -> int:
    """Train, sweep, or show the run that would be trained."""
    # All flags except --config are actions; only one may be given.
    given = [flag.name for flag in COMMANDS["train"].flags if getattr(args, flag.attribute)]
    actions = [flag for flag in given if flag != "--config"]
    alone = {"--multirun": args.multirun, "--cfg": args.cfg == "hydra"}
    if args.config and any(alone.values()):
        actions = ["--config", *(flag for flag, is_given in alone.items() if is_given)]
    if len(actions) > 1:
        what = f"cannot be combined with {actions[0]}"
        raise ConfigError("C011", what, key=actions[1], place=COMMAND_LINE, suggestion="Give one of the two")
    words = args.words
    file = Path(args.config) if args.config else None
    if file and file.is_dir():
        file /= CONFIG
    if args.cfg:
        from ptfast.config.multirun import show_config

        print(show_config(args.cfg, words, file), end="")
        return EXIT_OK
    ranks = world(meets=any(word.startswith("parallel.nnodes=") for word in words))
    if args.multirun:
        from ptfast.cli.command_line import run
        from ptfast.cli.sweep_command import sweep_runs

        if ranks is not None or nodes_from_environment():
            hint = "Start it without torchrun; parallel=ddp launches the ranks of each job"
            raise ConfigError("C014", "every rank would run the whole sweep", key="-m", suggestion=hint)
        return sweep_runs(words, run)[1]

    started = [f"--config={file}", *words] if file else words
    if ranks is not None and not args.dry_run:
        from ptfast.launch.launcher import start_rank
        from ptfast.launch.rank_main import leave

        exit_code = start_rank(ranks, lambda: read_typed(words, file), started)
        if ranks.distributed:
            leave(exit_code)
        return exit_code
    if ranks is not None and not ranks.is_first:
        return EXIT_OK
    composed, config = read_typed(words, file)
    with composed.naming_places():
        if args.dry_run:
            return dry_run(config)
        from ptfast.launch.launcher import start

        return start(composed, config, started)


def eval(args: Namespace) -> int:
    where, *overrides = args.words
    from ptfast.training.saved_model import evaluate_saved, saved_run

    with saved_run(Path(where), overrides, checkpoint=args.checkpoint) as saved:
        return evaluate_saved(saved, args.split, overrides)


def find(args: Namespace) -> int:
    """Search for the best value of one setting of a config."""
    composed, config = read_typed(args.words)
    names = [flag.attribute for flag in COMMANDS["find"].kinds[args.kind].flags]
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    with composed.naming_places():
        from ptfast.measure.find.batch_finder import find_batch
        from ptfast.measure.find.loader_finder import find_workers
        from ptfast.measure.find.lr_finder import find_lr

        finders = {"lr": find_lr, "batch": find_batch, "workers": find_workers}
        return finders[args.kind](config, args.words, **options)


def ablate(args: Namespace) -> int:
    """Measure the gain of techniques for a config."""
    from ptfast.config.catalogue import technique_named

    only = [technique_named(name) for name in args.only.split(",")] if args.only else []
    composed, config = read_typed(args.words)
    with composed.naming_places():
        from ptfast.measure.ablate_run import ablate

        words, budget_s = args.words, args.budget
        return ablate(config, words, only=only, budget_s=budget_s, compiles=args.compile, out=args.out)


def audit(args: Namespace) -> int:
    composed, config = read_typed(args.words)
    with composed.naming_places():
        from ptfast.measure.audit.audit_run import audit

        words, budget_s = args.words, args.budget
        return audit(config, words, budget_s=budget_s, strict=args.strict, fix=args.fix, out=args.out)


def race(args: Namespace) -> int:
    """Sweep over seeds, and compare how soon the runs reach the target."""
    from ptfast.cli.command_line import run
    from ptfast.cli.run_ranking import rank_runs
    from ptfast.cli.sweep_command import sweep_runs
    from ptfast.cli.time_to_target import Target, compare_to_target

    if args.target is None:
        hint = "Usage: ptfast race [recipe=NAME] key=a,b --target accuracy=0.9"
        raise ConfigError("C016", "an argument is missing", key="--target", suggestion=hint)
    target = Target.parse(args.target)
    # The first word varies slowest: variants take turns, so that drift of the machine affects all equally.
    seeds = f"seed={','.join(map(str, range(args.seeds)))}"
    words = [seeds, *args.words, f"stop.metric={target.metric}", "stop.patience=null"]
    runs, code = sweep_runs(words, run)
    if runs:
        compare_to_target(rank_runs(runs, f"best.{target.metric}"), runs, target)
        say(f"to repeat this, or to add other runs: ptfast compare {runs[0].parent} --target {args.target}")
    return code


def chaos(args: Namespace) -> int:
    _, config = read_typed(args.words)
    from ptfast.measure.chaos.chaos_run import chaos

    return chaos(config, args.words, num_kills=args.num_kills, seed=args.seed, out=args.out)


TIMED_STEPS = 5


def dry_run(config: Config) -> int:
    """Build the run in a temporary folder, take a few steps, and print the cost of the whole run."""
    from ptfast.core.machine import peak_memory_bytes
    from ptfast.profiling.operator_counting import Operators, flops
    from ptfast.profiling.roofline import flop
    from ptfast.training.build import build
    from ptfast.training.fit import try_out
    from ptfast.training.loop.step import Trainer
    from ptfast.training.user_code import naming_user_code

    display = build_display()
    with tempfile.TemporaryDirectory(prefix="ptfast-") as name:
        folder = Path(name)
        run = build(config, ranks=Ranks(), folder=folder, display=display)
        # With a curriculum, inputs reach full size in the last steps: measure those.
        first = max(run.total_steps - TIMED_STEPS - 1, 0) if run.choices.get("curriculum") else 0
        run.progress.step = first
        batches = run.train_loader.steps(first, run.total_steps)
        trainer = Trainer(run)
        operators = Operators()
        with operators, naming_user_code(run):
            trainer.train(batches, first + 1)
        trainer.losses.read()
        trainer.first_checks.check_evaluation()
        seconds = []
        for step in range(first + 2, min(first + TIMED_STEPS + 1, run.total_steps) + 1):
            start = time.perf_counter()
            trainer.train(batches, step)
            trainer.losses.read()
            seconds.append(time.perf_counter() - start)
        try_out(run)
        run.close()
        saved = (path for path in (folder / "saved").rglob("*") if not path.is_symlink())
        state_bytes = sum(path.stat().st_size for path in saved if path.is_file())
        total = sum(map(flops, operators.products))
        step_s = statistics.median(seconds) if seconds else float("nan")
        per_epoch = run.train_loader.plan.steps_per_epoch
        whole, loss = duration(step_s * run.total_steps), run.progress.window_loss
        loss /= run.progress.window_items or 1
        states = config.saving.keep + int(config.saving.best) + 1
        rows = [
            ("parameters", f"{sum(p.numel() for p in run.model.parameters()):,}"),
            ("peak memory", num_bytes(peak_memory_bytes(run.device.type))),
            ("operations per step", flop(total) if total else "not counted"),
            ("time per step", f"{step_s * 1e3:,.1f} ms"),
            ("throughput", f"{run.train_loader.plan.batch_size / step_s:,.0f} samples/s"),
            ("time per epoch", duration(step_s * per_epoch) if per_epoch else "unknown: iterable data"),
            ("time of the run", f"{whole} for {run.total_steps:,} steps, without evaluation"),
            ("disk", f"{num_bytes(state_bytes)} per checkpoint, up to {states} at a time"),
            ("loss of the first steps", f"{loss:.4g}"),
        ]
        table(["dry run", run.data_note], rows)
    return EXIT_OK


def read_typed(arguments: list[str], file: Path | None = None) -> tuple[Composed, Config]:
    """Compose and validate the config in the arguments, from a recipe or from a frozen config file."""
    composed, config = load_config(file, arguments) if file else read_config(arguments)
    if file:
        composed = dataclasses.replace(composed, arguments=["--config", str(file), *arguments])
    if world(meets=True) is None and (config.parallel.nnodes > 1 or nodes_from_environment()):
        # Only the first rank prints it.
        return composed, config
    for warning in [*composed.warnings, *unused_keys(config, composed.place)]:
        say(f"ptfast: warning: {warning}", sys.stderr)
    return composed, config
