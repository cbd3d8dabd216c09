"""Weights shared out among ranks: DDP's losses, states that one process loads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_trees import Tree, check, refused
from running import build_run, read_config, records, same_bits, summary, training_state, weights
from strategy_cases import MIXED, SMALL
from test_ddp import a_run

from ptfast.core.distributed import Ranks
from ptfast.core.protocols import DataInfo
from ptfast.tasks.classification import Classification
from ptfast.training.evaluate import evaluate
from ptfast.training.stages.machine_stage import set_up_machine
from ptfast.training.stages.model_stage import build_plain_model, place_model
from ptfast.training.stages.partial_run import PartialRun

FSDP: Tree = {"strategy": "fsdp", "nproc": 2}


@pytest.mark.parametrize("case", ["nadam", "mixed", "resnet", "checkpointed", "gpt fp32"])
def test_losses_are_those_of_ddp(two_ranks: dict[str, Any], case: str) -> None:
    """Layers whose rows do not divide, averaged weights, clipping, accumulation, BatchNorm, tied blocks."""
    ddp, fsdp = two_ranks[f"{case} ddp"], two_ranks[f"{case} fsdp"]
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert fsdp["weights"].keys() == ddp["weights"].keys()
    for name, value in ddp["weights"].items():
        torch.testing.assert_close(fsdp["weights"][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "amp_fp16"])
def test_half_precision_is_as_near_as_it_can_be(two_ranks: dict[str, Any], precision: str) -> None:
    ddp, fsdp = two_ranks[f"gpt {precision} ddp"], two_ranks[f"gpt {precision} fsdp"]
    assert fsdp["losses"] != two_ranks["gpt fp32 fsdp"]["losses"]
    assert fsdp["losses"] == pytest.approx(ddp["losses"], rel=1e-3)
    assert {value.dtype for value in fsdp["weights"].values()} == {torch.float32}


def test_float8_products_train_like_bfloat16_and_resume_with_the_same_bits(two_ranks: dict[str, Any]) -> None:
    pytest.importorskip("torchao")
    assert two_ranks["float8 resumes"] is True
    float8, bf16 = two_ranks["float8"], two_ranks["float8 off"]
    assert float8["losses"] != bf16["losses"]
    assert float8["losses"] == pytest.approx(bf16["losses"], rel=0.02)
    for name, value in bf16["weights"].items():
        torch.testing.assert_close(float8["weights"][name], value, rtol=0.05, atol=0.02)


def test_it_goes_on_to_the_same_bits(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["fsdp resumes"]
    assert two_ranks["fsdp resumes without a bias"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_states_are_written_beside_training(two_ranks: dict[str, Any], strategy: str) -> None:
    """An error of one rank's writer is that of all."""
    same, in_background, says = two_ranks[f"beside {strategy}"]
    assert same
    assert in_background == 3
    assert not says or says.startswith("E002 after step ")
    assert bool(says) == (strategy == "fsdp")


def test_weights_of_two_types_are_refused(two_ranks: dict[str, Any]) -> None:
    """Among weights in bf16, norms stay in float32."""
    assert two_ranks["two types"].startswith("C011: parallel=fsdp: the weights are bfloat16 and float32")


def test_a_callback_cannot_save_what_every_rank_has_a_part_of(two_ranks: dict[str, Any]) -> None:
    assert "state_dict returns a DTensor of float32" in two_ranks["kept by a callback"]


