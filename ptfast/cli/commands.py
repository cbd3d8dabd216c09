"""The commands and their flags: what `--help` shows, and the function that does the work of each."""

from __future__ import annotations

from ptfast.cli.arguments import Command, Flag, choice, number, path, pixels, seconds, switch

_RUN = "[+recipe=NAME] [key=value ...]"
_FOLDER = Flag("--out", "folder to write into; by default a new one under runs", read=path)
_WRITE = Flag("--write", "recipe to write with what was found", read=path)
_SECONDS = Flag("--seconds", "seconds to measure each", read=number())
_CHECKPOINT = Flag("--checkpoint", "of the run: best, which is the default, last or step-N", default="best")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def _budget(text: str) -> float:
    return 0.0 if text == "0" else seconds(text)


def _search(kind: str, summary: str, *flags: Flag) -> Command:
    example = f"find {kind} +recipe=resnet_cifar"
    return Command(_RUN, summary, "config_commands.find", (*flags, _WRITE, _FOLDER), (example,))


def _cluster(name: str, *flags: Flag) -> Command:
    asked = (
        Flag("--nodes", "machines of a job; default 1", read=number(1), default=1),
        Flag("--gpus", "GPUs of each machine: 8, or H100:8"),
        Flag("--cpus", "cores of each machine", read=number(1)),
        *flags,
        switch("--print", "print what would be submitted"),
    )
    example = f"launch {name} +recipe=resnet_cifar --nodes 2 --print"
    return Command(
        _RUN, "train on a cluster: submit a job, or print it", "launch_command.launch", asked, (example,)
    )


