"""Cases that two ranks run for the tests: runs whose outcome is compared with that of one process."""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import same_bits, weights
from strategy_cases import Cases, ddp_cases, fsdp_cases

from ptfast.core.distributed import Ranks
from ptfast.core.errors import PtfastError
from ptfast.data.loaders.shared_memory import SharedArrays
from ptfast.training.fit import evaluate_splits, fit
from ptfast.training.stopping import caught_signals

PLAIN = ("optimizer=sgd", "schedule=constant", "optimizer.lr=0.5", "model=custom")
SAMPLES = (*PLAIN, "data=custom", "data._target_=toys.blobs", "data.val=0", "model._target_=toys.DoubleMlp")
TOKENS = (
    *PLAIN,
    "data=custom",
    "data._target_=toys.tagged_tokens",
    "data.val=0",
    "task=token_classification",
)
TOKENS = (*TOKENS, "model._target_=toys.Tagger")
RAGGED = {"samples": (*SAMPLES, "data.num_samples=25"), "tokens": (*TOKENS, "data.num_samples=17")}
"""Batches of 8 leave a last one of a single sample: one rank's share is empty."""
BATCH = ("batch_size=8", "epochs=3", "log_every=2", "eval.every=2steps")
LAYOUTS = [("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)]
"""Strategy and micro-batches."""
FORGETFUL = ("model=custom", "model._target_=toys.Forgetful", "data=custom", "data._target_=toys.blobs")
FORGETFUL = (*FORGETFUL, "data.val=0", "batch_size=10", "steps=6", "log_every=50steps")
UNUSED = {
    "always": FORGETFUL,
    "later": (*FORGETFUL, "+model.after=3"),
    "switched": (*FORGETFUL, "parallel.unused_parameters=true"),
    "unused fsdp": FORGETFUL,
}
SELDOM = (*FORGETFUL[2:], "model=custom", "model._target_=toys.Seldom", "determinism=elastic")
SELDOM = (*SELDOM, "micro_batches=2", "optimizer=sgd", "optimizer.weight_decay=0.1", "schedule=constant")
STREAM = ("data=custom", "data._target_=streamed.WithHeldOut", "model.hidden=[4]", "schedule=constant")
STREAM = (
    *STREAM,
    "batch_size=6",
    "steps=9",
    "dataloader=workers",
    "dataloader.workers=3",
    "eval.every=5steps",
)
STUCK = ("data=custom", "data._target_=stuck.Stuck", "+data.at=18", "data.val=0", "dataloader=plain")
STUCK = (*STUCK, "model.hidden=[4]", "model.dropout=0.2", "batch_size=10", "steps=6")
LAST = ("model.hidden=[8]", "steps=1", "batch_size=4", "data.val=45samples", "eval.batch_size=8")
ONE = ("model.hidden=[8]", "steps=1", "batch_size=4", "data.val=1samples")
ONE = (*ONE, "metrics.auroc=torchmetrics.AUROC", "metrics.f1=torchmetrics.F1Score")
LATE = (
    "data=custom",
    "data._target_=toys.blobs",
    "data.val=0",
    "model=custom",
    "model._target_=toys.Straggler",
)
LATE = (*LATE, "micro_batches=4", "batch_size=8", "steps=11", "log_every=20")


def cases(ranks: Ranks) -> dict[str, Any]:
    """Everything, by name."""
    on = Cases(ranks)
    found: dict[str, Any] = {"folder": str(Path.cwd())}
    for kind, words in RAGGED.items():
        for strategy, parts in LAYOUTS:
            name = f"{kind} {strategy} {parts}"
            case = on.train(name, *words, *BATCH, f"micro_batches={parts}", strategy=strategy)
            found[name] = case["weights"]
    found |= ddp_cases(on)
    found |= fsdp_cases(on)
    for strategy in ("ddp", "fsdp"):
        run = on.build(f"last {strategy}", *LAST, strategy=strategy)
        evaluate_splits(run, ["val"])
        found[f"last {strategy}"] = run.metrics["val"]
        run = on.build(f"one {strategy}", *ONE, strategy=strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one sample is of one class
            evaluate_splits(run, ["val"])
        found[f"one {strategy}"] = run.metrics["val"]
        late = on.build(f"late-{strategy}", *LATE, strategy=strategy)
        fit(late)
        found[f"ledger {strategy}"] = late.clock.ledger()
    found["stream"] = one_pass(on)
    for name in ("OfRank", "LateOfRank", "Asks", "SaysSo"):
        found[f"stream {name}"] = refusal_of_stream(on, name)
    found["held"] = held_together(on)
    for module in (
        "test_world",
        "test_tasks",
        "test_skipped_steps",
        "test_stragglers",
        "test_loss_functions",
        "test_evaluation_sets",
        "test_teacher",
    ):
        found[module] = import_module(module).cases(ranks)
    found["stuck"] = stuck(on)
    found["stream resumes"] = on.resumed("stream", *STREAM)
    found["seldom"] = on.train("seldom", *SELDOM)["weights"]
    for name, words in UNUSED.items():
        found[name] = on.refusal(name, *words, strategy="fsdp" if "fsdp" in name else "ddp")
    return found


def stuck(on: Cases) -> tuple[str, int, bool]:
    """How a run ends whose data does not come, on either rank, and whether it goes on to the same bits."""
    whole = on.train("stuck-whole", *STUCK)
    if on.ranks.is_first:
        Path("stuck").write_text("SIGTERM")
    run = on.build("stuck-run", *STUCK)
    with pytest.MonkeyPatch.context() as patch, caught_signals(run.display, on.ranks) as signals:
        patch.setattr("ptfast.training.stopping.LATE_S", 2.0)
        signals.run = run
        status = fit(run)
    torch.distributed.barrier()
    if on.ranks.is_first:
        Path("stuck").unlink()
    state = Path("stuck-run/saved/last").resolve()
    again = on.train("stuck-again", *STUCK, checkpoint_folder=state)
    return status, run.progress.step, same_bits(again["weights"], whole["weights"])


def held_together(on: Cases) -> dict[str, Any]:
    """Weights of two ranks trained on images in memory, held once or by each, and where the images lie."""
    if on.ranks.is_first:
        for number in range(24):
            file = Path("pictures", f"class-{number % 2}", f"{number:02d}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
    torch.distributed.barrier()
    words = ("data=imagefolder", "data.root=pictures", "model.hidden=[4]", "batch_size=8", "epochs=2")
    words = (*words, "dataloader=memory", "augment=crop_flip", "augment.crop_padding=1")
    found: dict[str, Any] = {}
    for name in ("together", "without a map", "apart"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "without a map":
                patch.setattr("ptfast.data.loaders.shared_memory.open", refuse_to_open, raising=False)
            if name == "apart":
                patch.setattr("ptfast.training.stages.data_stage.SharedArrays", lambda ranks: None)
            run = on.build(f"held {name}", *words)
            assert fit(run) == "finished"
        torch.distributed.barrier()
        found[name] = {"weights": weights(Path(f"held {name}")), "note": run.data_note}
    arrays = SharedArrays(on.ranks)
    array, given = arrays.fill((2, 4096), lambda array: f"by rank {fill_with(array, on.ranks.rank)}")
    mapped = "memfd:ptfast" in Path("/proc/self/maps").read_text()
    # What a rank writes by mistake stays its own.
    value = int(array[1, 4095])
    array[1, 4095] += 1 - on.ranks.is_first
    seen: list[Any] = [None] * on.ranks.world_size
    torch.distributed.all_gather_object(seen, (value, given, mapped))
    torch.distributed.barrier()
    found["seen"], found["kept"] = seen, int(array[1, 4095])
    found["agree"] = [arrays.agree(on.ranks.is_first), arrays.agree(True)]
    return found


def fill_with(array: Any, rank: int) -> int:
    array[:] = rank + 7
    return rank


def refuse_to_open(path: str, mode: str) -> Any:
    raise PermissionError(13, "Permission denied")


def refusal_of_stream(on: Cases, name: str) -> str:
    """The message about a dataset of `streamed` within the first steps; empty where it is read."""
    loader = None
    try:
        loader = on.build(f"of-{name}", *(word.replace("WithHeldOut", name) for word in STREAM)).train_loader
        assert len(list(loader.steps(0, 3))) == 3
    except PtfastError as error:
        return f"{error.code}: {error}"
    finally:
        if loader is not None:
            loader.close()
    return ""


def one_pass(on: Cases) -> list[float]:
    """The samples that two ranks of three workers read of a stream, as many as it has."""
    run = on.build("one-pass", *STREAM)
    batches, mine, num_samples = run.train_loader.steps(0, 99), list[float](), 0
    while num_samples < 33:
        batch = next(batches)
        num_samples += batch.num_samples
        mine += [float(v) for data, number in batch.micro_batches for v in data[0].flatten()[:number]]
    run.train_loader.close()
    found: list[Any] = [None] * on.ranks.world_size
    torch.distributed.all_gather_object(found, mine)
    return sorted(found[0] + found[1])
