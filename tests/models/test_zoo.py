"""Models of timm, torchvision and transformers: their first step is that of plain torch, to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from running import build_run, same_bits

from ptfast.training.exports.hub_layout import write_hub
from ptfast.training.fit import fit

pytestmark = pytest.mark.slow

PLAIN = (
    *("device=cpu", "preset=plain", "data.val=0", "epochs=null", "steps=1", "batch_size=4", "seed=3"),
    *("schedule=constant", "schedule.warmup=0"),
    *("optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0", "optimizer.nesterov=false"),
    "optimizer.weight_decay=0",
)
IMAGES = ("data=arrays", "data.path=images.npz", "data.normalize=false")
TEXTS = ("data=text_tsv", "data.path=texts.tsv", "data.tokenizer=characters")
RUNNING = ("data=text_file", "data.path=running.txt", "data.context_length=16")

TIMM: dict[str, dict[str, Any]] = {
    "test_byobnet": {},
    "test_coatnet": {"img_size": 64},
    "test_convnext": {},
    "test_efficientnet": {},
    "test_mambaout": {},
    "test_maxvit": {"img_size": 64},
    "test_nfnet": {},
    "test_resnet": {},
    "test_vit": {"img_size": 64},
    "test_vit_relpos": {"img_size": 64},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4},
    "cait_xxs24_224": {"img_size": 64, "depth": 2},
    "convit_tiny": {"img_size": 64, "depth": 2, "local_up_to_layer": 1},
    "cspresnet50": {},
    "davit_tiny": {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 3, 4)},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 2},
    "densenet121": {"block_config": (2, 2, 2, 2)},
    "dla34": {},
    "edgenext_xx_small": {},
    "efficientformerv2_s0": {"img_size": 64},
    "eva02_tiny_patch14_224": {"img_size": 64, "depth": 2},
    "fastvit_t8": {},
    "focalnet_tiny_srf": {},
    "gcvit_xxtiny": {"img_size": 64},
    "ghostnet_050": {},
    "hgnetv2_b0": {},
    "hrnet_w18_small": {},
    "lcnet_050": {},
    "levit_128s": {"img_size": 64},
    "mixer_s32_224": {"img_size": 64},
    "mobilenetv3_small_050": {},
    "mobilevit_xxs": {},
    "mvitv2_tiny": {"img_size": 64},
    "pit_ti_224": {"img_size": 64},
    "poolformer_s12": {},
    "pvt_v2_b0": {},
    "regnetx_002": {},
    "repvit_m0_9": {},
    "res2net50_26w_4s": {"layers": (1, 1, 1, 1)},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "window_size": 2, "embed_dim": 24},
    "xcit_nano_12_p16_224": {"img_size": 64},
}
"""One model of each family, in sizes that train in a second; on images of 64 x 64."""
TORCHVISION: dict[str, dict[str, Any]] = {
    "alexnet": {},
    "convnext_tiny": {},
    "densenet121": {},
    "efficientnet_b0": {},
    "googlenet": {},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "resnext50_32x4d": {},
    "shufflenet_v2_x0_5": {},
    "squeezenet1_1": {},
    "swin_t": {},
    "vit_b_16": {"image_size": 64},
}
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = WIDTH | {"intermediate_size": 64}
LLAMA = BERT | {"num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
STAGES = {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert": ("texts", BERT | {"embedding_size": 16}),
    "bert": ("texts", BERT),
    "big_bird": ("texts", BERT),
    "convbert": ("texts", BERT | {"embedding_size": 32}),
    "deberta-v2": ("texts", BERT),
    "distilbert": ("texts", {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}),
    "electra": ("texts", BERT | {"embedding_size": 16}),
    "eurobert": ("texts", LLAMA),
    "fnet": ("texts", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}),
    "funnel": ("texts", {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]}),
    "gpt_neox": ("texts", BERT),
    "mobilebert": ("texts", BERT | {"embedding_size": 32, "intra_bottleneck_size": 32}),
    "modernbert": ("texts", BERT),
    "mpnet": ("texts", BERT),
    "opt": ("texts", WIDTH | {"ffn_dim": 64}),
    "qwen2": ("texts", LLAMA),
    "roberta": ("texts", BERT),
    "squeezebert": ("texts", BERT | {"embedding_size": 32}),
    "xlnet": ("texts", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "bloom": ("running", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "codegen": ("running", GPT2 | {"rotary_dim": 4}),
    "cohere": ("running", LLAMA),
    "falcon": ("running", WIDTH),
    "gemma2": ("running", LLAMA | {"head_dim": 8}),
    "gemma3_text": ("running", LLAMA | {"head_dim": 8}),
    "glm": ("running", LLAMA | {"head_dim": 8, "pad_token_id": 0}),
    "gpt2": ("running", GPT2),
    "gptj": ("running", GPT2 | {"rotary_dim": 4}),
    "granite": ("running", LLAMA),
    "llama": ("running", LLAMA),
    "mamba": ("running", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "mistral": ("running", LLAMA),
    "mixtral": ("running", LLAMA | {"num_local_experts": 2}),
    "olmo2": ("running", LLAMA),
    "phi3": ("running", LLAMA | {"pad_token_id": 0}),
    "qwen3": ("running", LLAMA),
    "smollm3": ("running", LLAMA | {"pad_token_id": 0}),
    "stablelm": ("running", LLAMA),
    "starcoder2": ("running", LLAMA),
    "beit": ("images", BERT | {"image_size": 64}),
    "convnextv2": ("images", STAGES | {"num_stages": 4}),
    "dinov2": (
        "images",
        WIDTH | {"image_size": 56},
    ),
    "mobilenet_v2": ("images", {}),
    "poolformer": ("images", STAGES),
    "regnet": ("images", STAGES),
    "resnet": ("images", STAGES),
    "segformer": ("images", STAGES | {"decoder_hidden_size": 16}),
    "swin": ("images", {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}),
    "vit": ("images", BERT | {"image_size": 64}),
}
"""By architecture: the data, and sizes of which its config derives others."""
DATA = {"texts": TEXTS, "running": RUNNING, "images": IMAGES}


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def as_words(sizes: dict[str, Any]) -> list[str]:
    return [f"model.{name}={list(v) if isinstance(v, tuple) else v}" for name, v in sizes.items()]


@pytest.fixture
def run_of(in_tmp: Path) -> Any:
    """Builds the run of some words, on data that is written once."""
    chance = np.random.default_rng(0)
    pixels = chance.integers(0, 256, (4, 64, 64, 3), np.uint8)
    np.savez(in_tmp / "images.npz", train_x=pixels, train_y=np.arange(4) % 3)
    texts = ("so good it hurts", "bad bad film", "neither this nor", "so bad, good that")
    (in_tmp / "texts.tsv").write_text("".join(f"{text}\t{i % 3}\n" for i, text in enumerate(texts)))
    (in_tmp / "running.txt").write_text("to be or not to be, that is the question. " * 20)
    return lambda *words: build_run(in_tmp / "run", *PLAIN, *words)


def first_step(run: Any) -> None:
    """Train one step, and compare all weights and buffers with a step written by hand on a copy."""
    model = copy.deepcopy(run.model)
    ((inputs, targets), *_) = next(iter(run.train_loader.steps(0, 1))).micro_batches[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.seed_step(0, 0)
    outputs = model.train()(inputs)
    loss = F.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    assert fit(run) == "finished"
    assert run.metrics["train"]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert same_bits(dict(run.model.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, run_of: Any) -> None:
    timm = pytest.importorskip("timm", reason="needs the package timm")
    run = run_of(*IMAGES, "model=timm", f"model.name={name}", *as_words(TIMM[name]))
    plain = timm.create_model(name, num_classes=3, **TIMM[name])
    assert shapes(run.model) == shapes(plain)
    first_step(run)


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str, run_of: Any) -> None:
    first_step(run_of(*IMAGES, "model=torchvision", f"model.name={name}", *as_words(TORCHVISION[name])))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name: str, run_of: Any, in_tmp: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the package transformers")
    data, sizes = TRANSFORMERS[name]
    sizes = sizes | ({} if data == "images" else {"vocab_size": 60})
    run = run_of(*DATA[data], "model=hf", f"model.name={name}", *as_words(sizes))
    head = {"texts": "SequenceClassification", "running": "CausalLM", "images": "ImageClassification"}[data]
    facts = {} if data == "running" else {"num_labels": 3}
    if run.info.pad_id is not None:
        facts["pad_token_id"] = run.info.pad_id
    config = transformers.CONFIG_MAPPING[name](**{**facts, **sizes})
    plain = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    assert shapes(run.model.model) == shapes(plain)
    first_step(run)
    load = write_hub(in_tmp / "hub", run)
    assert load is not None
    assert same_bits(dict(load().state_dict()), dict(run.model.state_dict()))
