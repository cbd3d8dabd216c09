"""LoRA beside full fine-tuning: accuracy, speed, memory and checkpoint size of a small transformer on SST-2.

    python scripts/bench_lora.py [--data FOLDER] [--width 128] [--seeds 3]

First steps of a GPT in turn, by the time of the process on one core, so that other processes count little.
With SST-2 a text encoder is then trained on one half of the sentences, and fine-tuned on the other half in
both ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ptfast.models import Lora
from ptfast.models.gpt import Gpt
from ptfast.models.lora import add_adapters

WAYS = {"full": ("optimizer.lr=0.0003",), "LoRA": ("optimizer.lr=0.003", "model.lora.rank=8")}


def write_halves(data: Path, folder: Path) -> None:
    """The halves of the training sentences, each with the held-out files, and a tokenizer of both."""
    lines = (data / "train.tsv").read_text().splitlines()
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=8000, special_tokens=["[PAD]", "[UNK]"])
    tokenizer.train_from_iterator([line.rpartition("\t")[0] for line in lines], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, start in (("base", 0), ("new", 1)):
        (folder / name).mkdir()
        (folder / name / "train.tsv").write_text("\n".join(lines[start::2]) + "\n")
        for held_out in ("dev.tsv", "test.tsv"):
            (folder / name / held_out).write_text((data / held_out).read_text())


def train(folder: Path, half: str, run: str, *words: str) -> dict[str, float]:
    """Train in a process of its own; return its figures."""
    command = [sys.executable, "-m", "ptfast", "train", "recipe=text_sst2", f"data.root={folder / half}"]
    command += [
        f"data.tokenizer={folder / 'tokenizer.json'}",
        "eval.every=1epochs",
        f"run.dir={folder / run}",
    ]
    subprocess.run([*command, *words], check=True, capture_output=True)
    found = json.loads((folder / run / "summary.json").read_text())
    state = sum(file.stat().st_size for file in (folder / run / "saved/last").glob("*.pt"))
    speed, memory = found["train_samples_per_s"] or 0.0, found["peak_memory_bytes"] / 2**20
    return {"test": found["test"]["accuracy"], "speed": speed, "MiB": memory, "state MB": state / 1e6}


def measure_steps(rounds: int = 9) -> None:
    """Print the process time of a step of either way, its ratio, and the bytes that training adds."""
    torch.set_num_threads(1)
    tokens, times, parts = torch.randint(65, (4, 129)), {way: [] for way in WAYS}, {}
    for way in WAYS:
        model = Gpt(65, 128, width=256, depth=6, heads=8)
        if way == "LoRA":
            add_adapters(model, Lora(rank=8), trains_head=False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parts[way] = model, torch.optim.AdamW(trained, fused=True)
    for _ in range(rounds):
        for way, (model, optimizer) in parts.items():
            start = time.process_time()
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            times[way].append(time.process_time() - start)
    for way, (model, optimizer) in parts.items():
        grads = sum(p.nbytes for p in model.parameters() if p.grad is not None) / 1e6
        state = sum(value.nbytes for kept in optimizer.state.values() for value in kept.values()) / 1e6
        median = statistics.median(times[way][1:])
        print(f"{way}: {median * 1e3:.0f} ms a step, gradients {grads:.1f} MB, optimizer {state:.1f} MB")
    ratios = [lora / full for full, lora in zip(times["full"][1:], times["LoRA"][1:], strict=True)]
    print(f"LoRA / full: {statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    measure_steps()
    if given.data is None:
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_halves(given.data, folder)
        model = ("model.depth=4", f"model.width={given.width}", "dataloader=memory")
        base = train(folder, "base", "start", *model, "epochs=4", "optimizer.lr=0.001")
        print(f"base: {base['test']:.1%}", flush=True)
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for seed in range(given.seeds):
            for way, words in WAYS.items():
                start = ("epochs=2", f"seed={seed}", f"model.weights={folder / 'start'}")
                found[way].append(train(folder, "new", f"{way}-{seed}", *model, *start, *words))
                print(way, seed, {key: round(value, 3) for key, value in found[way][-1].items()}, flush=True)
        for way, runs in found.items():
            parts = {key: [run[key] for run in runs] for key in runs[0]}
            print(way, {key: (statistics.mean(part), statistics.stdev(part)) for key, part in parts.items()})


if __name__ == "__main__":
    main()
