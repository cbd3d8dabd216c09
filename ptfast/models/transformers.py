"""Models of Hugging Face transformers by name; needs the package transformers."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ptfast.core.errors import ConfigError, MachineError, did_you_mean, import_extra, text_of
from ptfast.core.machine import network_error
from ptfast.core.plain_display import each_once
from ptfast.core.protocols import DataInfo
from ptfast.core.sections.section import Count
from ptfast.core.sections.targets import keywords
from ptfast.models import Model

HEADS = {
    "classification": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "multilabel": "AutoModelForSequenceClassification",
    "token_classification": "AutoModelForTokenClassification",
    "language_modelling": "AutoModelForCausalLM",
}
"""The transformers class that builds a model with the head of each task."""


class HfModel(nn.Module):
    """Wraps a transformers model in the one-tensor interface of the other models.

    Images are passed as `pixel_values`, other inputs as `input_ids`, with padding (`pad_id`) masked.
    """

    def __init__(self, model: nn.Module, kind: str = "text", pad_id: int | None = None) -> None:
        super().__init__()
        self.model, self.kind, self.pad_id = model, kind, pad_id

    def forward(self, inputs: Tensor | None = None, **keywords: Any) -> Any:
        """Map inputs to logits; with only keywords of the model, return the model's own output."""
        if inputs is None:
            return self.model(**keywords)
        if self.kind == "image":
            return self.model(pixel_values=inputs, **keywords).logits
        if self.pad_id is not None:
            keywords.setdefault("attention_mask", (inputs != self.pad_id).long())
        return self.model(input_ids=inputs, **keywords).logits


def build(
    name: str,
    info: DataInfo | None = None,
    num_classes: Count | None = None,
    pad_id: int | None = None,
    pretrained: bool = False,
    **kwargs: Any,
) -> HfModel:
    """Construct a transformers model with the head that the task needs.

    Args:
        name: a model on the hub (`distilbert-base-uncased`), a folder, or a bare architecture (`distilbert`),
            whose sizes are then given as keywords.
        info: facts about the data, filled in: kind and task choose the head; the vocabulary grows if the data
            has more token ids.
        num_classes: outputs, filled from the data.
        pad_id: token id of padding, filled from the data.
        pretrained: start from the published weights, with a fresh head.
        kwargs: fields of the model's config, such as `num_hidden_layers` or `vocab_size`. The config is built
            with them, so that its derived fields follow.

    Raises:
        MachineError: transformers is not installed (E004), or the model cannot be fetched (E005).
        ConfigError: a field that the model's config does not have (C002) or a value that it rejects (C005), a
            task without a head or, with published weights, the tokenizer of another model (C011).
    """
    info = info or DataInfo("text", "classification")
    if pretrained:
        _check_tokenizer(name, info)
    transformers = import_extra("transformers", "hf", "model")
    # Configs are built several times, and warn each time.
    for handler in logging.getLogger("transformers").handlers:
        handler.addFilter(each_once)
    if info.task not in HEADS:
        raise ConfigError(
            "C011", f"there is no head for the task `{info.task}`", key="model.name", value=name
        )
    image = info.kind == "image" and info.task != "language_modelling"
    head = getattr(transformers, "AutoModelForImageClassification" if image else HEADS[info.task])
    config = _config(transformers, name, info, num_classes, pad_id, kwargs)
    if not pretrained:
        return HfModel(head.from_config(config), info.kind, pad_id)
    try:
        model = head.from_pretrained(name, config=config, ignore_mismatched_sizes=True)
    except OSError as error:
        if network_error(error):
            raise
        raise _unreachable(name, error) from error
    return HfModel(model, info.kind, pad_id)


def _config(
    transformers: Any,
    name: str,
    info: DataInfo,
    num_classes: int | None,
    pad_id: int | None,
    kwargs: dict[str, Any],
) -> Any:
    """Return the config of a model, with the user's fields and those that the data determines."""
    written: dict[str, Any] = {}
    try:
        if name in transformers.CONFIG_MAPPING:
            config: Any = transformers.AutoConfig.for_model(name)
        else:
            config = transformers.AutoConfig.from_pretrained(name)
            written, _ = transformers.PretrainedConfig.get_config_dict(name)
    except (OSError, ValueError) as error:
        raise _unreachable(name, error) from error
    for key, value in kwargs.items():
        if not hasattr(config, key):
            hint = did_you_mean(key, [*Model.model_fields, *keywords(build), *config.to_dict()], "model.{}")
            what = f"the config of {name} has no such field"
            raise ConfigError("C002", what, key=f"model.{key}", value=value, suggestion=hint)
    fields = {"pad_token_id": pad_id}
    if (info.vocab_size or 0) > (getattr(config, "vocab_size", math.inf) or 0):
        fields["vocab_size"] = info.vocab_size
    if info.task != "language_modelling":
        fields["num_labels"] = num_classes
    # A config may have an alias for a size; its constructor ignores aliases when it derives other fields.
    given = {config.attribute_map.get(key, key): value for key, value in kwargs.items()}
    fields = {key: value for key, value in fields.items() if value is not None} | given
    if "num_labels" in fields:
        # These name the classes of the published head.
        written = {key: value for key, value in written.items() if key not in ("id2label", "label2id")}
    try:
        return type(config).from_dict(_merged(written, fields))
    except Exception as error:
        # The first lines only name the check that failed.
        lines = text_of(error).strip().splitlines() or [type(error).__name__]
        what = f"the config of {name} rejects this ({lines[-1].strip().rstrip('.')})"
        key = next((key for key in kwargs if key in re.findall(r"\w+", text_of(error))), "name")
        raise ConfigError("C005", what, key=f"model.{key}", value=kwargs.get(key, name)) from error


def _check_tokenizer(name: str, info: DataInfo) -> None:
    """Raise C011 unless the data was tokenized with the tokenizer of the published weights."""
    tokenizer = info.extra.get("tokenizer")
    used = str(tokenizer.get("source", tokenizer["kind"])) if tokenizer else name
    # A user's own `tokenizer.json` is assumed to be the model's.
    if used != name and not used.endswith(".json"):
        own = f"{name}/tokenizer.json" if Path(name).is_dir() else name
        what = f"the weights of {name} know only the tokens of its own tokenizer"
        hint = f"Set data.tokenizer={own}"
        raise ConfigError("C011", what, key="data.tokenizer", value=used, suggestion=hint)


def _merged(written: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return `written` updated with `fields`; a nested config is updated field by field."""
    nested = {
        key: _merged(written[key], value)
        for key, value in fields.items()
        if isinstance(value, dict) and isinstance(written.get(key), dict)
    }
    return {**written, **fields, **nested}


def _unreachable(name: str, error: Exception) -> MachineError:
    what = f"the model cannot be fetched ({str(error).splitlines()[0]})"
    hint = "Check the name, or give a folder that contains the model"
    return MachineError("E005", what, key="model.name", value=name, suggestion=hint)
