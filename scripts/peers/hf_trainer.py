"""The Trainer of transformers: saving, clipping and reports off, batches by length for texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peers import LOG_STEPS, Clock, Job


class WithLoss(nn.Module):
    """The network as the Trainer wants it: it returns its own loss."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__()
        self.model, self.job = model, job

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(input_ids)
        return {"loss": self.job.loss(logits, labels), "logits": logits}


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples by name. `input_ids` is where the Trainer looks for lengths."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        inputs, target = self.samples[index]
        return {"input_ids": inputs, "labels": target}


def train(job: Job, clock: Clock) -> nn.Module:
    """Train and evaluate `job`."""
    from transformers import Trainer, TrainingArguments

    model = job.build_model()
    clock.watch(model)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        inputs, labels = job.collate([(sample["input_ids"], sample["labels"]) for sample in samples])
        return {"input_ids": inputs, "labels": labels}

    class Timed(Trainer):
        def evaluate(self, *args: Any, **keywords: Any) -> dict[str, float]:
            figures = super().evaluate(*args, **keywords)
            clock.evaluated(figures["eval_accuracy" if job.counts_correct else "eval_loss"])
            return figures

    arguments = TrainingArguments(
        output_dir=str(job.folder / "hf"),
        num_train_epochs=job.epochs,
        per_device_train_batch_size=job.batch_size,
        per_device_eval_batch_size=job.batch_size,
        train_sampling_strategy="group_by_length" if job.groups_lengths else "random",
        dataloader_num_workers=job.workers,
        dataloader_persistent_workers=job.workers > 0,
        bf16=job.bf16,
        logging_steps=LOG_STEPS,
        logging_nan_inf_filter=False,
        eval_strategy="epoch" if job.evaluates else "no",
        prediction_loss_only=not job.counts_correct,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        max_grad_norm=0.0,
        use_cpu=job.device == "cpu",
    )
    samples = Samples(job.samples("train"))
    optimizer = job.build_optimizer(model)
    steps = job.epochs * -(-len(samples) // job.batch_size)
    trainer = Timed(
        WithLoss(model, job),
        arguments,
        data_collator=collate,
        train_dataset=samples,
        eval_dataset=Samples(job.samples("val")) if job.evaluates else None,
        compute_metrics=lambda found: {"accuracy": (found.predictions == found.label_ids).mean()},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        optimizers=(optimizer, job.build_schedule(optimizer, steps)),
    )
    trainer.train()
    return model
