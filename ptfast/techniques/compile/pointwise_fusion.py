"""A compiler backend that fuses chains of elementwise operations and leaves all other operations alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ptfast.core.tensors.torch_internals import OpOverload


class PointwiseFusion:
    """Compiles chains of elementwise operations (torch's tag `pointwise`) in forward and backward.

    Such operations are bound by memory: a chain in one kernel reads and writes its tensors once.
    Convolutions, matrix products, norms, reductions and dropout run as without a compiler: in the same
    kernels, with the same random numbers.

    It is a backend for `torch.compile`. It receives the graphs of autograd, where the backward pass and the
    casts of autocast are ordinary operations.

    Cost: seconds of compilation per kernel; chains of the same operations and shapes share one.
    """

    num_chains = num_operations = 0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        # If the graph's end wrote statistics, a recomputation would start from other values.
        return aot_autograd(
            fw_compiler=self._compile, bw_compiler=self._compile, keep_inference_input_mutations=True
        )(graph, inputs)

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from functorch.compile import make_boxed_func
        from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
        from torch.fx.passes.operator_support import create_op_support

        partitioner = CapabilityBasedPartitioner(graph, create_op_support(lambda _, node: is_pointwise(node)))
        chains = []
        for part in partitioner.propose_partitions():
            nodes = list(part.nodes)
            # Fusing independent operations, which do not use each other's results, would gain nothing.
            if any(source in nodes for node in nodes for source in node.all_input_nodes):
                chains.append(part)
        self.num_chains += len(chains)
        self.num_operations += sum(part.size() for part in chains)
        prefix = "fused_chain_"
        fused = partitioner.fuse_partitions(chains, prefix=prefix)
        for name, chain in list(fused.named_children()):
            if name.startswith(prefix):
                setattr(fused, name, _Kernel(chain))  # type: ignore[arg-type]
        return make_boxed_func(fused.forward)


class _Kernel(nn.Module):
    """A compiled chain."""

    def __init__(self, chain: fx.GraphModule) -> None:
        super().__init__()
        from torch._dynamo.utils import detect_fake_mode
        from torch._guards import tracing
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table
        from torch.fx.experimental.proxy_tensor import make_fx

        inputs = [node.meta["val"] for node in chain.graph.nodes if node.op == "placeholder"]
        outputs = next(iter(reversed(chain.graph.nodes))).args[0]
        self.is_single = is_single = isinstance(outputs, fx.Node)

        def run(*values: Any) -> tuple[Any, ...]:
            results = chain(*values)
            return (results,) if is_single else tuple(results)

        fake_mode: Any = detect_fake_mode(inputs)
        with fake_mode:
            # Decompose into operations that inductor has code for.
            graph = make_fx(run, select_decomp_table())(*inputs)
        # Users of the results were traced with the strides of the unfused operations.
        output = next(iter(reversed(graph.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        # Keep strides found here out of the whole graph, which is being compiled at the same time.
        with tracing(None):
            self.run = compile_fx_inner(graph, inputs)

    def forward(self, *inputs: Any) -> Any:
        outputs = self.run(list(inputs))
        return outputs[0] if self.is_single else outputs


def is_pointwise(node: fx.Node) -> bool:
    """Return True if each output element depends on the same element of floating-point inputs only."""
    target, value = node.target, node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(target, OpOverload)
        and torch.Tag.pointwise in target.tags
        and target.overloadpacket is not torch.ops.aten.clone
        and isinstance(value, Tensor)
        # Counters of batches are too little work for a kernel.
        and value.dim() > 0
        and value.is_floating_point()
    )
