"""Write folders in the layout of the Hugging Face hub, loadable by timm, transformers or plain torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from ptfast.core.errors import one_line
from ptfast.core.units import listed
from ptfast.models.transformers import HfModel
from ptfast.training.stages.partial_run import PartialRun


def library_of(model: nn.Module) -> str:
    """Return the library in whose layout a model is written."""
    is_timm = isinstance(getattr(model, "pretrained_cfg", None), dict)
    return "transformers" if isinstance(model, HfModel) else "timm" if is_timm else "pytorch"


def write_hub(folder: Path, run: PartialRun) -> Callable[[], nn.Module] | None:
    """Write the plain model of `run` in the format of timm or transformers; None for any other model.

    Returns a function that loads it from the folder with that library.
    """
    info, model = run.info, run.model
    names, side = list(info.class_names or ()), (info.input_shape or (0,))[-1]
    statistics = info.extra.get("normalize") or {"mean": [0.0] * 3, "std": [255.0] * 3}
    # These libraries divide pixels by 255 first.
    scaled = {name: [value / 255 for value in values] for name, values in statistics.items()}
    if isinstance(model, HfModel):
        inner: Any = model.model
        import_module("transformers").utils.logging.disable_progress_bar()
        if names:
            inner.config.id2label = dict(enumerate(names))
            inner.config.label2id = {name: number for number, name in enumerate(names)}
        inner.save_pretrained(folder)
        if (tokenizer := info.extra.get("tokenizer", {})).get("kind") == "hub":
            (folder / "tokenizer.json").write_text(tokenizer["content"], "utf-8")
            (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        if info.kind == "image":
            settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side}}
            settings |= {f"image_{name}": values for name, values in scaled.items()}
            settings |= {"crop_size": side, "resample": 2}
            (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=1))
        return lambda: HfModel(type(inner).from_pretrained(folder).eval(), model.kind, model.pad_id)
    if library_of(model) != "timm":
        return None
    import timm
    from timm.models._hub import save_for_hf

    cut = {"interpolation": "bilinear", "crop_pct": 1.0, "crop_mode": "center"}
    config: Any = model.pretrained_cfg
    config.update(scaled, **cut, input_size=info.input_shape, num_classes=info.num_classes)
    if not run.config.model.weights:
        # Tag and license describe the published weights, but these differ.
        config.update(tag=None, license=None)
    given = {k: v for k, v in run.config.model.target.kwargs.items() if k not in ("name", "pretrained")}
    args = {"in_chans": info.in_channels, **given}
    save_for_hf(model, str(folder), {"label_names": names}, model_args=args, safe_serialization=True)
    return lambda: timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def model_card(run: PartialRun, weights: str, metrics: Mapping[str, dict[str, float]], *, graph: bool) -> str:
    """Write the README of a folder for the hub: the model, its metrics, and how to load it."""
    info, library = run.info, library_of(run.model)
    inner = type(getattr(run.model, "model", None)).__name__
    loading = {
        "timm": 'import timm\n\nmodel = timm.create_model("local-dir:FOLDER", pretrained=True).eval()',
        "transformers": f'from transformers import {inner}\n\nmodel = {inner}.from_pretrained("FOLDER")',
        "pytorch": 'import torch\n\nmodel = torch.export.load("FOLDER/model.pt2").module()'
        if graph
        else "from safetensors.torch import load_file\n\n"
        'model.load_state_dict(load_file("FOLDER/model.safetensors"))',
    }
    kinds = {"semantic_segmentation": "image-segmentation", "language_modelling": "text-generation"}
    kind = kinds.get(info.task, f"{info.kind}-{info.task}").replace("text-token_", "token-")
    kind = re.sub(r"[^\w-]", "", kind)
    reached = "".join(f"- {_code(split)}: {_code(listed(values))}\n" for split, values in metrics.items())
    names = ", ".join(map(_code, info.class_names or ()))
    classes = f"\nClasses, in the order of the outputs: {names}.\n"
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: {kind}\ntags: [ptfast]\n---\n"
        f"# {_code(run.config.recipe or run.config.model.target.path)}\n\n"
        f"A model for {_code(info.task.replace('_', ' '))} of {_code(info.kind)} data, trained for"
        f" {run.progress.step:,} steps ({weights} weights).\n\n{reached}\n"
        f"```python\n{loading[library]}\n```\n{classes if info.class_names else ''}"
    )


def _code(text: str) -> str:
    """Quote untrusted text of a run as Markdown code, which is shown but not interpreted."""
    return "`" + one_line(text).replace("`", "'") + "`"
