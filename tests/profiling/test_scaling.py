"""Runs predicted on ranks that are not here: memory, what is sent, and time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import exchanged
import pytest
import torch
from ranks import on_ranks
from running import build_run
from torch import nn

from ptfast.cli.command_line import run
from ptfast.cli.ranks_prediction import predict
from ptfast.config.read import read_config
from ptfast.profiling.limits.accelerators import GPUS, NAMES
from ptfast.profiling.limits.fake_step import StepCosts, count_step
from ptfast.profiling.limits.operators import total_flops
from ptfast.profiling.limits.scaling import LINKS, MEMORY, Exchange, Scale, link_of, step_time
from ptfast.techniques.parallel import Parallel

GPT = ("data=text_file", "data.path=text.txt", "data.context_length=16", "model=gpt", "model.depth=2")
GPT = (*GPT, "model.width=16", "model.heads=2", "batch_size=8", "steps=1")


def predicted(*words: str, num_ranks: int = 2, device: str = "h100", **given: Any) -> Any:
    return predict(read_config(words, here=False)[1], num_ranks, device, **given)


def check_counted(counted: dict[str, dict[str, int]], num_ranks: int) -> None:
    assert counted
    for name in counted:
        strategy, words = exchanged.CASES[name]
        found = predicted(*words, f"parallel={strategy}", num_ranks=num_ranks)
        sent = {"allreduce": 0, "allgather": 0, "reducescatter": 0}
        for each in found.sent:
            sent[each.kind.replace("-", "")] += each.num_bytes
        held = {key: found.held[key] for key in ("weights", "gradients", "optimizer state")}
        if strategy == "fsdp" and found.scale.passes > 1:
            held["gradients"] = counted[name]["gradients"]  # whole until the last of them
        expected = {**held, **{kind: size for kind, size in sent.items() if size}}
        assert +Counter(counted[name]) == expected, name


def test_what_two_ranks_hold_and_send_is_what_was_predicted(two_ranks: dict[str, Any]) -> None:
    check_counted(two_ranks["exchanged"], 2)


@pytest.mark.slow
def test_what_four_ranks_hold_and_send_is_what_was_predicted(tmp_path: Path) -> None:
    check_counted(on_ranks("exchanged", tmp_path, 4), 4)


@pytest.mark.parametrize(
    "words", [("model=resnet_digits", "model.width=4", "steps=1"), GPT], ids=["resnet", "gpt"]
)
@pytest.mark.parametrize("half_type", [None, torch.bfloat16])
def test_a_step_without_values_costs_what_one_with_values_does(
    words: tuple[str, ...], half_type: torch.dtype | None, in_tmp: Path
) -> None:
    Path("text.txt").write_text("to be or not to be " * 60)
    own = build_run(Path("run"), *words, "device=cpu")
    before = [p.clone() for p in own.model.parameters()]
    data = next(own.train_loader.steps(0, 1)).micro_batches[0].data

    def asking(model: nn.Module, given: Any) -> Any:
        loss, count = own.task.loss(model, given)
        assert loss.item() > 0
        return loss, count

    fake = count_step(own.model, own.task.loss, data, half_type, gathers=False)
    real = count_step(own.model, asking, data, half_type, gathers=False)
    assert (fake.is_real, real.is_real) == (False, True)
    assert fake.peak_bytes == pytest.approx(real.peak_bytes, rel=1e-3)
    assert total_flops(fake.operators) == total_flops(real.operators)
    assert all(map(torch.equal, before, own.model.parameters()))


def test_what_is_sent_goes_around_rings_over_the_slowest_link() -> None:
    kinds: tuple[Any, ...] = ("all-reduce", "all-gather", "reduce-scatter")
    assert [Exchange(kind, "all", 1000).sent_bytes(4) for kind in kinds] == [1500, 750, 750]
    gbyte_per_s = {("h100", 8, 8): 450, ("h100", 64, 8): 400, ("h100", 64, 1): 50, ("l4", 16, 8): 12.5}
    for (name, num_ranks, local), expected in gbyte_per_s.items():
        assert link_of(GPUS[name], Scale(num_ranks, local, Parallel(), 1)) == expected * 1e9


def test_a_step_waits_for_what_is_sent_longer_than_it_computes() -> None:
    device = replace(GPUS["h100"], bytes_per_s=3 / MEMORY, overlaps=True)
    scale = Scale(4, 4, Parallel(strategy="ddp"), 1)
    sent = [Exchange("all-reduce", "gradients", 2), Exchange("all-gather", "BatchNorm", 4, overlaps=False)]
    # Weights are read, with their gradients, and written: 6 s here. Nothing is computed beside what is sent.
    time = step_time(StepCosts([], 0), {"weights": 6}, sent, scale, device, 1 / LINKS, rounds=False)
    assert (time.compute_s, time.waited_s) == pytest.approx((6, 3 + 3))
    assert time.efficiency == pytest.approx(0.5)


def test_ranks_that_wait_take_longer_and_waiting_grows_with_slower_links() -> None:
    words = ("+recipe=resnet_digits", "batch_size=512", "dataloader.last=drop")
    alone, near, far, slow = (
        predicted(*words, num_ranks=ranks, network_bytes_per_s=speed)
        for ranks, speed in ((1, None), (8, None), (64, None), (64, 1e8))
    )
    assert (alone.sent, alone.time.efficiency) == ([], 1.0)
    assert 1 > near.time.efficiency > far.time.efficiency > slow.time.efficiency > 0
    assert slow.link_bytes_per_s == 1e8
    assert near.link_bytes_per_s == GPUS["h100"].link_bytes_per_s


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dry-run", "--ranks", "4"), "--device: an argument is missing"),
        (("--device", "cuda"), "--device (command line): is for --dry-run"),
        (("--dry-run", "--device", "h1000"), "Did you mean h100?"),
        (("--dry-run", "--device", "abacus"), f"There are: {', '.join(NAMES)}"),
        (("--dry-run", "--device", "h100", "--ranks", "0"), "must be a number of at least 1"),
        (("--dry-run", "--device", "h100", "--ranks", "3"), "error[C010]"),
        (("--dry-run", "--device", "v100", "precision=tf32"), "no products in tf32 on v100"),
    ],
)
def test_what_cannot_be_predicted(
    words: tuple[str, ...], said: str, in_tmp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "+recipe=resnet_digits", *words]) in (2, 4)
    printed = capsys.readouterr()
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert list(in_tmp.iterdir()) == []


def test_it_is_printed_with_what_it_assumes(in_tmp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("+recipe=resnet_digits", "precision=amp", "batch_size=480", "dataloader.last=drop")
    words = (*words, "--dry-run", "--ranks", "60", "--device", "v100")
    assert run(["train", *words]) == 0
    out = capsys.readouterr().out
    for row in (
        "60 on 8 machines of 8 v100, ddp",
        "of 32 GiB",
        "gradients by all-reduce",
        "samples/s",
        "60% of 125 TFLOP/s",
    ):
        assert row in out
    assert list(in_tmp.iterdir()) == []
