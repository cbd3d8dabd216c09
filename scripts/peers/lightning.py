"""Lightning, with everything off that costs time, or as it comes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from peers import LOG_STEPS, Clock, Job
from peers.by_hand import score

LEAN = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def train(job: Job, clock: Clock, *, lean: bool = True) -> nn.Module:
    """Train and evaluate `job`; unless `lean`, log the loss as its docs do in every example."""
    import lightning

    model = job.build_model()
    clock.watch(model)
    batches = job.batches("train")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            inputs, targets = batch
            loss = job.loss(self.model(inputs), targets)
            if not lean:
                self.log("loss", loss)
            elif self.global_step % LOG_STEPS == LOG_STEPS - 1:
                loss.item()
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            inputs, targets = batch
            figure = score(job, self.model(inputs), targets)
            self.log("figure", figure, on_epoch=True, batch_size=len(targets))

        def on_validation_epoch_end(self) -> None:
            clock.evaluated(float(self.trainer.callback_metrics["figure"]))

        def configure_optimizers(self) -> Any:
            optimizer = job.build_optimizer(self.model)
            schedule = job.build_schedule(optimizer, job.epochs * len(batches))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    trainer = lightning.Trainer(
        accelerator="cpu" if job.device == "cpu" else "gpu",
        devices=1,
        max_epochs=job.epochs,
        precision="bf16-mixed" if job.bf16 else "32-true",
        log_every_n_steps=LOG_STEPS,
        default_root_dir=job.folder,
        **(LEAN if lean else {}),
    )
    trainer.fit(Module(), batches, job.batches("val") if job.evaluates else None)
    return model
