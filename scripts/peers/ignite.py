"""PyTorch Ignite's supervised trainer."""

from __future__ import annotations

from torch import nn

from peers import LOG_STEPS, Clock, Job


def train(job: Job, clock: Clock) -> nn.Module:
    """Train `job`, without evaluating it."""
    from ignite.engine import Events, create_supervised_trainer

    model = job.build_model()
    clock.watch(model)
    optimizer, batches = job.build_optimizer(model), job.batches("train")
    schedule = job.build_schedule(optimizer, job.epochs * len(batches))
    trainer = create_supervised_trainer(
        model, optimizer, job.loss, output_transform=lambda x, y, p, loss: loss
    )
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: schedule.step())
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED(every=LOG_STEPS), lambda engine: engine.state.output.item()
    )
    trainer.run(batches, max_epochs=job.epochs)
    return model
