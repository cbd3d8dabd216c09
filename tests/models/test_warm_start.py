"""Warm starts: what loads, what is refused, and what each refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from running import whole_facts, write_shards, write_state
from torch import nn

from ptfast.core.distributed import Ranks
from ptfast.core.errors import SavedStateError
from ptfast.core.tensors.checkpoint_files import CheckpointContent
from ptfast.models.mlp import Mlp
from ptfast.models.resnet_cifar import ResNetCifar
from ptfast.models.warm_start import load_weights


def make_model(num_classes: int = 10, hidden: tuple[int, ...] = (8,)) -> Mlp:
    return Mlp((4,), num_classes, hidden=hidden)


def same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def save(content: object, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_marks_of_wrappers_in_names_do_not_matter(tmp_path: Path, prefix: str) -> None:
    saved, model = make_model(), make_model()
    path = save({prefix + name: value for name, value in saved.state_dict().items()}, tmp_path / "w.pt")
    notes = load_weights(model, str(path))
    assert same(saved, model)
    assert notes == [f"weights from {path}"]


def test_compiled_blocks_inside_a_model_load(tmp_path: Path) -> None:
    saved, model = ResNetCifar(10, depth=8, width=2), ResNetCifar(10, depth=8, width=2)
    weights = {name.replace("blocks.1.", "blocks.1._orig_mod."): v for name, v in saved.state_dict().items()}
    load_weights(model, save(weights, tmp_path / "w.pt"))
    assert same(saved, model)


@pytest.mark.parametrize("wrapper", ["model", "state_dict"])
def test_a_state_dict_wrapped_in_a_checkpoint_loads(tmp_path: Path, wrapper: str) -> None:
    saved, model = make_model(), make_model()
    load_weights(model, save({wrapper: saved.state_dict(), "epoch": 3}, tmp_path / "w.pt"))
    assert same(saved, model)


def test_a_run_gives_its_best_state_and_else_its_last(tmp_path: Path) -> None:
    best, last, model = make_model(), make_model(), make_model()
    save(last.state_dict(), tmp_path / "saved" / "step-2" / "model.pt")
    (tmp_path / "saved" / "last").symlink_to("step-2")
    load_weights(model, tmp_path)
    assert same(model, last)
    save(best.state_dict(), tmp_path / "saved" / "step-1" / "model.pt")
    (tmp_path / "saved" / "best").symlink_to("step-1")
    load_weights(model, tmp_path)
    assert same(model, best)
    for part in ("saved/step-2", "saved/last"):
        load_weights(model, tmp_path / part)
        assert same(model, last)


@pytest.mark.parametrize("updates", [0, 3])
@pytest.mark.parametrize("by_ranks", [False, True])
def test_averages_are_taken_once_there_are_some(tmp_path: Path, updates: int, by_ranks: bool) -> None:
    raw, averaged, model = make_model(), make_model(), make_model()
    state = CheckpointContent(
        raw.state_dict(), {"ema": {"averages": averaged.state_dict(), "updates": updates}}, whole_facts(1)
    )
    sources = [tmp_path]
    if by_ranks:
        # Who names the file of one rank means what all have written.
        folder = write_shards(tmp_path / "saved", 1, state, Ranks())
        sources.append(folder / "shard-00001-of-00001.safetensors")
    else:
        write_state(tmp_path / "saved", 1, state)
    for source in sources:
        notes = load_weights(model, source)
        assert same(model, averaged if updates else raw)
        assert notes[0].startswith("averaged weights" if updates else "weights")


def test_another_number_of_classes_is_named_and_replaced_on_request(tmp_path: Path) -> None:
    saved, model = make_model(10), make_model(3)
    fresh_head = model.layers[-1].weight.detach().clone()
    path = save(saved.state_dict(), tmp_path / "w.pt")
    with pytest.raises(
        SavedStateError, match=r"layers.3.weight is 10x8 there and 3x8 here.*replace_head=true"
    ) as caught:
        load_weights(model, path)
    assert caught.value.code == "S002"
    notes = load_weights(model, path, replace_head=True)
    assert torch.equal(model.layers[1].weight, saved.layers[1].weight)
    assert torch.equal(model.layers[-1].weight, fresh_head)
    assert notes[1:] == [
        "fresh head: layers.3.weight is 10x8 there and 3x8 here",
        "fresh head: layers.3.bias is 10 there and 3 here",
    ]


@pytest.mark.parametrize("replace_head", [False, True])
def test_another_model_is_refused_untouched(tmp_path: Path, replace_head: bool) -> None:
    path = save(make_model(hidden=(8, 8)).state_dict(), tmp_path / "w.pt")
    model = make_model(hidden=(6,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SavedStateError, match=r"layers.1.weight|not in this model") as caught:
        load_weights(model, path, replace_head=replace_head)
    assert caught.value.code == "S002"
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    middle = content.index(b"\x00\x00\x00\x40" * 8) + 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    damaged = {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "zeroed": bytes(len(content)),
        "flipped bit": flipped,
        "text": b"not a tensor file",
    }
    path.write_bytes(damaged[how])


@pytest.mark.parametrize("how", ["truncated", "empty", "zeroed", "flipped bit", "text"])
def test_damaged_files_are_refused(tmp_path: Path, how: str) -> None:
    model = make_model()
    with torch.no_grad():
        model.layers[1].weight.fill_(2.0)
    path = save(model.state_dict(), tmp_path / "w.pt")
    damage(path, how)
    with pytest.raises(SavedStateError, match="damaged") as caught:
        load_weights(model, path)
    assert caught.value.code == "S001"
    assert "\n" not in str(caught.value)


def test_pickled_objects_are_refused_and_do_not_run(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "ran",)

    path = save({"layers.1.weight": Touch()}, tmp_path / "w.pt")
    with pytest.raises(SavedStateError, match="pickled objects") as caught:
        load_weights(make_model(), path)
    assert caught.value.code == "S001"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [{"epoch": 3}, [torch.zeros(1)], torch.zeros(1)])
def test_a_file_without_named_tensors_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(SavedStateError, match="no named tensors"):
        load_weights(make_model(), save(content, tmp_path / "w.pt"))


@pytest.mark.parametrize(("name", "what"), [("gone", "no such file"), (".", "no saved weights")])
def test_nothing_there(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(SavedStateError, match=what) as caught:
        load_weights(make_model(), tmp_path / name)
    assert caught.value.code == "S004"


def test_safetensors_files_load(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the package safetensors")
    saved, model = make_model(), make_model()
    path = tmp_path / "w.safetensors"
    safetensors.save_file(saved.state_dict(), path)
    load_weights(model, path)
    assert same(saved, model)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(SavedStateError, match="damaged"):
        load_weights(model, path)
