"""Config errors as a user makes them: the command line, the files beside it, and what has to be said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

EXIT_CODES = {"C": 2, "D": 3, "E": 4, "S": 6, "P": 7}
OTHER_FILE = """\
batch_size: 8
steps: 1
data: {_target_: ptfast.data.sources.digits.Digits}
model: {_target_: MODEL}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
schedule: {_target_: ptfast.techniques.schedule.lr_schedules.Constant}
"""


@dataclass(frozen=True)
class Case:
    """One command line that is refused.

    Args:
        line: its words after `ptfast`; a text is split at blanks.
        code: the code in the message; its letter gives the exit code.
        says: texts that the line holds: the subject with its place, the suggestion.
        files: name to content, in the folder it is typed in.
        patches: import path to stand-in, for what this machine has or has not.
    """

    line: str | tuple[str, ...]
    code: str
    says: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    patches: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        return self.line.split() if isinstance(self.line, str) else list(self.line)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.code[0]]


def train(line: str, code: str, *says: str, **patches: Any) -> Case:
    """`ptfast train LINE`."""
    return Case(f"train {line}", code, says, patches=patches)


def typed(word: str, code: str, *says: str) -> Case:
    """`ptfast train WORD`, one word whatever blanks it holds."""
    return Case(("train", word), code, says)


def recipe(text: str, code: str, *says: str) -> Case:
    """`ptfast train recipe=./mine.yaml` with that text in the file."""
    return Case("train recipe=./mine.yaml", code, says, {"mine.yaml": text})


def foreign(target: str, *says: str) -> Case:
    """`ptfast train --config other.yaml`, whose model is `target`."""
    text = OTHER_FILE.replace("MODEL", f"{target}, command: touch pwned")
    subject = f"model._target_={target} (other.yaml:4): not trusted"
    return Case("train --config other.yaml", "C009", (subject, *says), {"other.yaml": text})


LR = ": unknown key. Did you mean optimizer.lr?"
STAGES = "ptfast.training.stages"
TYPED = "(command line):"
NAME = "Use letters, digits and the characters . _ - + = @"
TWICE = {
    "over its file": train("epochs=3 ++epochs=4", "C006", f"epochs {TYPED} given twice, with 3 and 4"),
    "options": train(
        "optimizer=sgd optimizer=adam", "C006", f"optimizer {TYPED} given twice, with sgd and adam"
    ),
    "recipes": train("recipe=text_sst2 recipe=char_gpt", "C006", f"recipe {TYPED} given twice"),
}

# By the number of the case in the list of bad inputs.
CASES: dict[str, Case] = {
    "1 unknown key": train("optimizer.lrr=0.1", "C002", f"optimizer.lrr=0.1 (command line){LR}"),
    "2 unknown key with +": train("+optimizer.lrr=0.1", "C002", f"optimizer.lrr=0.1 (command line){LR}"),
    "3 unknown key with ++": train("++optimizer.lrr=0.1", "C002", f"optimizer.lrr=0.1 (command line){LR}"),
    "4 recipe misspelt": train(
        "+recpie=resnet_cifar", "C002", f"recpie=resnet_cifar {TYPED}", "Did you mean recipe=resnet_cifar?"
    ),
    "5 unknown recipe": train(
        "recipe=resnet_cfar",
        "C003",
        f"recipe=resnet_cfar {TYPED}",
        "Did you mean resnet_cifar? Recipes: char_gpt, ",
    ),
    "6 unknown option": train(
        "precision=ampp", "C003", f"precision=ampp {TYPED}", "Did you mean precision=amp?"
    ),
    "7 text for a number": train("optimizer.lr=abc", "C004", f"optimizer.lr=abc {TYPED} expected a number"),
    "8 nothing for a number": train("optimizer.lr=", "C004", f"optimizer.lr= {TYPED} expected a number"),
    "8 half a number": train("optimizer.lr=1e", "C004", f"optimizer.lr=1e {TYPED} expected a number"),
    "9 nan": train("optimizer.lr=nan", "C005", f"optimizer.lr=nan {TYPED} must be a finite number"),
    "9 inf": train("optimizer.lr=inf", "C005", f"optimizer.lr=inf {TYPED} must be a finite number"),
    "9 negative": train("optimizer.lr=-1", "C005", f"optimizer.lr=-1 {TYPED} must be above 0"),
    "9 true": train("optimizer.lr=true", "C004", f"optimizer.lr=true {TYPED} expected a number, not true"),
    "10 half an epoch": train("epochs=3.5", "C004", f"epochs=3.5 {TYPED} expected a whole number"),
    "11 no epochs": train("epochs=0", "C005", f"epochs=0 {TYPED} must be at least 1"),
    "11 negative epochs": train("epochs=-1", "C005", f"epochs=-1 {TYPED} must be at least 1"),
    **{f"12 given twice: {name}": case for name, case in TWICE.items()},
    "13 colon": train("optimizer.lr:0.1", "C001", f"optimizer.lr:0.1 {TYPED}", "Write optimizer.lr=0.1"),
    "13 no value": train("optimizer.lr", "C001", f"optimizer.lr {TYPED}", "Write optimizer.lr=VALUE"),
    "14 dashes": train(
        "--optimizer.lr=0.1", "C015", f"--optimizer.lr {TYPED}", "without dashes: optimizer.lr=0.1"
    ),
    "15 batch over ranks": train(
        "parallel=ddp parallel.nproc=2 device=cpu batch_size=7",
        "C010",
        f"batch_size=7 {TYPED}",
        "2 ranks",
        "The nearest that divide are 6 and 8",
    ),
    "16 more ranks than GPUs": Case(
        "train parallel=ddp parallel.nproc=4 device=cuda",
        "C012",
        (f"parallel.nproc=4 {TYPED} more ranks than GPUs: this machine has 2", "at most parallel.nproc=2"),
        patches={"torch.cuda.device_count": lambda: 2},
    ),
    "16 no GPU": Case(
        "train device=cuda",
        "E005",
        (f"device=cuda {TYPED} no CUDA device is visible", "Use device=cpu"),
        patches={"torch.cuda.device_count": lambda: 0},
    ),
    "16 NCCL without a GPU": Case(
        "train parallel=ddp parallel.nproc=2 device=cuda",
        "E005",
        (f"device=cuda {TYPED} no CUDA device is visible", "Use device=cpu"),
        patches={"torch.cuda.device_count": lambda: 0},
    ),
    "17 fp16 on an Apple GPU": Case(
        "train precision=amp_fp16 device=mps",
        "E005",
        (f"precision=amp_fp16 {TYPED} gradient scaling runs on CUDA and on the CPU", "precision=amp."),
        patches={"torch.backends.mps.is_available": lambda: True},
    ),
    "17 TF32 on a CPU": train(
        "precision=tf32 device=cpu",
        "E005",
        f"precision=tf32 {TYPED} TF32 needs an NVIDIA GPU, and this is cpu",
        "Use precision=fp32",
    ),
    "17 TF32 on an old GPU": Case(
        "train precision=tf32 device=cuda",
        "E005",
        (f"precision=tf32 {TYPED} Tesla T4 has no TF32", "Use precision=fp32"),
        patches={
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.get_device_capability": lambda: (7, 5),
            "torch.cuda.get_device_name": lambda: "Tesla T4",
        },
    ),
    "17 bf16 on an old GPU": Case(
        "train precision=bf16_true device=cuda",
        "E005",
        (f"precision=bf16_true {TYPED} Tesla T4 has no bf16", "Use precision=amp"),
        patches={
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.is_bf16_supported": lambda including_emulation: False,
            "torch.cuda.get_device_name": lambda: "Tesla T4",
        },
    ),
    "18 no compiler": Case(
        "train compile=model device=cpu",
        "E005",
        (f"compile=model {TYPED} compiling needs a C++ compiler", "Install g++, or use compile=none"),
        patches={"shutil.which": lambda name: None},
    ),
    "18 weights out of reach": train(
        "model=custom model._target_=misfits.published model.weights=pretrained",
        "E005",
        f"model.weights=pretrained {TYPED} its weights cannot be downloaded (URLError: ",
        "no route to host",
        "set model.weights to the file",
    ),
    "18 weights of a library out of reach": train(
        "model=custom model._target_=misfits.published model.pretrained=true",
        "E005",
        f"model.pretrained=true {TYPED} its weights",
        "set model.pretrained=false for random ones",
    ),
    "19 decay": train("ema=ema ema.decay=1.5", "C005", f"ema.decay=1.5 {TYPED} must be above 0 and below 1"),
    "19 a rate that timm takes": train(
        "model=timm model.name=resnet10t model.drop_rate=1.5",
        "C005",
        f"model.drop_rate=1.5 {TYPED} must be at least 0",
    ),
    "20 warm-up in epochs": train(
        "schedule.warmup=20epochs", "C011", f"schedule.warmup=20epochs {TYPED}", "longer"
    ),
    "20 warm-up in steps": train(
        "schedule.warmup=9999", "C011", f"schedule.warmup=9999steps {TYPED}", "longer"
    ),
    "20 warm-up in percent": train(
        "schedule.warmup=150%", "C005", f"schedule.warmup=150% {TYPED}", "above 100"
    ),
    "21 milestones": train(
        "schedule=multistep schedule.milestones=[5,3]",
        "C011",
        f"schedule.milestones=[5epochs,3epochs] {TYPED} milestones must be in increasing order",
    ),
    "21 crops": train(
        "augment=resized_crop augment.crop_padding=4",
        "C011",
        "augment.resized_crop=[0.08,1.0] ",
        "contradicts augment.crop_padding=4",
    ),
    "21 crops beside their image": train(
        "augment=crop_flip augment.crop_padding=1000",
        "C011",
        f"augment.crop_padding=1000 {TYPED} hides whole images of 8x8. Use augment.crop_padding=2",
    ),
    **{
        f"17 {key} by the thousand": train(
            f"{key}=10000",
            "E005",
            f"{key}=10000 {TYPED} this machine has ",
            f" cores. Use {key}={fewer}.",
        )
        for key, fewer in (("backend.threads", "auto"), ("dataloader.workers", "auto"))
    },
    "17 a model larger than the memory": train(
        "model.hidden=[64,1000000]",
        "E002",
        f"model.hidden=[64,1000000] {TYPED} the model does not fit in memory (the memory",
        "Make it smaller.",
        **{
            "ptfast.training.stages.model_stage.memory_limit": lambda device: (
                2**20,
                "the memory that is free",
            )
        },
    ),
    "21 crops the wrong way round": train(
        "augment=resized_crop augment.resized_ratio=[2,0.5]",
        "C011",
        f"augment.resized_ratio=[2.0,0.5] {TYPED} the largest comes first. Use augment.resized_ratio=[0.5,2]",
    ),
    "21 shapes of crops the wrong way round without crops": train(
        "augment.resized_ratio=[2,1]",
        "C011",
        f"augment.resized_ratio=[2.0,1.0] {TYPED} the largest comes first. Use augment.resized_ratio=[1,2]",
    ),
    "22 a tab": recipe(
        "epochs: 1\n\tbatch_size: 4\n",
        "C007",
        "mine.yaml:2:1: a tab, where YAML takes only spaces",
        r"`\tbatch_size: 4`",
    ),
    "22 an open bracket": recipe(
        "epochs: 1\ncallbacks: [a, b\nseed: 4\n",
        "C007",
        "mine.yaml:2:12:",
        "not closed",
        "`callbacks: [a, b`",
    ),
    "23 a key twice": recipe(
        "epochs: 1\nseed: 4\nepochs: 2\n", "C007", "mine.yaml:3:1:", "`epochs` is given twice"
    ),
    "24 an empty file": recipe("", "C007", "mine.yaml: the file is empty"),
    "25 an octal that is none": recipe(
        "batch_size: 0o10\n", "C004", "batch_size=0o10 (mine.yaml:1)", "Write 8"
    ),
    "25 no for a name": recipe(
        "run: {name: no}\n", "C004", "run.name=false (mine.yaml:1)", "Put it in quotes"
    ),
    "26 a missing key": recipe(
        "seed: ${nope.key}\n", "C008", "seed=${nope.key} (mine.yaml:1): there is no key nope.key"
    ),
    "26 a cycle": recipe(
        "batch_size: ${seed}\nseed: ${batch_size}\n",
        "C008",
        "batch_size=${seed} (mine.yaml:1)",
        "refers to itself",
    ),
    "26 an empty key": recipe(
        "seed: ${..}\n", "C008", "seed=${..} (mine.yaml:1): an interpolation that cannot"
    ),
    "26 an empty key, typed": typed(
        "seed=${..}", "C008", f"seed=${{..}} {TYPED} an interpolation that cannot"
    ),
    "26 a missing key, typed": typed(
        "seed=${nope.key}", "C008", f"seed=${{nope.key}} {TYPED} there is no key nope.key"
    ),
    "27 no such variable": typed(
        "run.name=${oc.env:PTFAST_NOPE}",
        "C008",
        "the environment variable PTFAST_NOPE is not set",
        "give a default",
    ),
    "28 a resolver misspelt": typed(
        "run.name=${oc.evn:HOME}", "C008", "no interpolation oc.evn. Did you mean oc.env?"
    ),
    "29 os.system in a file": foreign("os.system"),
    "29 by an alias": foreign("torchvision.datasets.utils.os.system", "leads to os"),
    "29 torch.hub": foreign("torch.hub.load"),
    "29 a library": foreign("torch.ops.load_library"),
    "29 a package": foreign("their_models.Net", "'trust=[their_models]'"),
    "29 os.system, typed": train(
        "model._target_=os.system", "C009", f"model._target_=os.system {TYPED}", "not a torch.nn.Module"
    ),
    "29 that does not exist": train(
        "optimizer._target_=torch.optim.AdamWW", "C009", "Did you mean torch.optim.AdamW?"
    ),
    "29 of the wrong kind": train(
        "model._target_=torch.optim.SGD", "C009", f"model._target_=torch.optim.SGD {TYPED}"
    ),
    "30 a path for a name": train(
        "run.name=../../x", "C013", f"run.name=../../x {TYPED} not a safe name", NAME
    ),
    "31 a newline": typed("run.name=a\nb", "C013", r"run.name=a\nb (command line): not a safe name", NAME),
    "31 an escape code": typed(
        "run.name=a\x1b[31mb", "C013", r"run.name=a\x1b[31mb (command line): not a safe name"
    ),
    "31 300 characters": train(f"run.name={'x' * 300}", "C013", "longer than 100 characters"),
    "32 a choice of none": train(
        "-m optimizer.lr=choice()", "C014", f"optimizer.lr=choice() {TYPED}", "choice(a,b)"
    ),
    "32 a range of none": train(
        "-m seed=range(3,1)", "C014", f"seed=range(3,1) {TYPED} a sweep over no values"
    ),
    "32 a glob of none": train("-m optimizer=glob(nope*)", "C014", "a sweep over no values"),
    "32 an unknown key": train("-m optimizer.lrr=0.1,0.2", "C002", f"optimizer.lrr=0.1 (command line){LR}"),
    "32 an unknown option": train(
        "-m optimizer=sgd,nope", "C003", f"optimizer=nope {TYPED}", "Options of optimizer:"
    ),
    "32 without -m": train("seed=1,2", "C014", f"seed=1,2 {TYPED}", "Add -m to sweep"),
}
