"""Command lines that people in a hurry type, and the refusal of each."""

from __future__ import annotations

from bad_configs import TYPED, Case, train

SAVING = "checkpointing=last (command line): no such option of checkpointing. Did you mean saving=last?"
HURRIED: dict[str, Case] = {
    "a command misspelt": Case("trian", "C015", ("trian: no such command. Did you mean train?",)),
    "no command": Case("recipe=resnet_digits", "C015", ("Did you mean ptfast train recipe=resnet_digits?",)),
    "a recipe for a command": Case(
        "resnet_digits", "C015", ("Did you mean ptfast train recipe=resnet_digits?",)
    ),
    "a flag for a command": Case("--config x.yaml", "C015", ("Did you mean ptfast train --config?",)),
    "a bare recipe": train("resnet_digits", "C001", "Write recipe=resnet_digits"),
    "a recipe with dashes": train("--recipe resnet_digits", "C015", "without dashes: recipe=resnet_digits"),
    "a key with dashes": train("recipe=resnet_digits --lr 3", "C015", "without dashes: optimizer.lr=3"),
    "a short flag": train("-x", "C015", f"-x {TYPED} no such flag. Flags: --multirun, --dry-run, --config"),
    "a flag misspelt": train("--dryrun", "C015", "Did you mean --dry-run?"),
    "a flag without value": train("--config", "C015", "--config (command line): needs a value"),
    "blanks around =": train("epochs = 3", "C001", "Write epochs=VALUE"),
    "no key": train("=3", "C001", "no key before the ="),
    "the rate by its common name": train("lr=0.1", "C002", "Did you mean optimizer.lr?"),
    "the rate by another name": train("learning_rate=0.1", "C002", "Did you mean optimizer.lr?"),
    "workers by another name": train("num_workers=4", "C002", "Did you mean dataloader.workers?"),
    "a model of torchvision": train(
        "model=resnet18", "C003", "Did you mean model=torchvision model.name=resnet18?"
    ),
    "a device by number": train("device=cuda:0", "C004", "Did you mean cuda?"),
    "the state called checkpoint": train("checkpointing=last", "C003", SAVING),
    "a task misspelt": train("task=classificaton", "C003", "Did you mean classification?"),
    "a metric that is none": train(
        "stop.metric=acuracy", "C005", f"stop.metric=acuracy {TYPED}", "loss, accuracy"
    ),
    "a folder that is required": train(
        "data=imagefolder", "C016", "data.root (conf/data/imagefolder.yaml:", "Give data.root="
    ),
    "a setting of Hydra's": train(
        "hydra.verbose=true", "C011", f"hydra.verbose=true {TYPED} only a sweep reads it"
    ),
    "Hydra's folder of a run": train("hydra.run.dir=x", "C011", f"hydra.run.dir=x {TYPED}", "Use run.dir=x"),
    "Hydra's folder of a sweep": train(
        "-m hydra.sweep.dir=x seed=1,2", "C011", f"hydra.sweep.dir=x {TYPED}", "Use run.root=x"
    ),
    "an interval": train(
        "-m optimizer.lr=interval(0.001,0.1)",
        "C014",
        f"optimizer.lr=interval(0.001,0.1) {TYPED}",
        "Add hydra/sweeper=optuna",
    ),
    "an interval without -m": train(
        "optimizer.lr=interval(0.001,0.1)", "C014", "Add -m and hydra/sweeper=optuna to sweep over them."
    ),
    "a folder of options that is not there": train("--config-dir nope", "C001", f"--config-dir=nope {TYPED}"),
    "a launcher that is not there": train(
        "-m hydra/launcher=nope seed=1,2", "C003", "hydra/launcher=nope", "Options of hydra/launcher"
    ),
    "a config that is a folder": Case(
        "train --config .", "C007", ("config.yaml: cannot be read: No such file",)
    ),
    "a config that is not there": Case(
        "train --config x.yaml", "C007", ("x.yaml: cannot be read: No such file",)
    ),
    "a secret in an unknown key": train(
        "optimizer.api_key=hunter2", "C002", f"optimizer.api_key=<secret> {TYPED}"
    ),
    "a secret twice": train("api_key=hunter2 api_key=hunter3", "C006", f"api_key {TYPED} given twice"),
    "a secret with dashes": train("--api-key=hunter2", "C015", f"--api-key {TYPED}"),
    "a run that is not there": Case("eval nope", "S004", ("nope: no such folder. Give a run directory",)),
    "a folder that is no run": Case("eval .", "S004", (".: no checkpoint there. Give a run directory",)),
    "no run": Case("eval", "C016", ("Usage: ptfast eval RUN|CHECKPOINT",)),
    "a prediction without a run": Case("predict nope missing.png", "S004", ("nope: no such folder",)),
    "a comparison of no run": Case("compare .", "C001", (".: contains no run",)),
    "a recipe to copy that is none": Case(
        "copy nope x.yaml", "C003", ("nope: no such recipe. Recipes: char_gpt",)
    ),
    "a schema to nowhere": Case(
        "schema --out nope/x.json", "E001", ("--out=nope/x.json (command line): cannot be written",)
    ),
    "a state to resume that is none": train("run.resume=nope", "S004", "nope: no such folder"),
}
