"""Stochastic depth: samples that skip residual branches at random."""

from __future__ import annotations

from torch import Tensor


def drop_path(x: Tensor, rate: float) -> Tensor:
    """The output of a residual branch, zero for samples drawn at random and larger for the rest.

    Samples train networks of differing, on average smaller, depth, which shortens the way of gradients and
    regularises; evaluation uses all of it. The draws are torch's own, as dropout's are, and so a function of
    (seed, step, micro-batch).

    Args:
        x: (batch, ...), of a branch before it is added to its input.
        rate: probability that a sample's branch is zero, in [0, 1); the rest is divided by 1 - rate, so that
            the mean stays.

    Cost: one product of the size of `x`. Nothing is skipped in the arithmetic: a batch has samples of both
        kinds.
    Source: Huang, Sun, Liu, Sedra, Weinberger 2016, arXiv:1603.09382, who draw once for a batch; drawn for
        each sample as by timm's DropPath and torchvision's StochasticDepth in mode `row`.
    """
    kept = x.new_empty((x.shape[0], *[1] * (x.dim() - 1))).bernoulli_(1 - rate)
    return x * kept.div_(1 - rate)


def rate_of_block(index: int, depth: int, rate: float) -> float:
    """The rate of block `index` (from 0) of `depth`: rising in equal parts to `rate` at the last block.

    Early blocks make features that all later ones use, and are dropped the least (section 4 of the paper).
    """
    return rate * (index + 1) / depth
