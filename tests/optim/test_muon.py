"""Muon: which parameters it takes, and that both of its halves step as torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from optimizers import net, wave, weights_of
from torch import Tensor, nn

from ptfast.core.sections.targets import Target
from ptfast.optim import muon
from ptfast.optim.build_optimizer import apply_lr, build_optimizer
from ptfast.optim.muon import Muon, hidden_matrices


class Tied(nn.Module):
    """A language model whose head shares the embedding, with positions and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(5, 4))
        self.tokens = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.feed = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight


def hidden_names(of: nn.Module, **keywords: Any) -> list[str]:
    hidden = hidden_matrices(of.parameters(), **keywords)
    return [name for name, parameter in of.named_parameters() if id(parameter) in hidden]


def test_which_matrices_are_hidden() -> None:
    model = Tied()
    inner = ["attention.in_proj_weight", "attention.out_proj.weight", "feed.weight"]
    assert hidden_names(model, model=model) == inner
    assert hidden_names(model, model=model, rest_names=["feed.*"]) == inner[:2]
    assert hidden_names(model, model=model, ends=True) == inner
    assert hidden_names(net()) == ["4.weight"]
    assert hidden_names(net(), ends=True) == ["0.weight", "4.weight", "6.weight"]
    with pytest.raises(ValueError, match=r"nothing is called typo\.\*"):
        hidden_names(model, model=model, rest_names=["typo.*"])


def test_muon_takes_torchs_steps() -> None:
    """Each part steps as torch's optimizer of that name; a convolution as the matrix of its rows."""
    model, twin = net(), net()
    ours = Muon(model.parameters(), lr=0.01, weight_decay=0.1, ends=True)
    conv, norm, bias = twin[0], twin[1], twin[4].bias
    rows = nn.Parameter(conv.weight.detach().flatten(1))
    matrices = [rows, twin[4].weight, twin[6].weight]
    vectors = [conv.bias, norm.weight, norm.bias, bias, twin[6].bias]
    theirs = (
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(vectors, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    )
    for step in range(3):
        for index, (parameter, other) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            parameter.grad = wave(tuple(parameter.shape), step + index).float()
            other.grad = parameter.grad.clone()
        rows.grad = conv.weight.grad.flatten(1)
        ours.step()
        for optimizer in theirs:
            optimizer.step()
    conv.weight.data.copy_(rows.view_as(conv.weight))
    torch.testing.assert_close(weights_of(model), weights_of(twin))


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """One matrix made orthogonal as its authors write it."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = (x.T if tall else x) / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).float()


@pytest.mark.parametrize("matrix_size", [0, 1 << 16], ids=["alone", "stacked"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"weight_decay": 0.5},
        {"weight_decay": 0.5, "cautious": True},
        {"normalize": True, "rest": "sgd", "momentum": 0.6, "rest_lr": 0.05, "sgd_momentum": 0.85},
    ],
    ids=["decayed", "cautious", "normalized"],
)
def test_equal_shapes_step_as_each_matrix_alone(
    keywords: dict[str, Any], matrix_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a loop over matrices, written from the papers and airbench; wide and tall, several of each."""
    monkeypatch.setattr(muon, "CPU_MATRIX_SIZE", matrix_size)
    shapes = [(4, 6), (4, 2, 3), (6, 4), (4, 6), (6, 4), (6, 2, 2)]
    # Waves are matrices of rank 2, whose other directions are rounding.
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    bias, lr, mu = nn.Parameter(torch.ones(3)), 0.02, keywords.get("momentum", 0.95)
    ours = Muon([*weights, bias], lr=lr, adjust_lr_fn="original", ends=True, **keywords)
    starts = [weight.detach().flatten(1).clone() for weight in weights]
    expected = [matrix.clone() for matrix in starts]
    buffers = [torch.zeros_like(matrix) for matrix in expected]
    for _ in range(3):
        for index, weight in enumerate(weights):
            weight.grad = torch.randn(weight.shape)
            matrix, grad = expected[index], weight.grad.flatten(1)
            buffers[index] = mu * buffers[index] + grad
            update = orthogonal(grad + mu * buffers[index])
            if "normalize" in keywords:
                matrix *= len(matrix) ** 0.5 / matrix.norm()
            else:
                mask = (update * matrix >= 0) if "cautious" in keywords else 1
                matrix -= lr * 0.5 * mask * matrix
            matrix -= lr * max(1, len(matrix) / matrix.shape[1]) ** 0.5 * update
        bias.grad = torch.full((3,), 0.5)
        ours.step()
    for weight, matrix, start in zip(weights, expected, starts, strict=True):
        # In bf16, where an entry that hardly moves may be decayed or not.
        moved = weight.detach().flatten(1) - start
        assert (moved - (matrix - start)).norm() < 0.1 * moved.norm()


def test_sgd_takes_the_rest() -> None:
    model, twin = net(), net()
    ours = Muon(model.parameters(), rest="sgd", rest_lr=0.1, weight_decay=1e-3, model=model)
    names = [name for name, _ in twin.named_parameters() if name != "4.weight"]
    rest = [twin.get_parameter(name) for name in names]
    theirs = torch.optim.SGD(rest, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
    for step in range(3):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad = other.grad = wave(tuple(parameter.shape), step).float()
        ours.step()
        theirs.step()
    for name in names:
        assert torch.equal(model.get_parameter(name), twin.get_parameter(name)), name


def test_muon_shows_its_groups_to_schedules_and_rates() -> None:
    target = Target("ptfast.optim.muon.Muon", {"lr": 0.02, "rest_lr": 3e-4})
    optimizer, _ = build_optimizer(target, net(), torch.device("cpu"))
    assert [group["muon"] for group in optimizer.param_groups] == [True, False]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    apply_lr(optimizer, [0.02, 3e-4], 0.5, 0.8)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 1.5e-4]
    assert optimizer.param_groups[0]["momentum"] == optimizer.param_groups[1]["betas"][0] == 0.8


def test_muon_without_a_hidden_matrix() -> None:
    layer = nn.Linear(3, 2)
    optimizer = Muon(layer.parameters())
    assert [group["muon"] for group in optimizer.param_groups] == [False]
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "given",
    [
        lambda model: model.named_parameters(),
        lambda model: [{"params": list(model.parameters())}],
        lambda model: ({"params": p} for p in model.parameters()),
        lambda model: [{"params": model.named_parameters(), "lr": 1e-3}],
    ],
    ids=["named", "a group", "groups of one, in a generator", "a named group"],
)
def test_parameters_in_every_form_that_torch_takes(given: Any) -> None:
    ends = []
    for form in (given, lambda model: model.parameters()):
        model = net()
        optimizer = Muon(form(model), model=model)
        for step in range(2):
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = wave(tuple(parameter.shape), step + index).float()
            optimizer.step()
        ends.append(weights_of(model))
        matrices = [p for group in optimizer.param_groups if group["muon"] for p in group["params"]]
        assert [id(p) for p in matrices] == [id(model[4].weight)]
    assert torch.equal(*ends)


