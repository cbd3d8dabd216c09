"""A reference of torch's attention over sequences of unequal length, which has kernels for GPUs only."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
) -> Tensor:
    """Causal attention within each sequence; query, key and value are (tokens, heads, head_width)."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    ends = cu_seq_q.tolist()
    assert (ends[0], ends[-1]) == (0, len(query))
    found = []
    for first, last in pairwise(ends):
        assert 0 <= last - first <= max_q == max_k
        if last > first:
            q, k, v = (each[None, first:last].transpose(1, 2) for each in (query, key, value))
            found.append(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(found)
