"""`ptfast eject`: the run of a config as a PyTorch script without ptfast, with the same losses."""

from __future__ import annotations

import inspect
import pprint
import shutil
import sys
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ptfast.config.schema import Config, defaults, flatten
from ptfast.core.distributed import Ranks
from ptfast.core.errors import EXIT_OK, MachineError, cannot_write
from ptfast.core.run import Run
from ptfast.core.sections.targets import Target, keywords, plain
from ptfast.measure.eject.partial_source import Gathered
from ptfast.measure.eject.script_constants import COMMENTS, PARTS, constants_of, data_part, refused
from ptfast.report.terminal.display import build_display, say
from ptfast.training.build import build

COVERED = (
    *("recipe", "preset", "trust", "epochs", "steps", "batch_size", "micro_batches", "seed", "device"),
    *("log_every", "run", "sweep", "saving", "logger", "debug", "stop.metric", "stop.mode", "task"),
    *("eval.every", "eval.batch_size", "data.val", "data.normalize", "dataloader", "batching.padding"),
    *("augment.crop_padding", "augment.flip", "precision", "optimizer.decay_1d", "schedule.warmup"),
    *("gradients.accumulate", "gradients.clip_norm", "gradients.clip_value", "gradients.log_norm"),
    *("rewrites", "backend.threads", "backend.worker_threads", "backend.cudnn_benchmark"),
    "backend.flush_denormals",
    *("parallel.nproc", "parallel.timeout", "parallel.gradient_as_bucket_view"),
)
"""Keys and sections whose values a script follows, or that change none of its bits."""
_WIDTH = 110


def eject(config: Config, tree: dict[str, Any], command: str, out: Path) -> int:
    """Write the run of `config` to the file `out` as a script.

    What `auto` becomes is resolved by building the run here, and stands in the script as a value.

    Args:
        tree: the config as plain values.
        command: with which ptfast trains the same.

    Raises:
        ConfigError: C011 for what no script is made of.
        MachineError: E001 if the file cannot be written.
    """
    check_covered(tree)
    if config.sampling.target is not None:
        raise refused("sampling", config.sampling.target.path, "Use sampling=shuffle")
    display = build_display()
    with tempfile.TemporaryDirectory(prefix="ptfast-") as folder:
        run = build(config, ranks=Ranks(), folder=Path(folder), display=display)
        try:
            text = script(config, run, command)
        finally:
            run.close()
            display.close()
    _write(out, text)
    copied = ""
    if config.data.target.path.endswith(".Digits"):
        from ptfast.data.sources import digits

        shutil.copyfile(Path(digits.__file__).with_name("digits.npz"), out.with_name("digits.npz"))
        copied = ", and digits.npz beside it"
    say(f"wrote {out}, {len(text.splitlines()):,} lines{copied}; run it there with: python {out.name}")
    return EXIT_OK


def check_covered(tree: dict[str, Any]) -> None:
    """Refuse a config that asks for what no script is made of.

    Raises:
        ConfigError: C011, naming the first key.
    """
    given = flatten(tree)
    for key, default in flatten(defaults()).items():
        covered = any(key == known or key.startswith(f"{known}.") for known in COVERED)
        if not covered and (value := given.get(key, default)) != default:
            raise refused(key, value, f"Set {key}={'null' if default is None else default}")


def script(config: Config, run: Run, command: str) -> str:
    """The source of the script of a run that was built and not trained.

    Raises:
        ConfigError: C011 for what no script is made of.
    """
    constants = constants_of(config, run)
    gathered = Gathered(constants, {f"{PARTS}.script_images": f"{PARTS}.{data_part(config)}"})
    for name in ("Split", "load_data", "training_batch", "evaluation_batch"):
        gathered.add(f"{PARTS}.script_images", name)
    model = _model(config, run, gathered)
    optimizer = _optimizer(config, run, gathered)
    gathered.add(f"{PARTS}.script_training", "train")
    gathered.imports.add("import torch")
    settings = ["torch.set_num_threads(THREADS)"]
    gathered.used |= {"SEED", "THREADS", "DEVICE"}
    if run.resolved.flushes_denormals:
        settings.append("torch.set_flush_denormal(True)")
    if run.resolved.matmul_precision != "highest":
        settings.append(f'torch.set_float32_matmul_precision("{run.resolved.matmul_precision}")')
    if torch.backends.cuda.matmul.allow_tf32 and run.device.type == "cuda":
        settings.append("torch.backends.cudnn.allow_tf32 = True")
    if run.resolved.cudnn_benchmark:
        settings.append("torch.backends.cudnn.benchmark = True")
    body = [
        '"""Train, save the weights to weights.pt, and return the losses that were printed."""',
        *settings,
        "torch.manual_seed(SEED)",
        *model,
        *optimizer,
        "losses = train(model, optimizer)",
        'torch.save(model.state_dict(), "weights.pt")',
        "return losses",
    ]
    main = "\n".join(["def main() -> list[float]:", *(f"    {line}" for line in body)])
    head = [
        f'"""{_title(config)}, by plain PyTorch.',
        "",
        *textwrap.wrap(
            f"Trains what `{command}` trains, with the same losses to the bit on a {run.device.type.upper()} "
            f"of the same kind under torch {torch.__version__.split('+')[0]}.",
            _WIDTH,
            break_long_words=False,
        ),
        "Written by `ptfast eject`; it is yours to change.",
        '"""',
    ]
    sections = ["\n".join(head), _imports(gathered.imports), _settings(gathered.used, constants)]
    sections[-1] += "".join(f"\n{line}" for line in gathered.assignments)
    text = "\n\n".join(sections) + "\n\n\n" + "\n\n\n".join([*gathered.definitions, main])
    return text + '\n\n\nif __name__ == "__main__":\n    main()\n'


