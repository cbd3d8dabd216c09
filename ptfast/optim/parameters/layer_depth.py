"""How deep each parameter of a model lies: what layer-wise learning-rate decay counts."""

from __future__ import annotations

from torch import nn

from ptfast.techniques.repeated_blocks import find_blocks


def layer_depths(model: nn.Module) -> dict[str, int]:
    """The layer of each parameter by name, from 0 at the input, in the order that modules are held in.

    A layer is a repeated block as `find_blocks` knows it (a transformer's layer, a residual block); in a
    model without any, every module that holds a matrix of its own. What comes before the first (embeddings,
    a stem) is one more layer below, what comes after the last one more above, if it holds a matrix (a head,
    with the norm before it), and what lies between two belongs to the one before.

    Source of the counting: Bao, Dong, Piao, Wei 2022, "BEiT", arXiv:2106.08254, whose code counts a vision
        transformer's embeddings, layers, and norm and head in this way.
    """
    named = list(model.named_parameters())
    blocks = list(find_blocks(model)) or _layers(model)
    depth, depths, after = 0, {}, []
    for name, parameter in named:
        inside = [index + 1 for index, block in enumerate(blocks) if name.startswith(f"{block}.")]
        if inside:
            depth, after = inside[0], []
        elif depth == len(blocks):
            after.append((name, parameter.ndim))
        depths[name] = depth
    if any(ndim >= 2 for _, ndim in after):
        depths |= {name: depth + 1 for name, _ in after}
    lowest = min(depths.values(), default=0)
    return {name: depth - lowest for name, depth in depths.items()}


def _layers(model: nn.Module) -> list[str]:
    """The modules that hold a matrix of their own."""
    return [
        name
        for name, module in model.named_modules()
        if name and any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False))
    ]
