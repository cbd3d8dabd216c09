"""Random command lines made from the schema: valid as far as single keys go, or with one fault."""

from __future__ import annotations

from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from stand_ins import WITH

from ptfast.config.checks.target_checks import own_parameters
from ptfast.config.compose import compose
from ptfast.config.files import paths
from ptfast.config.schema import Config, section_of
from ptfast.core.durations import Duration
from ptfast.core.sections.coerce import InUnit, Range
from ptfast.core.sections.section import GATHERED, typed
from ptfast.core.sections.targets import locate

Words = list[str]
LEFT_OUT = ("compile", "parallel", "logger", "preset")
"""Groups whose options start compilers, processes or other programs."""
NOT_SET = {
    *("recipe", "preset", "vars", "trust", "callbacks", "metrics", "epochs", "steps", "seed", "device"),
    *("sweep", "run", "compile", "parallel", "logger", "num_classes", "vocab_size", "hf", "pad_id"),
    *("image_size", "context_length", "tokenizer", "pretrained", "weights", "collate", "threads", "download"),
}
"""Keys and sections that name files, or what the data says by itself."""
UNSET = ("data/cifar10", "data/cifar100", "model/hf", "debug/nvtx", "debug/profiler")
COUNTS = (1, 2, 3, 4, 8, 16)


def value_of(annotation: Any, random: Random) -> Any:
    """A value of a type, or None where nothing but a text of the user's own would do."""
    kind, bounds, unit = annotation, Range(), InUnit("steps")
    if get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        bounds = next((each for each in metadata if isinstance(each, Range)), bounds)
        unit = next((each for each in metadata if isinstance(each, InUnit)), unit)
    if get_origin(kind) in (Union, UnionType):
        members = [member for member in get_args(kind) if member is not NoneType]
        kinds = [Annotated[(member, bounds, unit)] for member in members]
        return value_of(random.choice(kinds), random)
    if get_origin(kind) is Literal:
        return random.choice(get_args(kind))
    if get_origin(kind) is Annotated:
        return value_of(kind, random)
    if kind is bool:
        return random.choice((True, False))
    low = bounds.low if bounds.low > -1e9 else 0
    high = min(bounds.high, low + 16)
    if kind is int:
        fitting = [count for count in COUNTS if low <= count <= high]
        return random.choice(fitting or [int(low)])
    if kind is float:
        return round(low + (high - low) * random.choice((0.01, 0.1, 0.5, 0.9)), 4)
    if kind is Duration:
        texts = {"steps": "2steps", "epochs": "1epochs", "samples": "20samples", "percent": "30%"}
        return (texts | {"seconds": "30s"})[random.choice(unit.allowed)]
    return None


def keys_of(group: str, words: Words) -> dict[str, Any]:
    """The keys that may be set in a section, with the annotations of their values."""
    section = section_of(Config.model_fields[group].annotation)
    assert section is not None
    fields = {key: typed(field) for key, field in section.model_fields.items() if key not in GATHERED}
    tree = compose(words, complete=False).tree[group] if "target" in section.model_fields else {}
    if isinstance(path := tree.get("_target_"), str):
        found = own_parameters(locate(path), group).items()
        fields = {key: parameter.annotation for key, parameter in found} | fields
    return {key: kind for key, kind in fields.items() if key not in NOT_SET}


def valid(random: Random) -> Words:
    """Some options, and some keys of some sections, each with a value that the key may have."""
    words: dict[str, str] = {"batch_size": str(random.choice((1, 4, 8, 10)))}
    options = [(group, name) for group in paths.groups() for name in paths.options(group)]
    options = [
        (group, name) for group, name in options if group not in LEFT_OUT and f"{group}/{name}" not in UNSET
    ]
    for group, name in random.sample(options, random.randrange(5)):
        needed = dict(word.split("=", 1) for word in WITH.get(f"{group}/{name}", ()))
        if not needed.keys() & words.keys() - {"batch_size"}:
            words = {**words, group: name, **needed}
    sections = [name for name, field in Config.model_fields.items() if section_of(field.annotation)]
    for group in random.sample(sorted({*sections} - NOT_SET - {"task"}), random.randrange(1, 5)):
        chosen = [f"{key}={value}" for key, value in words.items() if key.partition(".")[0] == group]
        keys = keys_of(group, chosen)
        for key in random.sample(sorted(keys), min(len(keys), random.randrange(1, 3))):
            if (value := value_of(keys[key], random)) is not None:
                words[f"{group}.{key}"] = str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{key}={value}" for key, value in words.items()]


FAULTS = (
    *("epohcs=3", "optimizer.lrr=0.1", "evall.every=2", "saving.kep=1", "optimizer=sdg", "data=digit"),
    *("optimizer.lr=fast", "epochs=many", "batch_size=0", "optimizer.lr=-1", "schedule.warmup=200%"),
    *("eval.every=5lightyears", "seed=-1", "run.name=../x", "task=clasification", "model._target_=os.system"),
    *("seed=${nope}", "seed=[1", "optimizer.lr=nan", "ema.decay=2", "gradients.clip_norm=0", "epochs=1e400"),
    *("callbacks=[3]", "run.max_time=5steps", "log_every=0", "dataloader.workers=-1", "data.val=120%"),
    *("eval=5", "optimizer.groups=[{}]", "metrics={f1:nope.F1}", "data.collate=nope", "stop.mode=best"),
)
"""Each is refused whatever stands beside it."""


def faulty(random: Random) -> Words:
    """A valid command line with one fault in it."""
    fault = random.choice(FAULTS)
    words = [word for word in valid(random) if word.partition("=")[0] != fault.partition("=")[0]]
    words.insert(random.randrange(len(words) + 1), fault)
    return words
