"""Generate the script of an export: a short Python file that predicts without ptfast."""

from __future__ import annotations

import inspect
from typing import Any

from ptfast.core.protocols import DataInfo
from ptfast.data.decoding.pictures import UnknownScaleError, in_square, resize_shorter, rgb_pixels
from ptfast.data.transforms.resized_crops import resize

_PAGE = '''\
"""python load.py {usage}    needs {needs}"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
{imports}{helpers}
here = Path(__file__).parent
info = json.loads((here / "state.json").read_text())["info"]
names = info["class_names"] or [*map(str, range(info["num_classes"] or 0))]
extra = info["extra"]
model = torch.export.load(here / "model.pt2").module()
{tokenizer}

def read(word):
{read}

for word in {words}:
    with torch.inference_mode():
        logits = model(read(word)[None])[0]
    {show}
'''
_GRAY = """\
    gray = pixels.double() @ torch.tensor([0.299, 0.587, 0.114]).double()
    pixels = (gray * ({most} / 255)).round().byte()[..., None]
"""
_ROWS = """\
rows = {}
for file in sys.argv[1:]:
    with open(file, encoding="utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines, delimiter=extra["table"]["delimiter"]), 2):
            rows[f"{file}:{number}"] = {name.strip(): (text or "").strip() for name, text in row.items()}
"""
_ROW = """\
    numbers, flags, codes = [], [], []
    for column in extra["table"]["columns"]:
        text = rows[word][column["name"]]
        missing = text.lower() in extra["table"]["missing"]
        if column["kind"] == "category":
            text = "" if missing else text
            codes.append(column["values"].index(text) + 1 if text in column["values"] else 0)
            continue
        if column["kind"] == "date" and not missing:
            text = datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp() / 86_400
        elif column["comma"]:
            text = text.replace(",", "." if column["comma"] == "decimal" else "")
        numbers.append(column["fill"] if missing else float(text))
        if column["flags"]:
            flags.append(missing)
    return torch.tensor([*numbers, *flags, *codes])
"""
_SHOW = {
    "classification": "share, number = logits.softmax(-1).max(-1)\n    "
    'print(f"{word}: {names[number]} {share:.4f}")',
    "multilabel": 'print(word, [n for n, share in zip(names, logits.sigmoid()) if share > 0.5], sep=": ")',
    "token_classification": 'print(word, [names[n] for n in logits.argmax(-1)], sep=": ")',
    "semantic_segmentation": "mask = logits[: len(names)].argmax(0)\n    "
    'print(word, {n: f"{(mask == i).float().mean():.4f}" for i, n in enumerate(names)}, sep=": ")',
    "language_modelling": 'print(word, repr({next}), sep=": ")',
}


def load_script(info: DataInfo, given: dict[str, Any]) -> str:
    """Return the text of `load.py`; `given` is `export.input` of the export's facts."""
    usage, needs, imports, tokenizer = "FILE.pt...", "torch alone; each file contains a tensor", "", ""
    helpers, words = "", "sys.argv[1:]"
    read = "    return torch.load(word, weights_only=True)\n"
    entries = 'extra["tokenizer"]["entries"]'
    show = _SHOW.get(info.task, 'print(word, logits.tolist(), sep=": ")')
    if info.kind == "image" and given["dtype"] == "uint8":
        usage, needs = "PICTURE...", "torch, and Pillow to decode pictures"
        imports, functions = "from PIL import Image\n", [UnknownScaleError, rgb_pixels]
        if side := given["resize_and_crop"]:
            imports += "from torch.nn import functional as F\n"
            functions += [resize, resize_shorter, in_square]
        helpers = "".join(f"\n\n{inspect.getsource(each)}" for each in functions) + "\n"
        read = "    pixels = rgb_pixels(Image.open(word))\n"
        read += f"    pixels = in_square(pixels, {side:d})\n" if side else ""
        if given["shape"][-1] == 1:
            read += _GRAY.format(most=repr(info.extra.get("max_value", 255)))
        read += "    return pixels\n"
    elif "table" in info.extra:
        usage, needs, words, tokenizer, read = "ROWS.csv...", "torch alone", "rows", _ROWS, _ROW
        imports = "import csv\nfrom datetime import datetime, timezone\n"
    elif info.kind == "features":
        usage, needs = "1.5,2,...", "torch alone"
        read = '    return torch.tensor([float(number) for number in word.split(",")])\n'
    elif text := info.extra.get("tokenizer"):
        usage, needs, length = "TEXT...", "torch alone", info.extra.get("max_length")
        cut = f"[:{length!r}] or [{info.pad_id or 0!r}]" if length else ""
        if text["kind"] == "hub":
            needs, imports = "torch and tokenizers", "from tokenizers import Tokenizer\n"
            tokenizer = 'tokenizer = Tokenizer.from_str(extra["tokenizer"]["content"])\n'
            read = f"    return torch.tensor(tokenizer.encode(word).ids{cut})\n"
            show = show.replace("{next}", "tokenizer.decode([logits[-1].argmax().item()])")
        else:
            tokenizer = f"ids = {{entry: number for number, entry in enumerate({entries})}}\n"
            one = "ids[token]" if text["unknown_id"] is None else f"ids.get(token, {text['unknown_id']!r})"
            tokens = "word" if text["kind"] == "characters" else "word.split()"
            read = f"    return torch.tensor([{one} for token in {tokens}]{cut})\n"
            show = show.replace("{next}", f"{entries}[logits[-1].argmax()]")
    parts = {"imports": imports, "tokenizer": tokenizer, "helpers": helpers, "read": read, "show": show}
    return _PAGE.format(usage=usage, needs=needs, words=words, **parts)