def test_names_choose_without_a_model() -> None:
    model = net()
    optimizer = Muon(model.named_parameters(), ends=True, rest_names=["6.*"])
    names = {bool(group["muon"]): group["param_names"] for group in optimizer.param_groups}
    assert names[True] == ["0.weight", "4.weight"]
    with pytest.raises(ValueError, match="nothing is called typo"):
        Muon(model.named_parameters(), rest_names=["typo"])


@pytest.mark.parametrize("copied", [False, True])
def test_a_group_added_later_is_split_as_well(copied: bool) -> None:
    model = net()
    optimizer = Muon(
        [model[0].weight, model[4].weight, model[6].weight], lr=0.05, momentum=0.8, betas=(0.7, 0.9)
    )
    if copied:
        model, optimizer = copy.deepcopy((model, optimizer))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))]})
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(4, 3)), "muon": False, "lr": 0.5})
    *_, matrix, vector, chosen = optimizer.param_groups
    assert (matrix["muon"], matrix["momentum"], matrix["lr"]) == (True, 0.8, 0.05)
    assert (vector["muon"], vector["betas"], vector["lr"]) == (False, (0.7, 0.9), 0.05)
    assert (chosen["muon"], chosen["lr"]) == (False, 0.5)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.step()
    after = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert not any(map(torch.equal, before, after))


def test_complex_matrices_and_vectors_are_none_of_muons() -> None:
    spectrum = nn.Parameter(torch.ones(3, 4, dtype=torch.complex64))
    optimizer = Muon([spectrum], ends=True)
    assert [group["muon"] for group in optimizer.param_groups] == [False]
    for odd in (spectrum, nn.Parameter(torch.ones(3))):
        with pytest.raises(ValueError, match="Muon takes matrices of real numbers, not"):
            Muon([{"params": [odd], "muon": True}])


def test_names_for_the_rest_go_with_a_fused_one() -> None:
    target = Target("ptfast.optim.muon.Muon", {"rest_names": ["4.*"], "ends": True, "fused": "auto"})
    model = net()
    optimizer, note = build_optimizer(target, model, torch.device("cpu"))
    assert note == "fused"
    matrices = [p for group in optimizer.param_groups if group["muon"] for p in group["params"]]
    assert [id(p) for p in matrices] == [id(model[0].weight), id(model[6].weight)]


def test_a_set_of_parameters_has_no_order() -> None:
    with pytest.raises(TypeError, match="need an order"):
        Muon([{"params": set(net().parameters())}])
