"""Runs of two ranks by DDP and by FSDP, for `rank_cases`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from running import same_bits, training_state, weights
from torch import nn
from toys import Lines
from trials import read

from ptfast.core.distributed import Ranks, on_first_rank
from ptfast.core.errors import PtfastError
from ptfast.core.plain_display import Display
from ptfast.core.tensors import checkpoint_files
from ptfast.core.tensors.checkpoint_files import read_checkpoint
from ptfast.core.tensors.dtensors import whole
from ptfast.core.tensors.trees import map_tensors
from ptfast.run import Run
from ptfast.techniques.parallel.sync_batchnorm import apply_sync_batchnorm
from ptfast.techniques.precision.mixed_precision import apply_float8
from ptfast.training.build import build
from ptfast.training.checkpointer import callback_states
from ptfast.training.fit import fit

SMALL = ("model.hidden=[47]", "batch_size=64", "steps=8", "log_every=2", "eval.every=4steps", "seed=3")
MIXED = ("ema.decay=0.6", "gradients.clip_norm=0.3", "gradients.accumulate=2", "optimizer=adamw")
SYNCED = ("model=custom", "model._target_=toys.DoubleNormed", "data=custom", "data._target_=toys.blobs")
SYNCED = (*SYNCED, "data.num_samples=52", "data.val=0", "optimizer=sgd", "batch_size=16", "epochs=2")

RESNET = ("model=resnet_digits", "model.width=4", "batch_size=32", "steps=4", "log_every=1", "optimizer=sgd")
RESNET = (
    *RESNET,
    "ema=swa",
    "ema.swa_start=2steps",
    "ema.swa_every=1steps",
    "optimizer.lr=0.01",
    "gradients.clip_value=0.01",
    "data.val=1samples",
)
RUNNING = ("model=resnet_digits", "model.width=4", "micro_batches=4", "batch_size=120", "epochs=1")
RUNNING = (*RUNNING, "eval.every=5steps", "optimizer=sgd", "dataloader.drop_last=true")
ELASTIC = ("model=resnet_digits", "model.width=4", "determinism=elastic", "micro_batches=6", "batch_size=48")
ELASTIC = (*ELASTIC, "epochs=1", "log_every=3", "eval.every=5steps", "gradients.clip_norm=0.5", "ema=swa")
ELASTIC = (*ELASTIC, "ema.swa_start=50%", "ema.swa_every=4steps", "data.val=293samples")
GPT = ("data=text_file", "data.path=text.txt", "data.context_length=16", "model=gpt", "model.depth=2")
GPT = (*GPT, "model.width=16", "model.heads=2", "batch_size=8", "steps=6", "log_every=2")


class Cases:
    """Runs on this rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def build(self, name: str, *words: str, strategy: str = "ddp", **given: Any) -> Run:
        words = (
            *words,
            f"parallel.strategy={strategy}",
            f"parallel.nproc={self.ranks.world_size}",
            "device=cpu",
        )
        # Composed once, as by the launcher.
        config = on_first_rank(lambda: read(words), self.ranks)
        Path(name).mkdir(parents=True, exist_ok=True)
        run = build(config, ranks=self.ranks, folder=Path(name), display=Display(), **given)
        run.logger = Lines()
        return run

    def train(self, name: str, *words: str, **given: Any) -> dict[str, Any]:
        """Losses by step and split, and the weights as saved."""
        run = self.build(name, *words, **given)
        assert fit(run) == "finished"
        torch.distributed.barrier()
        return {"losses": [line["loss"] for line in run.logger], "weights": weights(Path(name))}

    def resumed(self, name: str, *words: str, **given: Any) -> bool:
        """Return True if a run resumed from the state in its middle ends in the same bits."""
        whole = self.train(name, *words, "saving.every=4steps", "saving.keep=9", **given)
        again = f"{name}-resumed"
        middle = Path(name) / "saved" / "step-4"
        run = self.build(again, *words, checkpoint_folder=middle, **given)
        assert run.progress.step == 4
        fit(run)
        torch.distributed.barrier()
        left, right = (training_state(Path(n)) for n in (name, again))
        return same_bits(weights(Path(again)), whole["weights"]) and same_bits(left, right)

    def refusal(self, name: str, *words: str, **given: Any) -> str:
        """The message where a run is refused."""
        run = self.build(name, *words, **given)
        try:
            fit(run)
        except PtfastError as error:
            return f"{error.code} after step {run.progress.step}: {error}"
        finally:
            torch.distributed.barrier()
        return "nothing was refused"


