"""Linear layers in float8: which, with what error, and where it is refused."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from running import train
from torch import nn

from ptfast.core.devices import check_float8
from ptfast.core.errors import MachineError
from ptfast.models.gpt import Gpt
from ptfast.techniques.precision.mixed_precision import apply_float8


def test_products_are_rounded_and_nothing_else_changes() -> None:
    """Emulated on a CPU: all but the last layer, and those whose sizes are no multiples of 16."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    plain, tokens = Gpt(64, 24, width=24, depth=2, heads=2), torch.randint(64, (3, 21))
    model = copy.deepcopy(plain)
    assert apply_float8(model, emulate=True) == []
    plain = Gpt(64, 24, width=32, depth=2, heads=2)
    model = copy.deepcopy(plain)
    layers = ("attention_in", "attention_out", "feed_in", "feed_out")
    assert apply_float8(model, emulate=True) == [f"blocks.{i}.{name}" for i in range(2) for name in layers]
    assert list(model.state_dict()) == list(plain.state_dict())
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            each(tokens).float().logsumexp(-1).sum().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        assert (own.grad - other.grad).norm() < 0.2 * other.grad.norm()
    assert not torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize(
    ("words", "exit_code", "says"),
    [
        (("precision=fp32",), 2, "its products are bfloat16, but precision=fp32 computes in another"),
        (("precision=bf16", "device=cpu"), 4, "float8 needs an NVIDIA GPU, and this is cpu"),
    ],
)
def test_refused(
    words: tuple[str, ...], exit_code: int, says: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("precision.float8=true", *words) == exit_code
    assert says in capsys.readouterr().err


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(MachineError, match="torchao") as caught:
        apply_float8(nn.Linear(16, 16), enable_fsdp_float8_all_gather=True)
    assert (caught.value.code, caught.value.key) == ("E004", "precision.float8")


def test_older_gpus_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    for capability, lacks in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda each=capability: each)
        assert (check_float8("cuda") is not None) is lacks
