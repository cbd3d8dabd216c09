"""Export a trained model: weights, a graph from raw inputs to logits, and a script; check, then write."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ptfast.core.errors import (
    ConfigError,
    NumericsError,
    PtfastError,
    described,
    import_extra,
    shorten,
    summary_of,
)
from ptfast.core.protocols import PackedTokens
from ptfast.core.run_directory import CONFIG, plain_json, versions
from ptfast.core.tensors.checkpoint_files import (
    EXPORT_FORMAT,
    WEIGHTS,
    CheckpointContent,
    write_manifest,
    writing,
)
from ptfast.core.tensors.checkpoint_folders import config_of
from ptfast.core.tensors.dtensors import write_tensors
from ptfast.data.loaders.pipeline import Prepare
from ptfast.data.sampling.sampler import MicroBatchIndices
from ptfast.data.streams.iterable import IterableSource
from ptfast.data.transforms.augment_plan import Augment
from ptfast.models.lora import merged
from ptfast.profiling.first_outputs import unsteadiness
from ptfast.tasks.supervised import output_of
from ptfast.training.evaluate import with_tta
from ptfast.training.exports.hub_layout import model_card, write_hub
from ptfast.training.exports.load_script import load_script
from ptfast.training.stages.data_stage import load_data, loader_options
from ptfast.training.stages.model_stage import build_plain_model
from ptfast.training.stages.partial_run import PartialRun

GRAPH, ONNX = "model.pt2", "model.onnx"
LIMIT = 1e-4
"""Largest accepted difference of an export's logits from the model's, relative to the largest logit, or to 1
if that is larger."""
NUM_SAMPLES = 8
UNWRITTEN = "No file is written; export without it"


class RawModel(nn.Module):
    """A model of raw inputs that normalizes them like the loaders and returns a tensor of logits.

    Args:
        model: takes prepared inputs and returns logits, or a mapping or object that contains them.
        statistics: `mean` and `std` of raw inputs; None for inputs that are not normalized.
        images: raw inputs are uint8 (batch, height, width, channels).
    """

    mean: Tensor
    factor: Tensor

    def __init__(self, model: nn.Module, statistics: Mapping[str, Any] | None, *, images: bool) -> None:
        super().__init__()
        self.model, self.images, self.normalizes = model, images, statistics is not None
        shape = (1, -1, 1, 1) if images else (1, -1)
        mean, std = (torch.tensor((statistics or {}).get(k, [1.0])).double() for k in ("mean", "std"))
        self.register_buffer("mean", mean.float().reshape(shape), persistent=False)
        self.register_buffer("factor", (1 / std).float().reshape(shape), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.images:
            inputs = inputs.permute(0, 3, 1, 2)
        if self.normalizes:
            inputs = (inputs.float() - self.mean) * self.factor
        outputs = output_of(self.model(inputs.contiguous()))
        if not isinstance(outputs, Tensor):
            raise TypeError(f"it returns {described(outputs)}, but a Tensor of logits is expected")
        return outputs


def export_run(
    saved: PartialRun,
    out: Path,
    *,
    hub: Path | None = None,
    weights: str | None = None,
    onnx: bool = False,
    graph: bool = True,
) -> dict[str, float]:
    """Write a trained model into `out`, for use without ptfast, and into `hub`, in the hub libraries' layout.

    Each form is read back and compared with the model on held-out samples before its folder is named `out` or
    `hub`. Returns the largest difference of logits, in the unit of `LIMIT`, by file.

    Args:
        saved: from `load_saved`, on the CPU and in float32.
        out: a folder that must not exist yet; the same is true for `hub`.
        weights: `averaged` or `last`; None for the weights that `predict` uses.
        graph: False writes only weights and facts, needs no data, and suits models that cannot be traced.

    Raises:
        ConfigError: C011 for a folder that exists, inputs that are not tensors, or missing averaged weights;
            C017 for a model that cannot be traced.
        NumericsError: N003 if the outputs of a form differ from the model's; then no form is written.
        MachineError: E001 or E002 if it cannot be written, E004 without the extra `onnx`.
    """
    _check_free({"--out": out, "--hub": hub})
    for module in ("onnxscript", "onnxruntime") if onnx else ():
        import_extra(module, "onnx", "--onnx")
    weights = _choose_weights(saved, weights)
    known = _KnownOutputs(saved, graph=graph)
    state, checkpoint = saved.state, saved.checkpoint
    assert state is not None
    assert checkpoint is not None
    facts = {**state.facts, "stream": None}
    facts["export"] = {"weights": weights, "versions": versions(), "checkpoint": checkpoint.label}
    with _drafted(out) as draft:
        plain = _write_weights(saved, draft, facts)
        model = known.from_raw(plain.model)
        known.compare(WEIGHTS, model)
        if graph:
            program = _trace(model, known.raw, len(known.free_sizes), saved.config.model.target.path)
            with (draft / GRAPH).open("wb") as file:
                torch.export.save(program, file)
            known.compare(GRAPH, torch.export.load(draft / GRAPH).module())
            if onnx:
                with _naming("--onnx"):
                    known.compare(ONNX, _write_onnx(program, draft / ONNX))
            facts["export"] |= known.facts()
            (draft / "load.py").write_text(load_script(saved.info, facts["export"]["input"]), "utf-8")
        shutil.copy(config_of(checkpoint.folder), draft / CONFIG)
        write_manifest(draft, saved.progress.step, plain_json(facts), EXPORT_FORMAT)
        if hub is not None:
            with _naming("--hub"), _drafted(hub) as folder:
                if load := write_hub(folder, plain):
                    known.compare("--hub", known.from_raw(load()))
                else:
                    shutil.copytree(draft, folder, dirs_exist_ok=True)
                card = model_card(plain, weights, state.facts["figures"], graph=graph)
                (folder / "README.md").write_text(card, "utf-8")
    return known.differences


def _check_free(folders: Mapping[str, Path | None]) -> None:
    for flag, folder in folders.items():
        if folder is not None and (folder.exists() or folder.is_symlink()):
            hint = "Choose another folder, or remove it"
            raise ConfigError("C011", "exists already", key=flag, value=folder, suggestion=hint)


def _choose_weights(saved: PartialRun, weights: str | None) -> str:
    """Return which weights to export, and put averaged ones into the model."""
    has_average = saved.ema is not None and saved.ema.ready
    if weights == "averaged" and not has_average:
        what, hint = "this checkpoint has no averaged weights", "Use --weights last"
        raise ConfigError("C011", what, key="--weights", value=weights, suggestion=hint)
    weights = weights or ("averaged" if has_average else "last")
    if saved.ema is not None and weights == "averaged":
        saved.ema.copy_to_model()
    return weights


def _write_weights(saved: PartialRun, folder: Path, facts: dict[str, Any]) -> PartialRun:
    """Write the weights, and return a run whose model has read them back."""
    # Shared weights are written once per layer: the format rejects memory that overlaps.
    tensors = {name: value.detach().clone() for name, value in saved.model.state_dict().items()}
    if saved.choices.get("LoRA"):
        tensors = merged(saved.model, tensors)
    write_tensors(folder / WEIGHTS, tensors)
    plain = copy.copy(saved)
    plain.state = CheckpointContent(tensors, {}, facts)
    build_plain_model(plain)
    plain.model.load_state_dict(load_file(folder / WEIGHTS))
    return plain


class _KnownOutputs:
    """The outputs of a trained model on held-out inputs, to compare each exported form with.

    Without a graph there are no inputs, and nothing is compared.
    """

    def __init__(self, saved: PartialRun, *, graph: bool) -> None:
        self._saved, self.differences = saved, dict[str, float]()
        self.raw, self._images = _held_out(saved) if graph else (torch.empty(0), False)
        self._prepare = prepare = Prepare(loader_options(saved), saved.info, images=self._images)
        self.free_sizes = ["batch", "tokens"] if saved.info.kind in ("text", "tokens") else ["batch"]
        self._batches = [self.raw, self.raw[:1]] if graph else []
        predictor = RawModel(with_tta(saved), None, images=False).eval()
        with torch.inference_mode():
            self._outputs = [predictor(prepare.inputs(batch.clone())) for batch in self._batches]
            for logits in self._outputs[:1]:
                inputs = (prepare.inputs(self.raw.clone()),), {}
                if (found := unsteadiness(predictor, saved.model, inputs, logits)) is not None:
                    what, hint = found
                    hint += ", or add --weights-only"
                    key, path = "model._target_", saved.config.model.target.path
                    raise NumericsError("N003", what, key=key, value=path, suggestion=hint)

    def from_raw(self, model: nn.Module) -> RawModel:
        """Return `model` as a model of raw inputs."""
        augmented = with_tta(self._saved, model)
        return RawModel(augmented, self._prepare.statistics, images=self._images).eval()

    def compare(self, name: str, model: Callable[[Tensor], Tensor]) -> None:
        """Compare the form `name` with the model; raises N003 if its outputs differ."""
        if not self._batches:
            return
        with torch.inference_mode():
            found = max(
                _difference(model(batch.clone()), logits)
                for batch, logits in zip(self._batches, self._outputs, strict=True)
            )
        if not found <= LIMIT:
            what = f"its logits differ from the model's by {found:.2g} of the largest, more than {LIMIT:g}"
            raise NumericsError("N003", what, key=name, suggestion=UNWRITTEN)
        self.differences[name] = found

    def facts(self) -> dict[str, Any]:
        """Describe the graph's inputs and outputs, with names for dynamic sizes."""
        raw, logits, sizes = self.raw, self._outputs[0], self.free_sizes
        given = {
            "dtype": str(raw.dtype).removeprefix("torch."),
            "shape": [*sizes, *raw.shape[len(sizes) :]],
            "resize_and_crop": raw.shape[1] if self._images and raw.shape[1] == raw.shape[2] else None,
            "normalized_in_graph": self._prepare.statistics,
        }
        free = sizes if logits.shape[: len(sizes)] == raw.shape[: len(sizes)] else sizes[:1]
        shape = [*free, *logits.shape[len(free) :]]
        return {"input": given, "logits": shape, "samples": len(raw), "differences": self.differences}


