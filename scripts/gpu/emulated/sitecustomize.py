"""Run at the start of each Python process of a check without a GPU: the CPU computes CUDA ops."""

import ctypes

if hasattr(ctypes.CDLL(None), "cudaEventRecord"):
    from emulated_ops import EmulatedOps

    EmulatedOps().__enter__()
