"""Find the repeated blocks of a model, which are compiled once, recomputed in backward, or sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from fnmatch import fnmatchcase

from torch import nn

from ptfast.core.errors import ConfigError, did_you_mean, name_some

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(
    model: nn.Module, patterns: str | Sequence[str] = "auto", *, key: str = "blocks"
) -> dict[str, nn.Module]:
    """Return the repeated blocks of any model by name, in the model's order and not nested.

    `auto` finds entries of containers (nn.Sequential, ModuleList, ModuleDict) whose class recurs there or in
    other containers: the layers of a transformer, the residual blocks of all stages of a ResNet. Layers
    without submodules, as in a plain MLP, are not blocks.

    Args:
        patterns: `auto`, or shell-style patterns of module names (`layers.*`), where `*` also matches dots;
            the outermost matching modules are selected. C005 for a pattern without a match.
        key: the config key of the patterns, for the error.

    Returns:
        Modules by name; a shared module once. Empty if no class recurs.
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
                near = did_you_mean(pattern.replace("*", ""), names)
                hint = near or f"There are {name_some([name for name in names if '.' not in name])}"
                raise ConfigError("C005", "matches no module", key=key, value=pattern, suggestion=hint)
        found = {n: m for n, m in names.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    unique: dict[int, str] = {}
    for name, module in found.items():
        if not any(name.startswith(f"{outer}.") for outer in unique.values()):
            unique.setdefault(id(module), name)
    return {name: found[name] for name in unique.values()}


def _entries(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield candidates for a block, outermost first: entries of containers; for a stage, its own entries."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(module, _CONTAINERS) and child._modules:
            is_stage = _is_row(child) or any(_is_row(part, at_least=2) for part in child.children())
            if not is_stage:
                yield f"{prefix}{name}", child
        # Inner entries count if the entry itself does not recur.
        yield from _entries(child, f"{prefix}{name}.")


def _is_row(module: nn.Module, at_least: int = 1) -> bool:
    """Return True for a container of blocks of one form."""
    children = list(module.children())
    if not isinstance(module, _CONTAINERS) or len(children) < at_least or not children[0]._modules:
        return False
    return len({_form(child) for child in children}) == 1


def _form(module: nn.Module) -> Hashable:
    """Return the key that equal blocks share: their class; for a bare container also those of its entries."""
    kind = type(module)
    return (kind, *map(type, module.children())) if kind in _CONTAINERS else kind