def _model(config: Config, run: Run, gathered: Gathered) -> list[str]:
    """Lines that build the model."""
    target = config.model.target
    given = _arguments(target, {name: value for name, value in asdict(run.info).items() if value is not None})
    library = {"ptfast.models.torchvision.build": "torchvision", "ptfast.models.timm.build": "timm"}
    if name := library.get(target.path):
        given.pop("pretrained", None)
        channels = given.pop("in_channels", 3)
        if name == "torchvision" and channels != 3:
            raise refused("model.name", given["name"], "Its first layer was changed for other channels")
        if name == "torchvision":
            gathered.imports.add("import torchvision")
            lines = call("torchvision.models.get_model", {"": given.pop("name"), **given})
        else:
            gathered.imports.add("import timm")
            lines = call("timm.create_model", {"": given.pop("name"), "in_chans": channels, **given})
    else:
        lines = call(_named(target, "model._target_", gathered), given)
    lines[0] = f"model = {lines[0]}"
    for layer, norm in (run.resolved.dropped_biases or {}).items():
        lines.append(f'# The norm behind "{layer}" subtracts its bias again.')
        lines.append(
            f'model.get_submodule("{norm}").running_mean -= model.get_submodule("{layer}").bias.data'
        )
        lines.append(f'model.get_submodule("{layer}").bias = None')
    layout = ", memory_format=torch.channels_last" if run.resolved.channels_last else ""
    return [*lines, f"model.to(DEVICE{layout})"]


def _optimizer(config: Config, run: Run, gathered: Gathered) -> list[str]:
    """Lines that build the optimizer."""
    target = config.optimizer.target
    if target.path.startswith("ptfast."):
        hint = "Choose one of torch.optim or of a package of its own"
        raise refused("optimizer._target_", target.path, hint)
    given = _arguments(target, {})
    if run.resolved.optimizer == "fused":
        given["fused"] = True
    name = _named(target, "optimizer._target_", gathered)
    if config.optimizer.decay_1d:
        lines = call(name, {"": Source("model.parameters()"), **given})
        return ["optimizer = " + lines[0], *lines[1:]]
    lines = call(name, {"": Source("groups"), **given})
    return [
        "matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]",
        "others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]",
        'groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]',
        "optimizer = " + lines[0],
        *lines[1:],
    ]


def _arguments(target: Target, facts: dict[str, Any]) -> dict[str, Any]:
    """The keywords that a target is called with, without those that are its defaults."""
    takes = keywords(target.resolve())
    given = {name: fact for name, fact in facts.items() if name in takes} | plain(target.kwargs)
    given.pop("fused", None)
    kept: dict[str, Any] = {}
    for name, value in given.items():
        default = takes[name].default if name in takes else inspect.Parameter.empty
        as_given = list(default) if isinstance(default, tuple) and isinstance(value, list) else default
        if as_given is inspect.Parameter.empty or as_given != value:
            kept[name] = value
    if any(isinstance(value, dict) and "_target_" in value for value in kept.values()):
        raise refused(target.path, "nested", "Set plain values")
    return kept


def _named(target: Target, key: str, gathered: Gathered) -> str:
    """What a target is called in the script, its source or its import gathered."""
    module, _, name = target.path.rpartition(".")
    if target.path.startswith("torch."):
        return target.path
    if module.split(".")[0] == "ptfast":
        gathered.add(module, name)
        return name
    if not module:
        raise refused(key, target.path, "Name it with its module")
    gathered.imports.add(f"from {module} import {name}")
    return name


class Source(str):
    """An argument that is source, and no text."""


def call(name: str, arguments: dict[str, Any]) -> list[str]:
    """The lines of a call; the argument of no name comes first."""
    words = [
        (f"{key}=" if key else "") + (value if isinstance(value, Source) else repr(value))
        for key, value in arguments.items()
    ]
    line = f"{name}({', '.join(words)})"
    if len(line) + 20 <= _WIDTH:
        return [line]
    return [f"{name}(", *(f"    {word}," for word in words), ")"]


def _settings(used: set[str], constants: dict[str, Any]) -> str:
    lines = []
    for name, value in constants.items():
        if name in used:
            shown = pprint.pformat(value, width=_WIDTH - 20, compact=True).replace("'", '"')
            note = f"  # {COMMENTS[name]}" if name in COMMENTS and "\n" not in shown else ""
            lines.append(f"{name} = {shown}{note}")
    return "\n".join(lines)


def _imports(found: set[str]) -> str:
    """Imports in the order of isort: of the standard library first."""
    merged: dict[str, set[str]] = {}
    for line in found:
        module, _, name = line.removeprefix("from ").partition(" import ")
        merged.setdefault(module if name else line, set()).update({name} - {""})
    groups: tuple[list[str], list[str]] = ([], [])
    for module, names in merged.items():
        text = f"from {module} import {', '.join(sorted(names))}" if names else module
        root = module.removeprefix("import ").split(".")[0].split(" ")[0]
        groups[root not in sys.stdlib_module_names].append(text)
    key = lambda text: (text.startswith("from "), text.lower())  # noqa: E731
    return "\n\n".join(
        "\n".join(sorted(group, key=key))
        for group in (["from __future__ import annotations"], *groups)
        if group
    )


def _title(config: Config) -> str:
    data, model = (target.path.split(".") for target in (config.data.target, config.model.target))
    named = config.model.target.kwargs.get("name", model[-1])
    return f"{named} on {config.data.target.kwargs.get('name', data[-1].lower())}"


def _write(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        what, hint = "exists already and is not overwritten", "Choose another name"
        raise MachineError("E001", what, key="--out", value=out, suggestion=hint) from None
    except OSError as error:
        raise cannot_write(error, "--out", out) from None
