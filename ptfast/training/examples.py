"""Predict held-out samples for the report: accuracy by class, and examples."""

from __future__ import annotations

import base64
import io
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ptfast.core.errors import shorten
from ptfast.data.decoding.text_tokenizer import tokenizer_of
from ptfast.run import Run
from ptfast.tasks.semantic_segmentation import mask_picture
from ptfast.tasks.supervised import names_of_classes
from ptfast.training.evaluate import with_tta

if TYPE_CHECKING:
    from PIL.Image import Image

SHARE, MOST_S = 0.02, 30.0
"""Maximum time for predictions after the first batch: a share of the run's time so far, and seconds."""
MOST_SAMPLES, MOST_MISTAKES = 12, 8
PIXELS = 64
"""Maximum length of a picture's longer side."""


@torch.inference_mode()
def examples(run: Run) -> dict[str, Any]:
    """Return predictions for `val` or else `test`, as plain values for JSON; empty if there are none to show.

    Shows only single labels, numbers and masks, from this rank's share of the split, while time allows.

    Returns:
        `split`, `num_samples`, `classes` (rows of name, samples, hits, and the classes they were mistaken
        for, the most frequent first) and `samples` (`target`, `prediction`, `probability`, and `image` or
        `text`; for masks `pixels`, the share of correct pixels).
    """
    split = next((name for name in ("val", "test") if name in run.eval_loaders), None)
    if split is None or run.sharded:
        return {}
    seen: Counter[tuple[Any, Any]] = Counter()
    samples: list[dict[str, Any]] = []
    end_s = time.monotonic() + min(SHARE * run.clock.elapsed_s(), MOST_S)
    run.model.eval()
    average = run.ema.swapped() if run.ema is not None and run.ema.ready else nullcontext()
    model = with_tta(run)
    with average, run.precision.autocast, run.uncompiled():
        for (inputs, targets), count in run.eval_loaders[split]:
            pairs = _pairs(run, run.task.predict(model, inputs), targets)[:count]
            if not pairs:
                break
            seen.update((pair["target"], pair["prediction"]) for pair in pairs)
            if not samples:
                samples = [_shown(run, pair, inputs) for pair in _chosen(pairs)]
            if time.monotonic() > end_s or run.stop_signal is not None:
                break
    classes = _by_class(seen) if samples and "probability" in samples[0] else []
    return {"split": split, "num_samples": seen.total(), "classes": classes, "samples": samples}


def _pairs(run: Run, records: list[dict[str, Any]], targets: Tensor) -> list[dict[str, Any]]:
    """Return target and prediction of each sample of a batch; empty if they are neither values nor masks."""
    if records and "mask" in records[0]:
        masks = targets.long().cpu()
        predicted = torch.tensor([record["mask"] for record in records])
        counts = (masks >= 0) & (masks < (run.info.num_classes or 0))
        hits = ((predicted == masks) & counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)
        return [
            {"place": place, "target": None, "prediction": None, "pixels": right, "masks": (target, mask)}
            for place, (right, target, mask) in enumerate(zip(hits.tolist(), masks, predicted, strict=True))
        ]
    if targets.dim() != 1 or not records:
        return []
    rows = [*enumerate(zip(targets.tolist(), records, strict=True))]
    if "class" in records[0] and not targets.is_floating_point():
        names = names_of_classes(run.info)
        return [
            {
                "place": place,
                "target": names[value],
                "prediction": found["class"],
                "probability": found["probability"],
            }
            for place, (value, found) in rows
            if value >= 0
        ]
    if isinstance(records[0].get("value"), float):
        return [{"place": p, "target": value, "prediction": found["value"]} for p, (value, found) in rows]
    return []


def _chosen(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the most confident mistakes and least confident hits; for numbers and masks, largest errors."""
    if "pixels" in pairs[0]:
        return sorted(pairs, key=lambda pair: pair["pixels"])[:MOST_SAMPLES]
    if "probability" not in pairs[0]:
        return sorted(pairs, key=lambda pair: -abs(pair["target"] - pair["prediction"]))[:MOST_SAMPLES]
    sure = sorted(pairs, key=lambda pair: -pair["probability"])
    mistakes = [pair for pair in sure if pair["target"] != pair["prediction"]][:MOST_MISTAKES]
    hits = [pair for pair in sure if pair["target"] == pair["prediction"]]
    return mistakes + hits[::-1][: MOST_SAMPLES - len(mistakes)]


def _shown(run: Run, pair: dict[str, Any], inputs: Any) -> dict[str, Any]:
    """Return a pair with its input: an image, with its masks below, or a text; other inputs are omitted."""
    place = pair.pop("place")
    if not isinstance(inputs, Tensor):
        return pair
    sample = inputs[place]
    if run.info.kind == "image" and sample.dim() == 3 and sample.shape[0] in (1, 3):
        masks = [
            mask_picture(torch.where(mask < 0, 255, mask)).convert("RGB") for mask in pair.pop("masks", ())
        ]
        return pair | {"image": _picture(sample, masks)}
    if run.info.kind == "text" and "tokenizer" in run.info.extra:
        tokens = [token for token in sample.tolist() if token != run.info.pad_id]
        return pair | {"text": shorten(tokenizer_of(run.info).decode(tokens), 160)}
    return pair


def _picture(image: Tensor, masks: Sequence[Image]) -> str:
    """Encode `image` as a data URI, stretched to the full brightness range: PNG if small, else JPEG."""
    from PIL import Image

    low, high = image.amin(), image.amax()
    pixels = (image.float() - low) / (high - low).clamp(min=1e-9) * 255
    array = pixels.round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    kind = "PNG" if masks or max(picture.size) <= PIXELS // 2 else "JPEG"
    picture.thumbnail((PIXELS, PIXELS))
    width, height = picture.size
    column = Image.new("RGB" if masks else picture.mode, (width, (1 + len(masks)) * height))
    column.paste(picture)
    for place, mask in enumerate(masks, 1):
        column.paste(mask.resize((width, height), Image.Resampling.NEAREST), (0, place * height))
    buffer = io.BytesIO()
    column.save(buffer, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _by_class(seen: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return rows by class, the least accurate first."""
    rows = []
    for name in dict.fromkeys(target for target, _ in seen):
        counts = Counter({other: n for (target, other), n in seen.items() if target == name})
        hits = counts.pop(name, 0)
        mistaken = [{"class": other, "samples": n} for other, n in counts.most_common()]
        rows.append({"class": name, "samples": hits + counts.total(), "hits": hits, "mistaken": mistaken})
    return sorted(rows, key=lambda row: row["hits"] / row["samples"])
