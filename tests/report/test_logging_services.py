"""What TensorBoard, W&B and MLflow are sent, by stand-ins for them, and what a resumed run does to it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loggers import train

from ptfast.core.errors import MachineError
from ptfast.report.loggers import JsonlLogger, Tensorboard, Wandb, settings_of
from ptfast.report.mlflow_logger import Mlflow


@pytest.mark.parametrize(
    ("logger", "package"), [(Tensorboard, "tensorboard"), (Wandb, "wandb"), (Mlflow, "mlflow")]
)
def test_a_missing_package_is_named_with_its_extra(
    logger: type, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MachineError, match=rf"pip install 'ptfast\[{package}\]'") as caught:
        logger()
    assert caught.value.code == "E004"


def test_tensorboard_tags_by_split_hides_what_a_resumed_run_repeats_and_ends_with_hparams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append(("open", folder, purge_step))

        def add_text(self, *args: Any) -> None:
            calls.append(("text", args[0]))

        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def add_images(self, tag: str, images: Any, step: int) -> None:
            calls.append((tag, tuple(images.shape), float(images.min()), float(images.max()), step))

        @property
        def file_writer(self) -> Any:
            return types.SimpleNamespace(add_summary=calls.append)

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # pyright: ignore[reportAttributeAccessIssue]
    summary = types.ModuleType("torch.utils.tensorboard.summary")
    summary.hparams = lambda *given: [given]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.summary", summary)
    monkeypatch.setitem(sys.modules, "tensorboard", fake)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(train(4)) + "\n")
    logger = Tensorboard(images=2)
    config = {"batch_size": 8, "optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}, "steps": 9, "seed": None}
    logger.open(tmp_path, config)
    logger.log_images(4, torch.linspace(-3, 5, 36).reshape(3, 3, 2, 2))
    logger.log({"step": 5, "epoch": 0.5, "split": "val", "loss": 0.5, "note": "text is left out"})
    logger.close()
    folder = str(tmp_path / "tensorboard")
    settings = {"batch_size": 8, "optimizer.lr": 0.1, "optimizer.betas": "[0.9, 0.99]"}
    assert calls == [
        *[("open", folder, 5), ("text", "config"), ("train/images", (2, 3, 2, 2), 0.0, 1.0, 4)],
        *[("val/loss", 0.5, 5), ("flush",), (settings, {"val/loss": 0.5}), ("close",)],
    ]


def test_what_may_change_in_a_run_is_no_setting_of_it() -> None:
    config = {"seed": 1, "log_every": 5, "dataloader": {"workers": 2, "drop_last": True}}
    assert settings_of(config | {"debug": {"mode": "none"}}) == {"seed": 1, "dataloader.drop_last": True}


class WandbService:
    """Keeps rows of runs by id, as W&B does: of one step together, sent with the next, none out of order."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, float]]] = {}
        self.started: list[dict[str, Any]] = []

    def init(self, **options: Any) -> Any:
        self.started.append(options)
        run_id, _, step = options.get("resume_from", "").partition("?_step=")
        rows = self.rows.setdefault(run_id or options["id"], {})
        for later in [found for found in rows if step and found > int(step)]:
            del rows[later]
        row: dict[int, dict[str, float]] = {}

        def log(metrics: dict[str, float], step: int) -> None:
            assert step >= max([run.starting_step, *row]), "out of order"
            if step not in row:
                finish()
            row.setdefault(step, {}).update(metrics)

        def finish() -> None:
            rows.update(row)
            row.clear()

        first = int(step) + 1 if step else max(rows, default=-1) + 1
        run = types.SimpleNamespace(log=log, finish=finish, starting_step=first)
        return run


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> WandbService:
    service, fake = WandbService(), types.ModuleType("wandb")
    fake.init = service.init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return service


