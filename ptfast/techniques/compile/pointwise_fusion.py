"""A compiler backend that fuses chains of elementwise operations and leaves everything else as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ptfast.core.tensors.torch_internals import OpOverload


class PointwiseFusion:
    """Compiles chains of elementwise operations (torch's own tag `pointwise`), of forward and backward.

    Such an operation is bound by memory: a chain in one kernel reads and writes its tensors once.
    Convolutions, matrix products, norms, reductions and dropout run as without a compiler, in the same
    kernels, with the same random numbers.

    A backend for `torch.compile`. It gets the graphs of autograd, in which the backward pass and casts of
    autocast are operations like any other.

    Cost: seconds a kernel to compile; chains of the same operations and shapes share one.
    """

    num_chains = num_operations = 0

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        # If the graph's end wrote statistics, a recomputation would start from others.
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
            # Operations side by side, of which none takes another's result, would gain nothing.
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
    """A chain, compiled."""

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
            # In the operations that inductor has code for.
            graph = make_fx(run, select_decomp_table())(*inputs)
        # Readers of the results were traced with the strides that they would have had.
        output = next(iter(reversed(graph.graph.nodes)))
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        # Keep strides found here out of the whole graph, which is being compiled around it.
        with tracing(None):
            self.run = compile_fx_inner(graph, inputs)

    def forward(self, *inputs: Any) -> Any:
        outputs = self.run(list(inputs))
        return outputs[0] if self.is_single else outputs


def is_pointwise(node: fx.Node) -> bool:
    """Return True if it computes each element of a floating-point tensor from the same one of its inputs."""
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