def ddp_cases(on: Cases) -> dict[str, Any]:
    switches = {
        "copied": ("parallel.gradient_as_bucket_view=false",),
        "buckets": ("parallel.bucket_mb=0.001",),
        "unused": ("parallel.unused_parameters=true",),
        "bf16": ("parallel.compression=bf16",),
        "fp16": ("parallel.compression=fp16",),
    }
    found: dict[str, Any] = {"ddp": on.train("ddp", *SMALL)}
    for name, words in switches.items():
        found[name] = on.train(name, *SMALL, *words)
    found["layers"] = [normed(on.ranks, shares) for shares in ((3, 2), (0, 5), (4, 4))]
    found["resnet synced"] = on.train("resnet-synced", *RESNET, "parallel.sync_batchnorm=true")
    found["elastic"] = on.train("elastic", *ELASTIC)
    found["running"] = on.train("running", *RUNNING)
    found["synced"] = on.train("synced", *SYNCED, "parallel.sync_batchnorm=true")
    return found


def normed(ranks: Ranks, shares: tuple[int, int], dtype: torch.dtype = torch.float64) -> float:
    """Largest error of a BatchNorm over two ranks, beside one that sees both shares at once.

    A share of 0 is a stand-in that counts for nothing.
    """
    draws = torch.Generator().manual_seed(5)
    whole = torch.randn(sum(shares), 3, 2, generator=draws, dtype=dtype)
    weights, factors = torch.randn(2, 3, generator=draws), torch.randn(whole.shape, generator=draws)
    one, several = nn.BatchNorm1d(3, momentum=0.3).to(dtype), nn.Sequential(nn.BatchNorm1d(3, momentum=0.3))
    several.to(dtype)
    apply_sync_batchnorm(several)
    for norm in (one, several[0]):
        norm.load_state_dict({"weight": weights[0], "bias": weights[1]}, strict=False)
    mine = slice(shares[0] * ranks.rank, shares[0] + shares[1] * ranks.rank)
    full, part = (
        x.clone().requires_grad_() for x in (whole, whole[mine] if shares[ranks.rank] else whole[:1])
    )
    one_out = one(full)
    (one_out * factors).square().sum().backward()
    several[0].counts = bool(shares[ranks.rank])
    out = several(part)
    loss = (out * (factors[mine] if shares[ranks.rank] else 0)).square().sum()
    loss.backward()
    grads = torch.cat([several[0].weight.grad, several[0].bias.grad])
    torch.distributed.all_reduce(grads)
    pairs = [
        (grads, torch.cat([one.weight.grad, one.bias.grad])),
        (several[0].running_mean, one.running_mean),
        (several[0].running_var, one.running_var),
        (several[0].num_batches_tracked, one.num_batches_tracked),
    ]
    if shares[ranks.rank]:
        pairs += [(out, one_out[mine]), (part.grad, full.grad[mine])]
    errors = torch.tensor([float((left - right).detach().abs().max()) for left, right in pairs])
    worst = errors.max()
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return float(worst)