@pytest.mark.gpu
def test_a_gpu_never_holds_the_whole_model(tmp_path: Path) -> None:
    """The first of 8 ranks, the other seven of which are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    words = ("model.hidden=[1024,1024,1024,1024,1024,1024]", "parallel.blocks=[layers.*]", "device=cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        run = build_run(tmp_path, "parallel=fsdp", "model=mlp", *words, ranks=Ranks(0, 0, 8, 8))
    finally:
        torch.distributed.destroy_process_group()
    whole = 4 * sum(each.numel() for each in run.model.parameters())
    assert torch.cuda.max_memory_allocated() - before < whole / 2


def test_the_whole_model_stays_on_the_host() -> None:
    """Shares of it go to the device, one block after another: here a GPU that is not there."""
    _, config = read_config(
        ("parallel=fsdp", "model=mlp", "rewrites.bias_before_norm=false", "precision.tf32_convolutions=false")
    )
    run = PartialRun(
        folder=Path(),
        device=torch.device("cuda", 0),
        config=config,
    )
    set_up_machine(run, trains=False)
    run.ranks = Ranks(0, 0, 8, 8)
    run.info = DataInfo(kind="features", task="classification", num_classes=10, input_shape=(64,))
    run.task = Classification(run.info)
    build_plain_model(run)
    place_model(run)
    assert {each.device.type for each in run.model.parameters()} == {"cpu"}


@pytest.fixture
def rank_folder(two_ranks: dict[str, Any]) -> Path:
    """Where the two ranks have trained."""
    return Path(two_ranks["folder"])


def test_one_process_loads_what_it_saves(rank_folder: Path, tmp_path: Path) -> None:
    """Weights, averages and optimizer state are whole, under plain names; training goes on from them."""
    saved = {name: rank_folder / name / "saved" / "last" for name in ("mixed-ddp", "mixed-fsdp")}
    ddp, fsdp = (training_state(path.parent.parent) for path in saved.values())
    numbered, named = ddp["optimizer"]["param_groups"], fsdp["optimizer"]["param_groups"]
    assert [group | {"params": None} for group in numbered] == [group | {"params": None} for group in named]
    assert [name for group in named for name in group["params"]] == list(fsdp["optimizer"]["state"])
    for state, other in (
        (ddp["ema"]["averages"], fsdp["ema"]["averages"]),
        *zip(ddp["optimizer"]["state"].values(), fsdp["optimizer"]["state"].values(), strict=True),
    ):
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=1e-3, atol=1e-5)
    run = build_run(tmp_path, *SMALL, *MIXED, checkpoint_folder=saved["mixed-fsdp"])
    assert run.progress.step == 8
    again = evaluate(run, run.eval_loaders["val"])
    assert again["loss"] == pytest.approx(run.metrics["val"]["loss"], rel=1e-6)


def test_ranks_take_up_what_one_process_has_saved(two_ranks: dict[str, Any]) -> None:
    assert two_ranks["taken up"]["losses"] == pytest.approx(two_ranks["mixed ddp"]["losses"][3:], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rewrites__channels_last": True}, "rewrites.channels_last"),
        ({"compile__mode": "model"}, "compile"),
        ({"debug__mode": "gradcheck"}, "debug"),
        ({"gradients__clip_adaptive": 0.1}, "gradients.clip_adaptive"),
        ({"optimizer__groups": [{"match": "*", "trains_from": "2steps"}]}, "optimizer.groups"),
        ({"optimizer__freeze_backbone": "2steps"}, "optimizer.freeze_backbone"),
    ],
)
def test_what_it_cannot_do_is_refused(changes: Tree, key: str) -> None:
    error = refused(device="cpu", **{"parallel": FSDP, **changes})
    assert (error.code, error.key) == ("C011", key)


@pytest.mark.parametrize(
    "path",
    [
        *("ptfast.optim.lars.Lars", "ptfast.optim.lamb.Lamb", "ptfast.optim.novograd.Novograd"),
        *("ptfast.optim.muon.Muon", "torch.optim.Adafactor"),
    ],
)
def test_optimizers_that_need_whole_layers_are_refused(path: str) -> None:
    optimizer = {"_target_": path, "lr": 0.1}
    error = refused(device="cpu", parallel=FSDP, optimizer=optimizer)
    assert (error.code, error.key) == ("C011", "optimizer")
    assert "parallel=fsdp" in str(error)
    check(device="cpu", parallel={**FSDP, "strategy": "ddp"}, optimizer=optimizer)


def test_an_element_wise_optimizer_of_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptfast.optim.layerwise.Plain", torch.optim.SGD, raising=False)
    check(device="cpu", parallel=FSDP, optimizer={"_target_": "ptfast.optim.layerwise.Plain", "lr": 0.1})


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(in_tmp: Path) -> None:
    words = ("model.hidden=[30,30]", "batch_size=96", "steps=24", "log_every=4", "ema=ema", "run.resume=auto")
    words = (*words, "parallel=fsdp", "parallel.nproc=2", "callbacks=[{_target_: callbacks.Misfortune}]")
    for name, misfortune, code in (
        ("whole", "1 1000 SIGTERM", 0),
        ("stopped", "1 9 SIGTERM", 75),
        ("stopped", "1 1000 SIGTERM", 0),
    ):
        Path("misfortune").write_text(misfortune)
        process = a_run(*words, f"run.dir={name}")
        out, err = process.communicate(timeout=200)
        assert (process.returncode, err) == (code, "")
        assert "fsdp, weights in 1 part" in out
    assert same_bits(weights(Path("stopped")), weights(Path("whole")))
    assert records(Path("stopped")) == records(Path("whole"))


@pytest.mark.slow
def test_what_four_ranks_save_any_number_takes_up(in_tmp: Path) -> None:
    """Each writes its share; ranks that divide no layer go on from it, and so does one process."""
    words = ("model.hidden=[64,64]", "batch_size=96", "micro_batches=4", "steps=16", "saving.every=8steps")
    words = (*words, "optimizer=adamw", "ema=ema", "saving.keep=9", "data.val=20%", "eval.every=8steps")
    run_command(*words, "parallel=fsdp", "parallel.nproc=4", "run.dir=four")
    middle = Path("four/saved/step-8")
    sizes = [file.stat().st_size for file in sorted(middle.glob("shard-*"))]
    assert len(sizes) == 4
    for name, more in {
        "two": ("parallel=fsdp", "parallel.nproc=2"),
        "averaged": ("parallel=ddp", "parallel.nproc=2"),
        "one": (),
    }.items():
        run_command(*words, *more, f"run.dir={name}", f"run.resume={middle}")
        assert [line["step"] for line in records(Path(name)) if line["split"] == "val"] == [16]
        losses = [summary(Path(folder))["val"]["loss"] for folder in ("four", name)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert not list(Path("one/saved/last").resolve().glob("shard-*"))
    whole_size = sum(Path("one/saved/last", name).stat().st_size for name in ("model.pt", "training.pt"))
    # Beside its share a rank writes names, and the first what is not shared out.
    assert max(sizes) < whole_size / 4 + 8192
    out = run_command("four", command="eval")
    figures = {line["split"]: line["loss"] for line in map(json.loads, out.splitlines())}
    assert figures["val"] == pytest.approx(summary(Path("four"))["val"]["loss"], rel=1e-6)


@pytest.mark.slow
def test_a_rank_killed_while_saving_leaves_the_state_before(in_tmp: Path) -> None:
    words = ("model.hidden=[30,30]", "batch_size=96", "steps=12", "saving.every=4steps", "saving.keep=9")
    words = (
        *words,
        "parallel=fsdp",
        "parallel.nproc=2",
        "callbacks=[{_target_: callbacks.KilledWhileSaving}]",
    )
    Path("killed-at").write_text("99")
    run_command(*words, "run.dir=whole")
    Path("killed-at").write_text("8")
    process = a_run(*words, "run.dir=killed")
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err.count("\n")) == (7, 1)
    saved = Path("killed/saved")
    assert (saved / "last").readlink() == Path("step-4")
    [draft] = saved.glob(".step-8*")
    assert sorted(file.name for file in draft.glob("shard-*")) == [
        f"shard-{rank:05}-of-00002.safetensors" for rank in (1, 2)
    ]
    Path("killed-at").write_text("99")
    run_command(*words, "run.dir=killed", "run.resume=auto")
    assert same_bits(weights(Path("killed")), weights(Path("whole")))
    assert not list(saved.glob(".step-*"))


def run_command(*words: str, command: str = "train") -> str:
    """What `ptfast COMMAND WORDS...` prints."""
    process = a_run(*words, command=command)
    out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    return out
