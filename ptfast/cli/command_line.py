"""The commands: reads flags, calls what does the work, prints errors; imports torch only where needed."""

from __future__ import annotations

import logging
import sys
import textwrap
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ptfast.cli.flags import CONFIG_DIR, Command, read_flags, search_in
from ptfast.cli.help_text import WIDTH, help_text
from ptfast.cli.measuring_commands import SEARCHES, ablate, audit, find, race
from ptfast.cli.typed_config import read_typed, saved_run
from ptfast.core.errors import (
    COMMAND_LINE,
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    PtfastError,
    ReportedError,
    bug_line,
    cannot_write,
    render,
)
from ptfast.report.terminal.command_output import flush, print_error, say_starting

IMPORT_TORCH = ("train", "eval", "predict", "pack")
"""Commands that take seconds to start, as those do that measure."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; whatever goes wrong is printed, as one line."""
    code = _run(list(arguments))
    flush(sys.stdout, sys.stderr)
    return code


def _run(words: list[str]) -> int:
    show_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        return _dispatch(words)
    except PtfastError as error:
        print_error(render(error), traceback.format_exc() if show_traceback else "")
        return error.exit_code
    except KeyboardInterrupt:
        print_error("ptfast: interrupted", traceback.format_exc() if show_traceback else "")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (`ptfast recipes | head`).
        return EXIT_OK
    except ReportedError as error:
        print_error(str(error), error.details if show_traceback else "")
        return error.exit_code
    except Exception as error:
        print_error(bug_line(error), traceback.format_exc() if show_traceback else "")
        return EXIT_BUG


def _dispatch(words: list[str]) -> int:
    from ptfast import __version__

    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text(COMMANDS, *words[1:2]))
        return EXIT_OK
    if words[0] in ("-V", "--version"):
        print(f"ptfast {__version__}")
        return EXIT_OK
    name, *rest = words
    if name == "__complete":
        from ptfast.config.editors.completion import complete

        flags = {name: sorted(command.flags) for name, command in COMMANDS.items()}
        print("\n".join(complete(rest, flags, {"find": SEARCHES})))
        return EXIT_OK
    if name not in COMMANDS:
        from ptfast.config.files.paths import recipe_file
        from ptfast.core.sections.nearest_name import did_you_mean

        hint = did_you_mean(name, COMMANDS) or f"Commands: {', '.join(COMMANDS)}"
        if "=" in name or name.partition("=")[0] in ("-m", "-c", "-i", *COMMANDS["train"].flags):
            hint = f"Did you mean ptfast train {name}?"
        elif recipe_file(name):
            hint = f"Did you mean ptfast train +recipe={name}?"
        raise ConfigError("C015", "no such command", key=name, suggestion=hint)
    command = COMMANDS[name]
    flags, others = read_flags(rest, command.flags)
    if CONFIG_DIR in flags:
        search_in(flags.pop(CONFIG_DIR))
    if "--help" in flags:
        print(help_text(COMMANDS, name))
        return EXIT_OK
    hint = f"Usage: ptfast {name} {command.usage}".rstrip()
    if len(others) < command.min_arguments:
        raise ConfigError("C016", "an argument is missing", key=name, suggestion=hint)
    if command.max_arguments is not None and others[command.max_arguments :]:
        raise ConfigError("C001", "one argument too many", key=others[command.max_arguments], suggestion=hint)
    if command.alone:
        from ptfast.core.distributed import told_of_nodes, world

        if world() is not None or told_of_nodes():
            hint = "Start it without torchrun; parallel=ddp launches the ranks"
            raise ConfigError("C014", "every rank would measure by itself", key=name, suggestion=hint)
    if (command.alone or name in IMPORT_TORCH) and not {"--cfg", "--info"} & set(flags):
        say_starting()
    return command.run(flags, others)


