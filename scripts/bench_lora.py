"""LoRA beside full fine-tuning: accuracy, speed, memory and checkpoint size of a small transformer on SST-2.

    python scripts/bench_lora.py --data FOLDER [--width 128] [--seeds 3]

A text encoder is trained on one half of the sentences, and fine-tuned on the other half in both ways in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

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
    command = [sys.executable, "-m", "ptfast", "train", "+recipe=text_sst2", f"data.root={folder / half}"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
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
