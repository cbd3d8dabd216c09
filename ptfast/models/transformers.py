"""Models of Hugging Face transformers by name; needs the package transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ptfast.core.errors import ConfigError, MachineError, did_you_mean, import_extra
from ptfast.core.machine import network_error
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
"""The family of transformers classes with the head that a task needs."""


class HfModel(nn.Module):
    """Gives a transformers model the one-tensor interface of every other model here.

    Images go in as `pixel_values`, all else as `input_ids`, of which padding (`pad_id`) is masked.
    """

    def __init__(self, model: nn.Module, kind: str = "text", pad_id: int | None = None) -> None:
        super().__init__()
        self.model, self.kind, self.pad_id = model, kind, pad_id

    def forward(self, inputs: Tensor | None = None, **keywords: Any) -> Any:
        """Map inputs to logits. Given keywords of the model instead, return what the model itself returns."""
        if inputs is None:
            return self.model(**keywords)
        if self.kind == "image":
            return self.model(pixel_values=inputs, **keywords).logits
        if self.pad_id is not None:
            keywords.setdefault("attention_mask", (inputs != self.pad_id).long())
        return self.model(input_ids=inputs, **keywords).logits


def build(
    name: str,
    task: str = "classification",
    kind: str = "text",
    num_classes: Count | None = None,
    vocab_size: Count | None = None,
    pad_id: int | None = None,
    pretrained: bool = False,
    extra: dict[str, Any] | None = None,
    **kwargs: Any,
) -> HfModel:
    """Construct a transformers model with the head that the task needs.

    Args:
        name: a model on the hub (`distilbert-base-uncased`), a folder, or a bare architecture (`distilbert`),
            whose sizes then are keywords here.
        task: chooses the head, filled from the data.
        kind: kind of the data, filled from the data.
        num_classes: outputs, filled from the data.
        vocab_size: number of token ids, filled from the data; a model whose own is larger keeps it.
        pad_id: token id of padding, filled from the data.
        pretrained: start from the published weights, with a fresh head.
        extra: how the data was read, filled from the data: published weights know one tokenizer's numbers.
        kwargs: fields of the model's config, such as `num_hidden_layers`.

    Raises:
        MachineError: transformers is not installed (E004), or the model cannot be fetched (E005).
        ConfigError: a field that the model's config does not have (C002), a task without a head or, with
            published weights, the tokenizer of another model (C011).
    """
    tokenizer = (extra or {}).get("tokenizer")
    used = str(tokenizer.get("source", tokenizer["kind"])) if tokenizer else name
    # A user's own `tokenizer.json` is trusted to be that of the model.
    if pretrained and used != name and not used.endswith(".json"):
        own = f"{name}/tokenizer.json" if Path(name).is_dir() else name
        what = f"the weights of {name} know only the tokens of its own tokenizer"
        hint = f"Set data.tokenizer={own}"
        raise ConfigError("C011", what, key="data.tokenizer", value=used, suggestion=hint)
    transformers = import_extra("transformers", "hf", "model")
    if task not in HEADS:
        raise ConfigError("C011", f"there is no head for the task `{task}`", key="model.name", value=name)
    image = kind == "image" and task != "language_modelling"
    head = getattr(transformers, "AutoModelForImageClassification" if image else HEADS[task])
    try:
        known = name in transformers.CONFIG_MAPPING
        make = transformers.AutoConfig.for_model if known else transformers.AutoConfig.from_pretrained
        config: Any = make(name)
    except (OSError, ValueError) as error:
        raise _unreachable(name, error) from error
    facts = {"num_labels": num_classes, "pad_token_id": pad_id}
    if vocab_size is not None and vocab_size > getattr(config, "vocab_size", vocab_size):
        facts["vocab_size"] = vocab_size
    if task == "language_modelling":
        facts.pop("num_labels")
    for key, value in {**{k: v for k, v in facts.items() if v is not None}, **kwargs}.items():
        if key in kwargs and not hasattr(config, key):
            hint = did_you_mean(key, [*Model.model_fields, *keywords(build), *config.to_dict()], "model.{}")
            what = f"the config of {name} has no such field"
            raise ConfigError("C002", what, key=f"model.{key}", value=value, suggestion=hint)
        setattr(config, key, value)
    if pretrained:
        try:
            model = head.from_pretrained(name, config=config, ignore_mismatched_sizes=True)
        except OSError as error:
            if network_error(error):
                raise
            raise _unreachable(name, error) from error
    else:
        model = head.from_config(config)
    return HfModel(model, kind, pad_id)


def _unreachable(name: str, error: Exception) -> MachineError:
    what = f"the model cannot be fetched ({str(error).splitlines()[0]})"
    hint = "Check the name, or give a folder that holds the model"
    return MachineError("E005", what, key="model.name", value=name, suggestion=hint)