def _train(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.core.run_directory import config_file

    _check_pairs(flags)
    file = config_file(Path(flags["--config"])) if "--config" in flags else None
    if "--info" in flags or "--cfg" in flags:
        from ptfast.config.multirun import show_config, show_info

        if "--info" in flags:
            # Hydra prints by logging, which would report a reader that has gone (`| head`) for each line.
            logging.raiseExceptions = False
            show_info(flags["--info"], arguments)
        else:
            print(show_config(flags["--cfg"], arguments, file), end="")
        return EXIT_OK
    from ptfast.core.distributed import told_of_nodes, world

    ranks = world(meets=any(word.startswith("parallel.nnodes=") for word in arguments))
    if "--multirun" in flags:
        from ptfast.cli.sweep_command import sweep

        if ranks is not None or told_of_nodes():
            hint = "Start it without torchrun; parallel=ddp launches the ranks of each job"
            raise ConfigError("C014", "every rank would run the whole sweep", key="-m", suggestion=hint)
        return sweep(arguments, run)

    def read() -> Any:
        return read_typed(arguments, file)

    if "--dry-run" in flags:
        from ptfast.cli.dry_run import dry_run

        if ranks is not None and not ranks.is_first:
            return EXIT_OK
        composed, config = read()
        with composed.naming_places():
            return dry_run(config)
    words = [f"--config={file}", *arguments] if file else arguments
    if ranks is not None:
        from ptfast.launch.launcher import start_rank

        return start_rank(ranks, read, words)
    composed, config = read()
    from ptfast.launch.launcher import start

    with composed.naming_places():
        return start(composed, config, words)


def _check_pairs(flags: dict[str, Any]) -> None:
    """Refuse flags of which one would be ignored: most of them are things to do."""
    actions = [flag for flag in flags if flag != "--config"]
    if "--config" in flags and (other := {"--multirun", "--info"} & set(flags)):
        actions = ["--config", *other]
    if len(actions) > 1:
        what = f"cannot be combined with {actions[0]}"
        raise ConfigError("C011", what, key=actions[1], place=COMMAND_LINE, suggestion="Give one of the two")


def _eval(flags: dict[str, Any], arguments: list[str]) -> int:
    path, *overrides = arguments
    if paths := [word for word in overrides if "=" not in word]:
        hint = f"Usage: ptfast eval {COMMANDS['eval'].usage}"
        raise ConfigError("C001", "one argument too many", key=paths[0], suggestion=hint)
    state_folder, composed, config = saved_run(path, overrides)
    from ptfast.training.saved_model import evaluate_saved

    named = [key for key, place in composed.places.items() if place == COMMAND_LINE]
    other_data = any(key.split(".")[0] == "data" for key in named)
    with composed.naming_places():
        return evaluate_saved(config, state_folder, flags.get("--split"), other_data=other_data)


def _predict(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.cli.predict_command import predict

    path, *words = arguments
    return predict(flags, path, words, saved_run)


def _launch(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.cli.launch_command import launch

    engine, *words = arguments
    return launch(engine, flags, words)


def _recipes(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.config.editors.help import recipes
    from ptfast.report.terminal.display import say

    for entry in recipes():
        summary = textwrap.fill(entry.summary, WIDTH, initial_indent="    ", subsequent_indent="    ")
        print(f"{entry.name}\n{summary}")
        say(f"    {entry.command}\n")
    print("ptfast copy NAME FILE writes one to edit.")
    return EXIT_OK


def _pack(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.cli.pack_command import pack

    return pack(flags, arguments)


def _techniques(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.cli.techniques_command import markdown, show

    name = " ".join(arguments)
    if "--markdown" in flags and name:
        hint = "Leave one of the two out"
        raise ConfigError("C011", "the Markdown table is of all techniques", key=name, suggestion=hint)
    if "--markdown" in flags:
        print(markdown())
    else:
        show(name or None)
    return EXIT_OK


def _copy(flags: dict[str, Any], arguments: list[str]) -> int:
    name, *rest = arguments
    from ptfast.config.editors.help import copy_recipe

    file = Path(rest[0] if rest else f"{name}.yaml")
    called = copy_recipe(name, file)
    print(f"wrote {file}; run it with: ptfast train +recipe={called}")
    return EXIT_OK


def _schema(flags: dict[str, Any], arguments: list[str]) -> int:
    import json

    from ptfast.config.editors.json_schema import schema

    text = json.dumps(schema(), indent=2)
    if "--out" not in flags:
        print(text)
        return EXIT_OK
    try:
        Path(flags["--out"]).write_text(text + "\n")
    except OSError as error:
        raise cannot_write(error, "--out", flags["--out"]) from error
    return EXIT_OK


def _compare(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.cli.compare_command import compare

    out = Path(flags["--out"]) if "--out" in flags else None
    compare([Path(path) for path in arguments], flags.get("--metric"), flags.get("--mode", "auto"), out)
    return EXIT_OK


def _completion(flags: dict[str, Any], arguments: list[str]) -> int:
    from ptfast.config.editors.completion import script

    print(script(arguments[0] if arguments else "bash"))
    return EXIT_OK


def _flags(words: str) -> dict[str, bool]:
    """Flags, and whether a value follows, which a `=` behind one says."""
    return {word.removesuffix("="): word.endswith("=") for word in words.split()}


_RUN = "[+recipe=NAME] [key=value ...]"
COMMANDS: dict[str, Command] = {
    "train": Command(
        _RUN,
        "train a model; -m sweeps over key=a,b",
        _train,
        _flags("--multirun --dry-run --config= --cfg= --info="),
    ),
    "launch": Command(
        f"slurm|ray {_RUN}",
        "train on a cluster: submit a job, or print it",
        _launch,
        _flags("--nodes= --gpus= --cpus= --time= --partition= --print"),
        min_arguments=1,
    ),
    "eval": Command(
        "RUN|STATE [key=value ...]", "evaluate a saved state", _eval, _flags("--split="), min_arguments=1
    ),
    "predict": Command(
        "RUN PATH...|--prompt TEXT [key=value ...]",
        "write predictions for files, or text after a prompt",
        _predict,
        _flags("--prompt= --max-new-tokens= --temperature= --top-k= --out="),
        min_arguments=1,
    ),
    "compare": Command(
        "RUN|FOLDER...",
        "rank runs and draw their curves",
        _compare,
        _flags("--metric= --mode= --out="),
        min_arguments=1,
    ),
    "pack": Command(
        "SRC DST",
        "turn images or text into memory-mapped files to train from",
        _pack,
        _flags("--size= --jpeg --on-corrupt= --tokenizer= --documents= --workers= --verify"),
        max_arguments=2,
    ),
    "find": Command(
        f"lr|batch|workers {_RUN}",
        "measure the best learning rate, batch size or loader",
        find,
        _flags("--from= --to= --steps= --trial-steps= --seconds= --write= --out= --noise --checkpointing"),
        alone=True,
    ),
    "ablate": Command(
        _RUN,
        "measure what each technique is worth here; write the best recipe",
        ablate,
        _flags("--budget= --only= --compile --claims --out="),
        alone=True,
    ),
    "audit": Command(
        _RUN,
        "find what costs speed in the model, data, loop and machine",
        audit,
        _flags("--budget= --fix= --strict --out="),
        alone=True,
    ),
    "race": Command(
        "[+recipe=NAME] key=a,b --target METRIC:VALUE",
        "train variants with the same seeds: which reaches a target first",
        race,
        _flags("--target= --seeds= --arms= --tune-lr --out="),
        alone=True,
    ),
    "recipes": Command("", "list the recipes and what each reaches", _recipes, {}, 0),
    "techniques": Command(
        "[NAME]",
        "list what makes training faster, and whether it applies here",
        _techniques,
        _flags("--markdown"),
    ),
    "copy": Command("NAME FILE", "copy a recipe to edit", _copy, {}, 2, min_arguments=1),
    "schema": Command("", "print a JSON Schema of recipe files, for editors", _schema, _flags("--out="), 0),
    "completion": Command("bash|zsh|fish", "print a shell completion script", _completion, {}, 1),
}
