"""Predict with a trained model: a JSON record for each of the user's inputs, or the text after a prompt."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ptfast.cli.arguments import write_out
from ptfast.core.errors import COMMAND_LINE, EXIT_OK, ConfigError, DataError, cannot_write
from ptfast.core.run_directory import plain_json
from ptfast.core.units import labelled
from ptfast.data.decoding.text_tokenizer import tokenizer_of
from ptfast.models.transformers import HfModel
from ptfast.report.terminal.display import is_terminal, say, standard_output
from ptfast.tasks.semantic_segmentation import mask_picture
from ptfast.training.saved_model import predictions, saved_run
from ptfast.training.stages.partial_run import PartialRun
from ptfast.training.user_code import naming_user_code


def predict(args: Namespace) -> int:
    path, *words = args.words
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    paths = [word for word in words if word not in overrides]
    flags = {"num_new": "--max-new-tokens", "temperature": "--temperature", "top_k": "--top-k"}
    sampling = {name: value for name in flags if (value := getattr(args, name)) is not None}
    if args.prompt is None and sampling:
        name, value = next(iter(sampling.items()))
        hint = "Add --prompt TEXT"
        raise ConfigError("C011", "is for --prompt", key=flags[name], value=value, suggestion=hint)
    if args.prompt is None and not paths:
        hint = "Usage: ptfast predict RUN PATH...|--prompt TEXT"
        raise ConfigError("C016", "an argument is missing", key="predict", suggestion=hint)
    if args.prompt is not None and paths:
        raise ConfigError("C011", "cannot be combined with --prompt", key=paths[0], suggestion="Give one")
    with saved_run(Path(path), overrides, checkpoint=args.checkpoint) as saved:
        if saved.ema is not None:
            saved.ema.copy_to_model()
        if args.prompt is not None:
            continue_prompt(saved, args.prompt, args.out, **sampling)
        else:
            predict_files(saved, paths, args.out, args.masks)
    return EXIT_OK


def predict_files(saved: PartialRun, paths: list[str], out: Path | None, masks: Path | None) -> None:
    """Write one record per input, with its source and the prediction; in plain words on a terminal.

    Args:
        paths: image files or folders of them, `.npy`/`.npz` arrays, or text files with one input per line.
        masks: folder for predicted masks; the records then name their files.

    Images that cannot be read are skipped with a warning, unless all of them fail.
    """
    lines: list[str] = []
    unreadable: list[DataError] = []

    def skip(error: DataError) -> None:
        unreadable.append(error)
        print(f"ptfast: warning: {error}", file=sys.stderr)

    def note(text: str) -> None:
        print(f"ptfast: {text}", file=sys.stderr)

    num_predicted = 0
    for source, record in predictions(saved, paths, skip=skip, note=note):
        num_predicted += 1
        if masks is not None:
            record["mask"] = _write_mask(masks, source, record)
        line = json.dumps(plain_json({"input": source, **record}), allow_nan=False)
        if out is not None:
            lines.append(line)
        elif is_terminal(standard_output()):
            # The likeliest classes with their probabilities, or every entry by name.
            if isinstance(top := record.get("top"), dict):
                shown = ", ".join(f"{name} {share:.1%}" for name, share in top.items())
            else:
                named = {k: v for k, v in record.items() if k != "mask" or isinstance(v, str)}
                shown = "  ".join(labelled(name, value) for name, value in named.items())
            say(f"{source}: {shown}")
        else:
            print(line, flush=True)
    if unreadable and not num_predicted:
        raise unreadable[0]
    if out is not None:
        write_out(out, "".join(line + "\n" for line in lines))
        print(f"wrote {len(lines):,} predictions to {out}", file=sys.stderr)


def _write_mask(folder: Path, source: str, record: Mapping[str, Any]) -> str:
    """Write a record's mask, and return its file name."""
    if "mask" not in record:
        raise ConfigError("C011", "this run predicts no masks", key="--masks", place=COMMAND_LINE)
    path = Path(source)
    name = path.stem if path.is_file() else path.name
    # Files with the same name in several folders keep their folders.
    file = folder / Path(*(part for part in path.parent.parts if part not in ("/", ".."))) / f"{name}.png"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        mask_picture(record["mask"]).save(file)
    except OSError as error:
        raise cannot_write(error, str(file)) from error
    return str(file)


def continue_prompt(saved: PartialRun, prompt: str, out: Path | None, **sampling: Any) -> None:
    """Write the prompt and a language model's continuation as text; raise C011 for any other model."""
    info = saved.info
    if info.task != "language_modelling" or "tokenizer" not in info.extra:
        what = f"needs a language model of text, but this run is for {info.task} on {info.kind} data"
        hint = "Give files to predict instead"
        raise ConfigError("C011", what, key="--prompt", place=COMMAND_LINE, suggestion=hint)
    tokenizer = tokenizer_of(info)
    tokens = torch.tensor(tokenizer.encode(prompt), dtype=torch.int64, device=saved.device)
    if not len(tokens):
        raise ConfigError("C005", "contains no token", key="--prompt", value=prompt, place=COMMAND_LINE)
    with saved.precision.autocast, naming_user_code(saved):
        drawn = generate(
            saved.model,
            tokens,
            vocab_size=len(tokenizer),
            context_length=info.context_length or len(tokens),
            seed=saved.config.seed,
            **sampling,
        )
    text = tokenizer.decode(drawn.tolist())
    if out is None:
        print(text)
    else:
        write_out(out, text + "\n")
        print(f"wrote {len(drawn) - len(tokens):,} tokens after the prompt to {out}", file=sys.stderr)


@torch.inference_mode()
def generate(
    model: nn.Module,
    tokens: Tensor,
    *,
    vocab_size: int,
    context_length: int,
    num_new: int = 100,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue `tokens` with tokens drawn from the model.

    Models of the transformers library use their own `generate`, which caches attention and stops at their
    end token. Any other model reads the last `context_length` tokens again for each new token.

    Args:
        model: maps tokens (batch, length) to next-token logits (batch, length, classes), in eval mode.
        tokens: tokens of the prompt, (length,), on the device of the model.
        vocab_size: number of tokens to sample from; the model may have more logits.
        num_new: maximum number of new tokens; C005 if a transformers model has fewer positions.
        temperature: above 0; logits are divided by it.
        top_k: draw from this many of the likeliest tokens; None for all.
        seed: seed of the draws; devices agree up to rounding.

    Returns prompt and new tokens, (length + new,).
    """
    if isinstance(model, HfModel):
        theirs: Any = model.model
        places = getattr(theirs.config, "max_position_embeddings", None)
        if places is not None and len(tokens) + num_new > places:
            what = f"with {len(tokens)} tokens of prompt, this exceeds the model's context of {places} tokens"
            raise ConfigError("C005", what, key="--max-new-tokens", value=num_new)
        unknown = list(range(vocab_size, getattr(theirs.config, "vocab_size", vocab_size)))
        # `generate` draws from torch's global generators.
        with torch.random.fork_rng(devices=[tokens.device] if tokens.device.type == "cuda" else []):
            torch.manual_seed(seed)
            return theirs.generate(
                tokens[None],
                attention_mask=torch.ones_like(tokens)[None],
                max_new_tokens=num_new,
                do_sample=True,
                temperature=temperature,
                top_k=top_k or 0,
                suppress_tokens=unknown or None,
            )[0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_new):
        logits = model(tokens[None, -context_length:])[0, -1, :vocab_size].float() / temperature
        if top_k is not None:
            least = logits.topk(min(top_k, len(logits))).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        drawn = torch.multinomial(logits.softmax(0).cpu(), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens.device)])
    return tokens
