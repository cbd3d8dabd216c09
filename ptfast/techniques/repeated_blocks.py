"""The blocks that a model is made of: what is compiled once, or computed again in the backward pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ptfast.core.errors import ConfigError, nearest

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(
    model: nn.Module, patterns: str | Sequence[str] = "auto", *, key: str = "blocks"
) -> dict[str, nn.Module]:
    """The repeated blocks of any model by name, in the order in which it holds them; none inside another.

    By itself it finds the entries of the model's containers (nn.Sequential, ModuleList, ModuleDict) whose
    class recurs in one or several of them: the layers of a transformer, the residual blocks of all stages of
    a ResNet. An entry that is itself a row of equal blocks (a stage) gives those. Layers without parts of
    their own, as in a plain MLP, are no blocks.

    Args:
        patterns: `auto`, or patterns of shell style over the names of modules (`layers.*`), where `*` matches
            dots too: of what matches, the outermost modules are taken.
        key: the config key of the patterns, for the error.

    Returns:
        Modules by name; a module that is used several times, once. Empty where nothing recurs.

    Raises:
        ConfigError: C005 when a pattern matches no module.
    """
    if patterns == "auto":
        entries = list(_entries(model, ""))
        counts = Counter(_form(module) for _, module in entries)
        found = {name: module for name, module in entries if counts[_form(module)] > 1}
    else:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        names = dict(model.named_modules())
        del names[""]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise _no_match(pattern, list(names), key)
        found = {n: m for n, m in names.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    unique: dict[int, str] = {}
    for name, module in found.items():
        if not any(name.startswith(f"{outer}.") for outer in unique.values()):
            unique.setdefault(id(module), name)
    return {name: found[name] for name in unique.values()}


def _entries(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Candidates for a block, outermost first: entries of containers, those of stages in their place."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(module, _CONTAINERS) and child._modules and not _is_stage(child):
            yield f"{prefix}{name}", child
        # Inside an entry there may be more, which count where the entry itself does not recur.
        yield from _entries(child, f"{prefix}{name}.")


def _is_stage(module: nn.Module) -> bool:
    """Return True if it is, or directly holds, a row of blocks of one form."""
    return _is_row(module) or any(_is_row(part, at_least=2) for part in module.children())


def _is_row(module: nn.Module, at_least: int = 1) -> bool:
    children = list(module.children())
    return (
        isinstance(module, _CONTAINERS)
        and len(children) >= at_least
        and bool(children[0]._modules)
        and len({_form(child) for child in children}) == 1
    )


def _form(module: nn.Module) -> Hashable:
    """The key that blocks of a kind share: their class, of a bare container that of its entries."""
    kind = type(module)
    return (kind, *map(type, module.children())) if kind in _CONTAINERS else kind


def _no_match(pattern: str, names: list[str], key: str) -> ConfigError:
    near = nearest(pattern.replace("*", ""), names) or ""
    shown = [near] if near else [name for name in names if "." not in name][:5]
    hint = f"There is {', '.join(shown)}" if shown else "The model has no parts"
    return ConfigError("C005", "matches no module of the model", key=key, value=pattern, suggestion=hint)