_FIND = {
    "lr": _search(
        "lr",
        "measure the best learning rate",
        Flag("--from", "lowest learning rate to try", "lowest", number()),
        Flag("--to", "highest learning rate to try", "highest", number()),
        Flag("--steps", "optimizer steps of the range test", "num_steps", number(20)),
        Flag("--trial-steps", "optimizer steps of each trial at one learning rate", read=number(20)),
    ),
    "batch": _search(
        "batch",
        "measure the best batch size",
        Flag("--from", "smallest batch to try", "smallest", number(1)),
        Flag("--to", "largest batch to try", "largest", number(1)),
        _SECONDS,
    ),
    "workers": _search(
        "workers",
        "measure the best loader",
        Flag("--to", "most worker processes to try", "most", number(1)),
        _SECONDS,
    ),
}
_LAUNCH = {
    "slurm": _cluster(
        "slurm",
        Flag("--time", "limit of a job, such as 4h", read=seconds),
        Flag("--partition", "SLURM's partition"),
    ),
    "ray": _cluster("ray"),
}
COMMANDS: dict[str, Command] = {
    "train": Command(
        _RUN,
        "train a model; -m sweeps over key=a,b",
        "config_commands.train",
        (
            switch("--multirun -m", "sweep: train one run per combination of key=a,b"),
            switch("--dry-run", "take a few steps without saving; print memory, time and disk of the run"),
            Flag("--config", "train from a run directory or its config.yaml"),
            choice("--cfg -c", "print the composed config", "job", "hydra"),
            choice("--info -i", "print how it is composed", *_INFO),
        ),
        (
            "train +recipe=resnet_digits",
            "train +recipe=resnet_cifar precision=amp optimizer=lamb optimizer.lr=0.01",
            "train -m +recipe=resnet_digits optimizer.lr=0.01,0.1 seed=0,1",
            "train +recipe=resnet_digits --cfg job",
            "train +recipe=resnet_digits --dry-run",
        ),
        imports_torch=True,
    ),
    "launch": Command(
        f"slurm|ray {_RUN}",
        "train on a cluster: submit a job, or print it",
        "launch_command.launch",
        examples=("launch slurm +recipe=resnet_cifar --nodes 2 --print", "launch slurm --help"),
        kinds=_LAUNCH,
    ),
    "eval": Command(
        "RUN|CHECKPOINT [key=value ...]",
        "evaluate a trained model",
        "config_commands.eval",
        (Flag("--split", "evaluate one split, val or test, or one evaluation set"), _CHECKPOINT),
        ("eval RUN", "eval RUN --split test --checkpoint last"),
        min_words=1,
        max_words=1,
        imports_torch=True,
    ),
    "predict": Command(
        "RUN|EXPORT PATH...|--prompt TEXT [key=value ...]",
        "write predictions for files, or text after a prompt",
        "predict_command.predict",
        (
            Flag("--prompt", "text that a language model goes on from"),
            Flag("--max-new-tokens", "tokens to write after the prompt; default 100", "num_new", number(1)),
            Flag("--temperature", "above 0, default 1: lower makes likely tokens likelier", read=number()),
            Flag("--top-k", "choose from so many of the likeliest tokens; default: all", read=number(1)),
            Flag("--out", "file to write instead of the terminal", read=path),
            Flag("--masks", "folder to write predicted masks to, as PNG of class numbers", read=path),
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
            Flag("--out", "new folder for weights, graph, facts and a script that predicts", read=path),
            Flag("--hub", "new folder in the layout of the Hugging Face hub", read=path),
            switch("--onnx", "write an ONNX graph, too"),
            choice("--weights", "by default those that predict uses", "averaged", "last"),
            switch("--weights-only", "write no graph, of a model that cannot be traced"),
            _CHECKPOINT,
        ),
        ("export RUN --out exported --onnx", "export RUN --checkpoint last --out exported --hub my-model"),
        min_words=1,
        max_words=1,
        imports_torch=True,
    ),
    "compare": Command(
        "RUN|FOLDER...",
        "rank runs and draw their curves",
        "compare_command.compare",
        (
            Flag("--metric", "figure to rank by, such as val.accuracy", default="auto"),
            choice("--mode", "which way the figure is better", "auto", "max", "min", default="auto"),
            Flag("--target", "metric to reach, such as accuracy=0.9: which variant comes there first"),
            Flag("--out", "page (.html) to write", read=path),
        ),
        ("compare RUN RUN --metric val.accuracy --out both.html",),
        min_words=1,
    ),
    "pack": Command(
        "SRC DST",
        "turn images or text into memory-mapped files to train from",
        "pack_command.pack",
        (
            Flag("--size", "of images: pixels of the shorter side, such as 256; or keep", read=pixels),
            switch("--jpeg", "of images: keep the bytes of the files instead of their pixels"),
            choice("--on-corrupt", "of images that cannot be read", "error", "skip"),
            Flag("--tokenizer", "of text: characters, words, a tokenizer.json, or a name on the hub"),
            choice("--documents", "of text", "none", "lines", "paragraphs"),
            Flag("--workers", "processes that convert; default: one for each core", read=number(1)),
            switch("--verify", "check every byte of a pack, and its source: ptfast pack --verify DST"),
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
            "find lr +recipe=resnet_digits",
            "find batch +recipe=resnet_cifar --write mine.yaml",
            "find workers +recipe=resnet_cifar --seconds 3",
            "find lr --help",
        ),
        kinds=_FIND,
        alone=True,
    ),
    "ablate": Command(
        _RUN,
        "measure what each technique is worth here; write the best recipe",
        "config_commands.ablate",
        (
            Flag("--budget", "time to measure for, 4m by default", read=seconds, default=240.0),
            Flag("--only", "techniques to measure, by name: NAME,NAME"),
            switch("--compile", "also try compiling, which takes long to begin"),
            switch("--claims", "compare what guides and papers promise with this machine"),
            _FOLDER,
        ),
        (
            "ablate +recipe=resnet_cifar --budget 10m",
            "ablate +recipe=resnet_cifar --only 'fused optimizer step,channels last'",
            "ablate --claims",
        ),
        alone=True,
    ),
    "audit": Command(
        _RUN,
        "find what costs speed in the model, data, loop and machine",
        "config_commands.audit",
        (
            Flag("--budget", "time to measure for, 2m by default; 0 for no prices", None, _budget, 120.0),
            Flag("--fix", "recipe to write with the overrides that mend findings", read=path),
            switch("--strict", "exit with 8 where something is found"),
            _FOLDER,
        ),
        ("audit +recipe=resnet_cifar --fix mended.yaml", "audit +recipe=resnet_cifar --strict"),
        alone=True,
    ),
    "race": Command(
        "[+recipe=NAME] key=a,b --target METRIC=VALUE",
        "train variants with the same seeds: which reaches a target first",
        "config_commands.race",
        (
            Flag("--target", "metric to reach and its value, such as accuracy=0.9"),
            Flag("--seeds", "runs of each variant, each with its own seed", read=number(1), default=5),
        ),
        ("race +recipe=resnet_digits schedule=onecycle,constant --target accuracy=0.95",),
        alone=True,
    ),
    "chaos": Command(
        _RUN,
        "kill a run again and again: does it end with the same bits",
        "config_commands.chaos",
        (
            Flag("--kills", "SIGKILLs in all; default 20", "num_kills", number(1), 20),
            Flag("--mtbf", "mean time of training from kill to kill, such as 60s", "mtbf_s", seconds),
            Flag("--seed", "of the plan; default 0", read=int, default=0),
            _FOLDER,
        ),
        ("chaos +recipe=resnet_digits", "chaos +recipe=resnet_digits --mtbf 60s --seed 1"),
        alone=True,
    ),
    "doctor": Command(
        "",
        "look at this machine: what is missing, slow or in the way, and the remedy",
        "doctor_command.doctor",
        max_words=0,
        imports_torch=True,
    ),
    "recipes": Command(
        "",
        "list the recipes and what each reaches",
        "listing_commands.recipes",
        examples=("recipes",),
        max_words=0,
    ),
    "techniques": Command(
        "[NAME]",
        "list what makes training faster, and whether it applies here",
        "listing_commands.techniques",
        examples=("techniques", "techniques precision", "techniques fused optimizer step"),
    ),
    "copy": Command("NAME FILE", "copy a recipe to edit", "listing_commands.copy", max_words=2, min_words=1),
    "schema": Command(
        "",
        "print a JSON Schema of recipe files, for editors",
        "listing_commands.schema",
        (Flag("--out", "file to write", read=path),),
        max_words=0,
    ),
    "completion": Command(
        "bash|zsh|fish", "print a shell completion script", "completion_command.completion", max_words=1
    ),
}