def saved_beside(on: Cases, name: str, *words: str, **given: Any) -> tuple[bool, int, str]:
    """Whether states written slowly beside training are those of the run `name`; how many there are.

    And how a sharded run ends when the last rank's writer fails.
    """
    writers = checkpoint_files.write_tensors, torch.save
    words = (*words, "saving.background=true")

    def slowly(write: Callable[..., None]) -> Callable[..., None]:
        return lambda *contents: (time.sleep(0.05), write(*contents))[1]

    def fail(*contents: Any) -> None:
        raise OSError(28, "No space left on device")

    try:
        checkpoint_files.write_tensors, torch.save = map(slowly, writers)
        run = on.build(f"{name}-beside", *words, **given)
        fit(run)
        torch.distributed.barrier()
        pairs = [[f"{folder}/saved/step-{step}" for folder in (name, f"{name}-beside")] for step in (4, 8)]
        states = [[read_checkpoint(Path(path)) for path in pair] for pair in pairs]
        nests = [[map_tensors(whole, [each.model, each.training]) for each in pair] for pair in states]
        if on.ranks.rank == on.ranks.world_size - 1:
            checkpoint_files.write_tensors = fail
        says = on.refusal(f"{name}-full", *words, **given) if run.sharded else ""
    finally:
        checkpoint_files.write_tensors, torch.save = writers
    return all(same_bits(*pair) for pair in nests), run.checkpointer.writer.in_background, says


def fsdp_cases(on: Cases) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if on.ranks.is_first:
        Path("text.txt").write_text("so it goes, and on it goes. " * 60)
    torch.distributed.barrier()
    for strategy in ("ddp", "fsdp"):
        words = (*SMALL, "optimizer=nadam", "optimizer.lr=0.01")
        found[f"nadam {strategy}"] = on.train(f"nadam-{strategy}", *words, strategy=strategy)
        words = (*SMALL, *MIXED, "saving.every=2steps", "saving.keep=9")
        found[f"mixed {strategy}"] = on.train(f"mixed-{strategy}", *words, strategy=strategy)
        found[f"beside {strategy}"] = saved_beside(on, f"mixed-{strategy}", *words, strategy=strategy)
    for strategy in ("ddp", "fsdp"):
        found[f"resnet {strategy}"] = on.train(f"resnet-{strategy}", *RESNET, strategy=strategy)
        words = (*RESNET, "checkpointing=full", "parallel.sync_batchnorm=true")
        found[f"checkpointed {strategy}"] = on.train(f"checkpointed-{strategy}", *words, strategy=strategy)
        for precision in ("fp32", "bf16", "amp_fp16"):
            name = f"gpt {precision} {strategy}"
            found[name] = on.train(name, *GPT, f"precision.mode={precision}", strategy=strategy)
    if find_spec("torchao") is not None:
        found |= float8_cases(on)
    middle = Path("mixed-ddp/saved/step-4")
    words = (*SMALL, *MIXED)
    found["taken up"] = on.train("taken-up", *words, strategy="fsdp", checkpoint_folder=middle)
    words = ("model=resnet_digits", "batch_size=32", "steps=2", "precision.mode=bf16_true")
    try:
        on.build("two types", *words, strategy="fsdp")
    except PtfastError as error:
        found["two types"] = f"{error.code}: {error}"
    run = on.build("kept", *SMALL, strategy="fsdp")
    callbacks: list[Any] = run.callbacks
    callbacks.append(SimpleNamespace(state_dict=run.model.state_dict))
    try:
        callback_states(run)
    except PtfastError as error:
        found["kept by a callback"] = f"{error.code}: {error}"
    found["fsdp resumes"] = on.resumed("fsdp", *SMALL, *MIXED, strategy="fsdp")
    found["fsdp resumes without a bias"] = on.resumed("no-bias", *SYNCED, strategy="fsdp")
    return found


def float8_cases(on: Cases) -> dict[str, Any]:
    """Products in float8, emulated."""
    plain = (*GPT, "precision.mode=bf16", "ema=ema", "optimizer=adamw")
    words = (*plain, "precision.float8=true")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptfast.core.devices.check_float8", lambda device: None)
        patch.setattr("ptfast.training.stages.model_stage.apply_float8", partial(apply_float8, emulate=True))
        off = on.train("float8-off", *plain, strategy="fsdp")
        resumes = on.resumed("float8", *words, strategy="fsdp")
        found = on.train("float8-again", *words, strategy="fsdp")
        return {"float8 resumes": resumes, "float8": found, "float8 off": off}
