"""`ptfast --help`: commands and config groups on one screen, and all of one command or group."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ptfast.cli.flags import CONFIG_DIR, Command
from ptfast.core.errors import ConfigError
from ptfast.core.sections.nearest_name import did_you_mean

WIDTH, INDENT = 80, 24
FLAG_HELP = {
    "--multirun": "(-m) sweep: train one run per combination of key=a,b",
    "--dry-run": "take a few steps without saving; print memory, time and disk of the run",
    "--config": "train from a run directory or its config.yaml",
    "--cfg": "(-c) print the composed config: job, hydra or all",
    "--info": "(-i) print how it is composed: defaults-tree, searchpath, plugins, ...",
    "--split": "evaluate one split: val or test",
    "--out": "file to write; for find, ablate and race, a folder",
    "--prompt": "text that a language model goes on from",
    "--max-new-tokens": "tokens to write after the prompt; default 100",
    "--temperature": "above 0, default 1: lower makes likely tokens likelier",
    "--top-k": "choose from so many of the likeliest tokens; default: all",
    "--metric": "figure to rank by, such as val.accuracy",
    "--mode": "max or min: which way the figure is better",
    "--from": "lowest learning rate, or smallest batch, to try",
    "--to": "highest learning rate, largest batch, or most workers, to try",
    "--steps": "optimizer steps of the range test, or of the training for --noise",
    "--trial-steps": "optimizer steps of each trial at one learning rate",
    "--seconds": "seconds to measure each batch size or loader",
    "--noise": "estimate the critical batch size from the gradient noise of a short training",
    "--checkpointing": "also try larger batches with activation checkpointing",
    "--only": "techniques to measure, by name: NAME,NAME",
    "--write": "recipe to write with what was found",
    "--budget": "time to measure for, such as 10m; for audit 0 measures no prices",
    "--claims": "hold what guides and papers promise against this machine",
    "--compile": "also try compiling, which takes long to begin",
    "--target": "figure to reach and its value, such as accuracy:0.9",
    "--seeds": "runs of each variant, each with its own seed",
    "--arms": "variants that differ in several keys: 'schedule=a epochs=5; schedule=b'",
    "--tune-lr": "give each variant its own learning rate by find lr",
    "--nodes": "machines of a job; default 1",
    "--gpus": "GPUs of each machine: 8, or H100:8",
    "--cpus": "cores of each machine",
    "--time": "limit of a job, such as 4h",
    "--partition": "SLURM's partition",
    "--print": "print what would be submitted",
    "--fix": "recipe to write with the overrides that mend findings",
    "--strict": "exit with 8 where something is found",
    "--markdown": "print all techniques as a Markdown table",
    "--size": "of images: pixels to shrink the shorter side to, such as 256; or keep",
    "--jpeg": "of images: keep the bytes of the files instead of their pixels",
    "--on-corrupt": "of images: on files that cannot be read: error or skip",
    "--tokenizer": "of text, as data.tokenizer: characters, words, a tokenizer.json, or a name on the hub",
    "--documents": "of text, as data.documents: none, lines or paragraphs",
    "--workers": "processes that convert; default: one for each core",
    "--verify": "check every byte of a pack, and its source: ptfast pack --verify DST",
    CONFIG_DIR: "folder of GROUP/OPTION.yaml and recipes/ to look in first",
    "--traceback": "show where an error comes from",
}
"""Meaning of each flag."""
EXAMPLES: dict[str, tuple[str, ...]] = {
    "train": (
        "train +recipe=resnet_digits",
        "train +recipe=resnet_cifar precision=amp optimizer=lamb optimizer.lr=0.01",
        "train -m +recipe=resnet_digits optimizer.lr=0.01,0.1 seed=0,1",
        "train +recipe=resnet_digits --cfg job",
        "train +recipe=resnet_digits --dry-run",
    ),
    "launch": ("launch slurm +recipe=resnet_cifar --nodes 2 --print",),
    "eval": ("eval RUN", "eval RUN/saved/best --split test"),
    "predict": ("predict RUN pictures/ --out found.jsonl", "predict RUN --prompt 'ROMEO:'"),
    "compare": ("compare RUN RUN --metric val.accuracy --out both.html",),
    "pack": ("pack images/ packed/ --size 256", "pack --verify packed/"),
    "find": (
        "find lr +recipe=resnet_digits",
        "find batch +recipe=resnet_cifar --write mine.yaml",
        "find workers +recipe=resnet_cifar --seconds 3",
    ),
    "ablate": (
        "ablate +recipe=resnet_cifar --budget 10m",
        "ablate +recipe=resnet_cifar --only 'fused optimizer step,channels last'",
        "ablate --claims",
    ),
    "audit": ("audit +recipe=resnet_cifar --fix mended.yaml", "audit +recipe=resnet_cifar --strict"),
    "race": (
        "race +recipe=resnet_digits schedule=onecycle,constant --target accuracy:0.95",
        "race +recipe=resnet_digits --arms 'optimizer=adamw; optimizer=lamb' --target loss:0.2",
    ),
    "recipes": ("recipes",),
    "techniques": ("techniques", "techniques precision", "techniques fused optimizer step"),
}
"""Command lines, without `ptfast`."""
_FOLDER = "folder to write into; by default a new one under runs"
OWN_FLAG_HELP = {
    **{(name, "--out"): _FOLDER for name in ("find", "ablate", "audit", "race")},
    ("compare", "--out"): "page (.html) or picture (.png) to write",
    ("predict", "--out"): "file to write instead of the terminal",
    ("audit", "--budget"): "time to measure for, 2m by default; 0 measures no prices",
    ("ablate", "--budget"): "time to measure for, 10m by default",
}
"""Meaning of flags that differ by command."""


def help_text(commands: Mapping[str, Command], topic: str | None = None) -> str:
    """Return what `--help` prints, of everything or of one command or config group.

    Raises:
        ConfigError: C003, there is no such topic.
    """
    if topic is None:
        return _overview(commands)
    if topic in commands:
        return _of_command(topic, commands[topic])
    from ptfast.config.files import paths
    from ptfast.config.schema import Config, section_of

    fields = {name: section_of(field.annotation) for name, field in Config.model_fields.items()}
    sections = [name for name, section in fields.items() if section is not None]
    known = dict.fromkeys([*commands, *paths.groups(), *sections])
    if topic not in known:
        hint = did_you_mean(topic, known, "ptfast --help {}") or "ptfast --help lists commands and groups"
        raise ConfigError("C003", "no such command or config group", key=topic, suggestion=hint)
    return "\n".join(_of_group(topic, fields.get(topic)))


def _overview(commands: Mapping[str, Command]) -> str:
    from ptfast import __version__
    from ptfast.config.files import paths

    groups = textwrap.fill(
        " ".join(sorted([*paths.groups(), "task"])), WIDTH, initial_indent="  ", subsequent_indent="  "
    )
    main = {name: command for name, command in commands.items() if name in EXAMPLES}
    rows = "\n".join(f"  {name:<12}{command.summary}" for name, command in main.items())
    others = ", ".join(name for name in commands if name not in main)
    return f"""\
