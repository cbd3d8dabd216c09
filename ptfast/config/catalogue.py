"""The techniques, read from the `records.yaml` next to their code, and which of them apply here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ptfast.config.families import PARTS
from ptfast.config.files import paths
from ptfast.core import devices
from ptfast.core.errors import ConfigError, did_you_mean
from ptfast.core.machine import ROOT, spare_cores
from ptfast.core.sections.section import Need, Technique


def read_records(file: Path) -> Iterator[Technique]:
    """Yield the techniques in a file, where they are grouped by family and name."""
    # Load every value as text: YAML 1.1 reads the keys `on` and `off` as booleans.
    families = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    for family, records in families.items():
        for name, record in records.items():
            fields = {
                key: tuple(value) if isinstance(value, list) else value for key, value in record.items()
            }
            drift = float(record["drift"]) if "drift" in record else None
            yield Technique(name=name, family=family, **{**fields, "drift": drift})


_FILES = dict.fromkeys(Path(str(part.__file__)).with_name("records.yaml") for part in PARTS)
CATALOGUE: tuple[Technique, ...] = tuple(
    record for file in _FILES if file.is_file() for record in read_records(file)
)


def plain_name(name: str) -> str:
    """Return the name of a technique or family in lower case, with spaces for hyphens and underscores."""
    return name.lower().replace("-", " ").replace("_", " ").strip()


def technique_named(name: str) -> Technique:
    """Return the technique that `--only` names, with spaces or hyphens; raise C003 if there is none."""
    names = {plain_name(technique.name): technique for technique in CATALOGUE}
    if plain_name(name) not in names:
        hint = did_you_mean(name, [each.name for each in CATALOGUE]) or "ptfast techniques lists them"
        raise ConfigError("C003", "no such technique", key="--only", value=name, suggestion=hint)
    return names[plain_name(name)]


_GPU_FILES = ("dev/nvidia0", "dev/kfd", "dev/dxg")
"""Linux device files of GPUs that torch can use: NVIDIA's, AMD's, and either one under WSL."""
OF_THE_RUN: dict[Need, str] = {
    "images": "on images",
    "sequences": "on sequences",
    "convolutions": "in models with convolutions",
    "batchnorm": "in models with BatchNorm",
    "rms_norm": "in models with RMS norms of their own",
    "pack": "on what ptfast pack has made",
}
"""Needs that depend on the model and the data rather than on the machine."""


class Applicability(NamedTuple):
    """Whether a technique applies, and the text to show: `yes` with conditions, or `no` with the reason."""

    applies: bool
    text: str


class ThisMachine:
    """Checks whether this machine meets the needs of techniques; detects the device on first use."""

    @cached_property
    def device(self) -> str:
        """`cuda`, `mps` or `cpu`. Imports torch, which takes seconds, only if there may be a GPU."""
        if sys.platform == "linux" and not any((ROOT / file).exists() for file in _GPU_FILES):
            return "cpu"
        return devices.device_type("auto")

    def lacks(self, need: Need) -> str | None:
        """Return why `need` is not met, as a clause; None if it is met or independent of the machine."""
        if need in OF_THE_RUN:
            return None
        if need == "cores":
            return None if spare_cores() > 1 else "no core is to spare"
        if need in ("schedulefree", "peft"):
            return None if find_spec(need) else f"the package {need} is not installed"
        device = self.device
        name = "CPU" if device == "cpu" else "GPU"
        if need == "cuda":
            return None if device == "cuda" else "no CUDA device is visible"
        if need == "ranks":
            here, num_gpus = f"one {name}", 0
            if device == "cuda":
                import torch

                num_gpus = torch.cuda.device_count()
                here = f"{num_gpus} GPU" if num_gpus else here
            return None if num_gpus > 1 else f"it takes several GPUs or machines, and here is {here}"
        if need in ("bf16", "fp16", "half"):
            types = {"bf16": "bfloat16 is", "fp16": "float16 is", "half": "half-width numbers are"}
            fast = need != "bf16" and device == "cuda"
            fast = fast or (need != "fp16" and devices.multiplies_bf16(device))
            return None if fast else f"{types[need]} no faster on this {name}"
        if need == "nvidia_tf32":
            lack = devices.check_precision("tf32", device)
        else:
            lack = devices.check_float8(device) if need == "float8" else devices.check_compiler(device)
        return lack.what if lack else None


def verdict(technique: Technique, machine: ThisMachine) -> Applicability:
    """Return whether `machine` meets the needs of `technique`."""
    for need in technique.needs:
        if lack := machine.lacks(need):
            return Applicability(False, f"no: {lack}")
    where = [OF_THE_RUN[need] for need in technique.needs if need in OF_THE_RUN]
    return Applicability(True, ", ".join(["yes", *where]))


def default_state(technique: Technique, tree: Mapping[str, Any]) -> str:
    """Return the state of `technique` in the config `tree`: `on`, `off`, or `auto` if each run decides."""
    off, states = dict(_settings(technique.off)), set[str]()
    for key, value in _settings(technique.on):
        now: Any = reduce(lambda part, name: (part or {}).get(name), key.split("."), tree)
        # Other amounts than the record's, such as a shorter warm-up, also count as on.
        is_on = now == value or (off.get(key) == 0 and now and now != "auto")
        states.add("on" if is_on else "auto" if now == "auto" else "off")
    return next((state for state in ("off", "auto") if state in states), "on")


def _settings(words: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values that overrides set; an option sets the keys of its file."""
    for word in words:
        key, _, text = word.partition("=")
        if "." in key:
            yield key, yaml.safe_load(text)
        else:
            option = yaml.safe_load(paths.options(key)[text].read_text(encoding="utf-8"))
            yield from ((f"{key}.{name}", value) for name, value in (option or {}).items())
