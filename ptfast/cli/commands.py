"""The commands: flags, texts for `--help`, and the function that runs each."""

from __future__ import annotations

from ptfast.cli.arguments import Command, Flag, choice, number, path, pixels, seconds, switch

_RUN = "[recipe=NAME] [key=value ...]"
_FOLDER = Flag("--out FOLDER", "folder to write into; default: a new one under runs", read=path)
_WRITE = Flag("--write FILE", "recipe to write with the result", read=path)
_SECONDS = Flag("--seconds N", "seconds to measure each", read=number())
_CHECKPOINT = Flag("--checkpoint NAME", "checkpoint: best (the default), last or step-N", default="best")


def _budget(text: str) -> float:
    return 0.0 if text == "0" else seconds(text)


def _search(kind: str, summary: str, *flags: Flag) -> Command:
    example = f"find {kind} recipe=resnet_cifar"
    return Command(_RUN, summary, "config_commands.find", (*flags, _WRITE, _FOLDER), (example,))


_FIND = {
    "lr": _search(
        "lr",
        "measure the best learning rate",
        Flag("--from LR", "lowest learning rate to try", "lowest", number()),
        Flag("--to LR", "highest learning rate to try", "highest", number()),
        Flag("--steps N", "optimizer steps of the range test", "num_steps", number(20)),
        Flag("--trial-steps N", "optimizer steps of each trial at one learning rate", read=number(20)),
    ),
    "batch": _search(
        "batch",
        "measure the best batch size",
        Flag("--from N", "smallest batch to try", "smallest", number(1)),
        Flag("--to N", "largest batch to try", "largest", number(1)),
        _SECONDS,
    ),
    "workers": _search(
        "workers",
        "measure the best loader",
        Flag("--to N", "most worker processes to try", "most", number(1)),
        _SECONDS,
    ),
}
_SLURM = Command(
    _RUN,
    "train on a SLURM cluster: submit a job, or print it",
    "launch_command.launch",
    (
        Flag("--nodes N", "machines per job; default 1", read=number(1), default=1),
        Flag("--gpus [TYPE:]N", "GPUs per machine: 8 or H100:8"),
        Flag("--cpus N", "cores per machine", read=number(1)),
        Flag("--time TIME", "time limit of the job, such as 4h", read=seconds),
        Flag("--partition NAME", "SLURM partition"),
        switch("--print", "print the job instead of submitting it"),
    ),
    ("launch slurm recipe=resnet_cifar --nodes 2 --print",),
)
COMMANDS: dict[str, Command] = {
    "train": Command(
        _RUN,
        "train a model; -m sweeps over key=a,b",
        "config_commands.train",
        (
            switch("--multirun -m", "sweep: train one run per combination of key=a,b"),
            switch("--dry-run", "take a few steps without saving; print memory, time and disk of the run"),
            Flag("--config RUN|FILE", "train from a run directory or its config.yaml"),
            choice("--cfg -c", "print the composed config", "job", "hydra"),
        ),
        (
            "train recipe=resnet_digits",
            "train recipe=resnet_cifar precision=amp optimizer=lamb",
            "train -m recipe=resnet_digits optimizer.lr=0.01,0.1 seed=0,1",
            "train recipe=resnet_digits --cfg job",
            "train recipe=resnet_digits --dry-run",
        ),
        imports_torch=True,
    ),
    "launch": Command(
        f"slurm {_RUN}",
        _SLURM.summary,
        _SLURM.run,
        examples=(*_SLURM.examples, "launch slurm --help"),
        kinds={"slurm": _SLURM},
    ),
    "eval": Command(
        "RUN|CHECKPOINT [key=value ...]",
        "evaluate a trained model",
        "config_commands.eval",
        (Flag("--split NAME", "evaluate one split: val, test or an evaluation set"), _CHECKPOINT),
        ("eval RUN", "eval RUN --split test --checkpoint last"),
        min_words=1,
        max_words=1,
        imports_torch=True,
    ),
    "predict": Command(
        "RUN|EXPORT PATH...|--prompt TEXT [key=value ...]",
        "predict for files, or continue a prompt with a language model",
        "predict_command.predict",
        (
            Flag("--prompt TEXT", "text for a language model to continue"),
            Flag("--max-new-tokens N", "tokens to generate; default 100", "num_new", number(1)),
            Flag("--temperature T", "above 0, default 1; lower favors the likeliest tokens", read=number()),
            Flag("--top-k K", "sample from the K likeliest tokens; default: all", read=number(1)),
            Flag("--out FILE", "file to write instead of the terminal", read=path),
            Flag("--masks FOLDER", "folder for predicted masks, as PNG of class numbers", read=path),
            _CHECKPOINT,
        ),
        ("predict RUN pictures/ --out found.jsonl", "predict RUN --prompt 'ROMEO:'"),
        min_words=1,
        imports_torch=True,
    ),
    "export": Command(
        "RUN|CHECKPOINT --out FOLDER [key=value ...]",
        "write a trained model for use without ptfast",
        "export_command.export",
        (
            Flag("--out FOLDER", "new folder for weights, graph, facts and load.py", read=path),
            Flag("--hub FOLDER", "new folder in the layout of the Hugging Face hub", read=path),
            switch("--onnx", "also write an ONNX graph"),
            choice("--weights", "weights, averaged by default if EMA or SWA is on", "averaged", "last"),
            switch("--weights-only", "write no graph, for models that cannot be traced"),
            _CHECKPOINT,
        ),
        ("export RUN --out exported --onnx", "export RUN --checkpoint last --out exported --hub my-model"),
        min_words=1,
        max_words=1,
        imports_torch=True,
    ),
    "compare": Command(
        "RUN|FOLDER...",
        "rank runs by a metric and draw their curves",
        "compare_command.compare",
        (
            Flag("--metric NAME", "metric to rank by, such as val.accuracy", default="auto"),
            choice("--mode", "which direction is better", "auto", "max", "min", default="auto"),
            Flag("--target METRIC=VALUE", "also rank by the time to reach it, such as accuracy=0.9"),
            Flag("--out FILE", "page (.html) to write", read=path),
        ),
        ("compare RUN RUN --metric val.accuracy --out both.html",),
        min_words=1,
    ),
    "pack": Command(
        "SRC DST",
        "turn images or text into memory-mapped files to train from",
        "pack_command.pack",
        (
            Flag("--size PIXELS|keep", "images: pixels of the shorter side, such as 256", read=pixels),
            switch("--jpeg", "images: keep the JPEG files instead of decoded pixels"),
            choice("--on-corrupt", "images that cannot be read", "error", "skip"),
            Flag("--tokenizer NAME|FILE", "text: characters, words, a tokenizer.json or a name on the Hub"),
            choice("--documents", "text: documents to keep apart", "none", "lines", "paragraphs"),
            Flag("--workers N", "processes that convert; default: one per core", read=number(1)),
            switch("--verify", "check every byte of a pack and its source"),
        ),
        ("pack images/ packed/ --size 256", "pack --verify packed/"),
        max_words=2,
        imports_torch=True,
    ),
    "find": Command(
        f"lr|batch|workers {_RUN}",
        "measure the best learning rate, batch size or loader",
        "config_commands.find",
        examples=(
            "find lr recipe=resnet_digits",
            "find batch recipe=resnet_cifar --write mine.yaml",
            "find workers recipe=resnet_cifar --seconds 3",
            "find lr --help",
        ),
        kinds=_FIND,
        alone=True,
    ),
    "ablate": Command(
        _RUN,
        "measure what each technique gains here; write the best recipe",
        "config_commands.ablate",
        (
            Flag("--budget TIME", "time to measure for; default 4m", read=seconds, default=240.0),
            Flag("--only NAME,NAME", "measure only these techniques"),
            switch("--compile", "also try torch.compile, which is slow to start"),
            _FOLDER,
        ),
        (
            "ablate recipe=resnet_cifar --budget 10m",
            "ablate recipe=resnet_cifar --only 'fused optimizer step,channels last'",
        ),
        alone=True,
    ),
    "audit": Command(
        _RUN,
        "find slow code in your model, data, loop and machine",
        "config_commands.audit",
        (
            Flag("--budget TIME", "time to measure for; default 2m, 0 for no costs", None, _budget, 120.0),
            Flag("--fix FILE", "recipe to write with the overrides that fix findings", read=path),
            switch("--strict", "exit with 8 if a finding is left for you to fix"),
            _FOLDER,
        ),
        ("audit recipe=resnet_cifar --fix mended.yaml", "audit recipe=resnet_cifar --strict"),
        alone=True,
    ),
    "race": Command(
        "[recipe=NAME] key=a,b --target METRIC=VALUE",
        "train variants with the same seeds: which reaches a target first",
        "config_commands.race",
        (
            Flag("--target METRIC=VALUE", "metric to reach and its value, such as accuracy=0.9"),
            Flag("--seeds N", "runs per variant, each with its own seed", read=number(1), default=5),
        ),
        ("race recipe=resnet_digits optimizer=adamw,muon --target accuracy=0.9",),
        alone=True,
    ),
    "chaos": Command(
        _RUN,
        "kill a run again and again, and check that its results stay the same",
        "config_commands.chaos",
        (
            Flag("--kills N", "SIGKILLs in total; default 20", "num_kills", number(1), 20),
            Flag("--seed N", "seed of the kill times; default 0", read=int, default=0),
            _FOLDER,
        ),
        ("chaos recipe=resnet_digits", "chaos recipe=resnet_digits --kills 5 --seed 1"),
        alone=True,
    ),
    "doctor": Command(
        "",
        "check this machine: what is missing or slow, and how to fix it",
        "doctor_command.doctor",
        examples=("doctor",),
        max_words=0,
        imports_torch=True,
    ),
    "recipes": Command(
        "",
        "list the recipes and the results to expect",
        "listing_commands.recipes",
        examples=("recipes",),
        max_words=0,
    ),
    "techniques": Command(
        "[NAME]",
        "list what makes training faster, and what is on or applies here",
        "listing_commands.techniques",
        examples=("techniques", "techniques precision", "techniques fused optimizer step"),
    ),
    "copy": Command("NAME FILE", "copy a recipe to edit", "listing_commands.copy", max_words=2, min_words=1),
    "schema": Command(
        "",
        "print a JSON Schema of recipe files, for editors",
        "listing_commands.schema",
        (Flag("--out FILE", "file to write", read=path),),
        max_words=0,
    ),
    "completion": Command(
        "bash|zsh|fish",
        "print a shell completion script",
        "completion.completion_command.completion",
        max_words=1,
    ),
}