def test_a_run_has_an_id_of_its_own_in_wandb_and_keeps_it(tmp_path: Path, wandb: WandbService) -> None:
    """The jobs of two sweeps have folders of one name."""
    for sweep in ("20261120-ab12", "20261121-cd34", "20261120-ab12"):
        (tmp_path / sweep / "0").mkdir(parents=True, exist_ok=True)
        logger = Wandb(project="mine")
        logger.open(tmp_path / sweep / "0", {"epochs": 1})
    logger.log(train(3, loss=0.5, step_s=0.25))
    logger.close()
    first, other, resumed = wandb.started
    assert first["id"] == resumed["id"] != other["id"]
    assert first["id"].isalnum()
    assert (first["project"], first["name"], first["resume"]) == ("mine", "20261120-ab12/0", "allow")
    assert wandb.rows[first["id"]] == {3: {"train/loss": 0.5, "train/step_s": 0.25}}


@pytest.mark.parametrize("killed", [True, False])
def test_a_resumed_run_is_one_curve_in_wandb(killed: bool, tmp_path: Path, wandb: WandbService) -> None:
    attempts = {0: (5, 10, 15, 20), 12: (15, 20, 25)}
    for resumed, steps in attempts.items():
        file = JsonlLogger(tmp_path / "metrics.jsonl", last_step=resumed)
        logger = Wandb()
        logger.open(tmp_path, {})
        for record in (train(step, loss=step + resumed / 100) for step in steps):
            file.log(record)
            logger.log(record)
        file.close()
        if steps[-1] == 25 or not killed:
            logger.close()
    (rows,) = wandb.rows.values()
    assert [*rows] == [5, 10, 15, 20, 25]
    # What the first attempt has sent stays; of a killed one the last row was not sent.
    again = {20, 25} if killed else {25}
    assert {step for step, row in rows.items() if row["train/loss"] == step + 0.12} == again


def test_an_evaluation_that_was_due_is_sent_to_wandb(tmp_path: Path, wandb: WandbService) -> None:
    for step, split in ((20, "train"), (20, "val")):
        file, logger = JsonlLogger(tmp_path / "metrics.jsonl", last_step=20), Wandb()
        logger.open(tmp_path, {})
        for sink in (file, logger):
            sink.log({"step": step, "split": split, "loss": 1.0})
            sink.close()
    (rows,) = wandb.rows.values()
    assert rows == {20: {"train/loss": 1.0}, 21: {"val/loss": 1.0}}


def test_what_wandb_refuses_comes_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: Any) -> None:
        raise ValueError("api_key not configured (no-tty).\ncall wandb.login(key=[your_api_key])")

    fake = types.ModuleType("wandb")
    fake.init = init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(
        MachineError, match=r"api_key not configured.*`wandb login`.*WANDB_MODE=offline"
    ) as caught:
        Wandb().open(tmp_path, {})
    assert (caught.value.code, caught.value.key) == ("E006", "logger")


def test_mlflow_keeps_settings_and_figures_and_a_resumed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    client = types.SimpleNamespace(
        get_experiment_by_name=lambda name: None,
        create_experiment=lambda name: f"id of {name}",
        create_run=lambda *args, **kwargs: (
            calls.append((args, kwargs)) or types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
        ),
        update_run=lambda *args, **kwargs: calls.append((args, kwargs)),
        log_batch=lambda run_id, params=(), metrics=(): calls.append((run_id, [*params, *metrics])),
        set_terminated=calls.append,
    )
    fake, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    fake.MlflowClient = lambda tracking_uri: client  # pyright: ignore[reportAttributeAccessIssue]
    entities.Param = lambda key, value: (key, value)  # pyright: ignore[reportAttributeAccessIssue]
    entities.Metric = lambda key, value, _, step: (key, value, step)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for _ in range(2):
        logger = Mlflow(experiment="mine")
        (tmp_path / "runs" / "0").mkdir(parents=True, exist_ok=True)
        logger.open(tmp_path / "runs" / "0", {"batch_size": 8, "run": {"dir": "x"}})
        logger.log(train(3, loss=0.5))
        logger.close()
    created, settings, metrics, ended, resumed, *_ = calls
    assert created == (("id of mine",), {"run_name": "runs/0", "tags": None})
    assert settings == ("r1", [("batch_size", "8")])
    assert metrics == ("r1", [("train/loss", 0.5, 3)])
    assert (ended, resumed) == ("r1", (("r1",), {"status": "RUNNING"}))