@contextlib.contextmanager
def _naming(flag: str) -> Iterator[None]:
    """Report errors of other libraries inside this block as C017 of `flag`."""
    try:
        yield
    except (PtfastError, OSError):
        raise
    except Exception as error:
        what = f"fails: {summary_of(error)}"
        raise ConfigError("C017", what, key=flag, suggestion=UNWRITTEN) from error


def _held_out(saved: PartialRun) -> tuple[Tensor, bool]:
    """Return held-out inputs as stored, or training inputs if there are none; and whether they are images."""
    data = load_data(saved.config, trained=saved.info)
    source = data.val or data.test or data.train
    if isinstance(source, IterableSource):
        batch = source.batch([source.first[0]] * 2, MicroBatchIndices(0, np.zeros(2, np.int64), 2), Augment())
    else:
        batch = source.fetch(np.arange(min(NUM_SAMPLES, len(source))))
    inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
    inputs = inputs.tokens if isinstance(inputs, PackedTokens) else inputs
    if not isinstance(inputs, Tensor):
        what = f"a graph has one tensor for its input, but this data gives {described(inputs)}"
        raise ConfigError("C011", what, key="data", value=saved.config.data.target.path)
    return inputs, source.images


def _trace(model: RawModel, raw: Tensor, num_free: int, path: str) -> torch.export.ExportedProgram:
    """Trace the graph of `model`, of class `path`, for inputs whose first `num_free` sizes are dynamic."""
    sizes = dict.fromkeys(range(num_free), torch.export.Dim.DYNAMIC)
    # A batch of one would be traced as a constant size.
    several = raw if len(raw) > 1 else torch.cat([raw, raw])
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.export.export(model, (several,), dynamic_shapes=(sizes,))
    except Exception as error:
        what = f"torch.export cannot trace it: {type(error).__name__}: {shorten(error, 200)}"
        hint = "Add --weights-only to write its weights without a graph"
        raise ConfigError("C017", what, key="model._target_", value=path, suggestion=hint) from error


def _write_onnx(program: torch.export.ExportedProgram, file: Path) -> Callable[[Tensor], Tensor]:
    """Write the ONNX graph, and return the outputs that ONNX Runtime computes from the file."""
    names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["logits"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = torch.onnx.export(program, **names, verbose=False)
    assert written is not None
    written.save(file)
    session = import_extra("onnxruntime", "onnx", "--onnx").InferenceSession(file)
    return lambda inputs: torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])


def _difference(given: Tensor, wanted: Tensor) -> float:
    if given.shape != wanted.shape:
        return float("inf")
    return float((given - wanted).abs().max() / wanted.abs().max().clamp(min=1.0))


@contextlib.contextmanager
def _drafted(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `folder` at the end, or removed after an error."""
    draft = folder.absolute().with_name(f".{folder.name}.{os.getpid()}")
    try:
        with writing(folder):
            draft.mkdir(parents=True)
            yield draft
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