ptfast {__version__}: PyTorch training from YAML, as fast as this machine allows
  ptfast train +recipe=resnet_digits optimizer=adamw optimizer.lr=1e-3

Commands; ptfast COMMAND --help shows arguments, flags and examples:
{rows}
  {"also":<12}{others}
Config groups; ptfast --help GROUP shows options (GROUP=OPTION) and keys:
{groups}"""


def _of_command(name: str, command: Command) -> str:
    summary = f"{command.summary[0].upper()}{command.summary[1:]}."
    lines = [f"Usage: ptfast {name} {command.usage}".rstrip(), "", summary]
    if name in EXAMPLES:
        lines += ["", "Examples:", *(f"  ptfast {example}" for example in EXAMPLES[name])]
    lines += ["", "Flags:"]
    for flag, takes_value in {**command.flags, CONFIG_DIR: True, "--traceback": False}.items():
        text = OWN_FLAG_HELP.get((name, flag)) or FLAG_HELP[flag]
        lines.append(_row(flag + " VALUE" * takes_value, text))
    if "key=value" in command.usage:
        lines += ["", "key=value sets a key of the config: ptfast --help lists its groups."]
    return "\n".join(lines)


def _of_group(group: str, section: Any) -> Iterator[str]:
    """The options of a group, the keys of its section, and those of single options."""
    from ptfast.config.checks.source_keywords import source_keywords
    from ptfast.config.checks.target_kinds import built_in_targets
    from ptfast.config.editors.docstrings import field_docs
    from ptfast.config.editors.help import entries
    from ptfast.core.sections.coerce import describe
    from ptfast.core.sections.targets import plain

    if section is not None:
        yield textwrap.fill(f"{group}: {' '.join((section.__doc__ or '').split())}", WIDTH) + "\n"
    if options := entries(group):
        yield f"Options, chosen with {group}=OPTION:"
        yield from (_row(option.name, option.summary) for option in options)
        yield ""
    fields = section.model_fields if section is not None else {}
    fixed = {key: field for key, field in fields.items() if key not in ("target", "options")}
    if fixed:
        yield f"Keys and defaults, set with {group}.KEY=VALUE:"
    for key, field in fixed.items():
        default = None if field.is_required() else plain(field.get_default(call_default_factory=True))
        value = json.dumps(default).strip('"')
        yield _row(f"{key}={value}", f"{field_docs(section).get(key, '')} ({describe(field.annotation)})")
    targets = built_in_targets(group)
    if targets:
        yield "\nKeys of single options, and of those built on them:"
    for path, names in targets.items():
        keywords = source_keywords(path)
        own = (keywords or [])[group in ("optimizer", "task") :]
        text = "those of its library" if keywords is None else ", ".join(own) or "none"
        yield _row(", ".join(names), text)
    if targets:
        yield "\nKeys of your own class are its keyword arguments."
    if targets and options:
        yield f"ptfast train {group}=OPTION --cfg job prints the values that an option sets."


def _row(name: str, text: str) -> str:
    """A name and what it means, wrapped."""
    indent = " " * INDENT
    start = f"  {name:<{INDENT - 3}} "
    lead = start if len(start) <= INDENT else f"{start.rstrip()}\n{indent}"
    return lead + textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent).lstrip()
