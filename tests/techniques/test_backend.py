"""Process-wide switches, seeding, averaged weights, rewrites and anomaly mode."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from running import WITH_TESTS, build_run
from torch import nn

from ptfast.__main__ import WAITING, main
from ptfast.core.auto_choices import AutoChoice, AutoChoices, read_choices
from ptfast.core.errors import NumericsError
from ptfast.core.protocols import MicroBatch, StepBatch
from ptfast.core.tensors.torch_internals import set_allocator
from ptfast.profiling.debugging import debugging
from ptfast.techniques.backend import Backend, torch_settings
from ptfast.techniques.backend.torch_settings import (
    allow_cudnn_attention,
    apply_backend,
    expand_segments,
    resolve_threads,
    usable_cores,
    watch_shapes,
)
from ptfast.techniques.rewrites import Rewrites
from ptfast.techniques.rewrites.model_rewrites import apply_rewrites
from ptfast.training.fit import fit
from ptfast.training.stages import machine_stage
from ptfast.training.stages.machine_stage import build_seeder, mix, seed_everything

CPU = torch.device("cpu")


@pytest.fixture
def restore_backend():
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = False
    torch.set_flush_denormal(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def conv_net(groups: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, groups=groups), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3))


def test_ranks_share_the_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("ptfast.techniques.backend.torch_settings.usable_cores", lambda: 6)
    assert [resolve_threads(ranks) for ranks in (1, 2, 4, 12)] == [6, 3, 1, 1]


@pytest.mark.parametrize(
    ("busy", "threads", "says"),
    [
        (0.3, 4, ""),
        (1.2, 3, "others keep 1.2 of 4 cores busy"),
        (9.0, 1, "9.0"),
    ],
)
def test_threads_leave_cores_to_who_keeps_them_busy(restore_backend, monkeypatch, busy, threads, says):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch_settings, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch_settings, "others_cores", lambda ranks: busy)
    apply_backend(Backend(), device=CPU, choices=(choices := AutoChoices()))
    found = choices.made["backend.threads"]
    assert found.value == torch.get_num_threads() == threads
    assert says in found.reason
    assert bool(found.reason) == bool(says)
    # Whatever the load is by then, a resumed run keeps its number.
    monkeypatch.setattr(torch_settings, "others_cores", lambda ranks: 0.0)
    apply_backend(Backend(), device=CPU, choices=(again := AutoChoices(choices.made)))
    assert again.made["backend.threads"] == found


@pytest.mark.parametrize("own", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_spin_a_little_before_they_sleep_unless_the_user_says_how(monkeypatch, own):
    for name in ("OMP_WAIT_POLICY", *WAITING):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**own, "PTFAST_STARTED": "0"}.items():
        monkeypatch.setenv(name, value)
    seen = {}
    monkeypatch.setattr("ptfast.cli.command_line.run", lambda arguments: seen.update(os.environ) or 0)
    with pytest.raises(SystemExit):
        main()
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    names = ("OMP_WAIT_POLICY", *WAITING)
    assert {name: seen[name] for name in names if name in seen} == (own or WAITING)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_held_memory_comes_without_page_faults() -> None:
    """Blocks that glibc would trim, and one that it would map anew, in a process of its own."""
    code = """
import ctypes, resource
from ptfast.techniques.backend.torch_settings import reuse_memory
libc, sizes = ctypes.CDLL(None), [size << 20 for size in (8, 8, 8, 48)]
libc.malloc.restype = ctypes.c_void_p
def step():
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes):
        ctypes.memset(block, 1, size)
        libc.free(ctypes.c_void_p(block))
def faults():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
as_it_is = faults()
assert reuse_memory()
print(as_it_is, faults())
"""
    environment = {**os.environ, **WITH_TESTS}
    as_it_is, held = map(int, subprocess.check_output([sys.executable, "-c", code], env=environment).split())
    assert held < 100 < as_it_is


@pytest.mark.usefixtures("restore_backend")
class TestBackend:
    def test_threads_are_set_and_recorded(self):
        choices, backend = AutoChoices(), Backend(threads=2, cudnn_benchmark=True, deterministic=False)
        apply_backend(backend, device=CPU, choices=choices)
        assert torch.get_num_threads() == choices.get("backend.threads") == 2
        assert choices.get("backend.cudnn_benchmark") is False

    @pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU has no such mode")
    def test_denormals_are_flushed_on_a_cpu_as_when_the_run_began(self):
        tiny, on, off = torch.full((3,), 1e-40), Backend(), Backend(flush_denormals=False)
        for backend, device, before, flushes in (
            (on, CPU, None, True),
            (off, CPU, None, False),
            (on, CPU, {"device": "cpu"}, False),
            (off, CPU, {"device": "cpu", "backend.flush_denormals": True}, True),
            (on, CPU, {"device": "cuda"}, True),
            (on, torch.device("meta"), None, False),
        ):
            choices = AutoChoices({key: AutoChoice(key, value) for key, value in (before or {}).items()})
            apply_backend(backend, device=device, choices=choices)
            assert choices.get("backend.flush_denormals") is flushes
            assert bool((tiny * 1).any()) is not flushes

    def test_the_users_own_number_wins_but_not_torchruns(self, monkeypatch):
        monkeypatch.setattr("ptfast.techniques.backend.torch_settings.usable_cores", lambda: 6)
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert resolve_threads(1) == 3
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("RANK", "0")
        assert resolve_threads(2) == 3
        assert resolve_threads(1) == 6
        monkeypatch.setenv("PTFAST_THREADS", "2")
        assert resolve_threads(1) == 2

    def test_usable_cores_are_within_the_machine(self):
        assert 1 <= usable_cores() <= (os.cpu_count() or 1)

    def test_deterministic(self):
        apply_backend(Backend(threads=1, cudnn_benchmark=False, deterministic=True), device=CPU)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        apply_backend(Backend(threads=1, cudnn_benchmark=False, deterministic=False), device=CPU)
        assert not torch.are_deterministic_algorithms_enabled()

    @pytest.mark.parametrize(
        ("wanted", "deterministic", "device", "expected"),
        [
            ("auto", False, "cuda", True),
            (True, False, "cuda", True),
            (False, False, "cuda", False),
            ("auto", True, "cuda", False),
            ("auto", False, "cpu", False),
        ],
    )
    def test_cudnn_searches_on_a_gpu_alone(self, wanted, deterministic, device, expected):
        backend = Backend(threads=1, cudnn_benchmark=wanted, deterministic=deterministic)
        apply_backend(backend, device=torch.device(device), choices=(choices := AutoChoices()))
        assert choices.get("backend.cudnn_benchmark") is torch.backends.cudnn.benchmark is expected


def batches_of(*shapes: tuple[int, ...]) -> Iterator[StepBatch]:
    for shape in shapes:
        inputs: Any = torch.zeros(shape)
        yield StepBatch((MicroBatch((inputs, torch.zeros(1)), 1), MicroBatch({"ids": inputs}, 1)), 2)


class TestShapes:
    def test_the_search_ends_with_one_shape_too_many(self):
        events = []
        shapes = [(1, 2), (1, 2), (1, 3), (1, 2), (1, 4), (1, 5)]
        for batch in watch_shapes(batches_of(*shapes), lambda: events.append("off"), most=2):
            events.append(tuple(batch.micro_batches[0].data[0].shape))
        assert events == [*shapes[:4], "off", *shapes[4:]]

    def test_targets_do_not_count(self):
        calls = []
        batches = [StepBatch((MicroBatch((torch.zeros(2), torch.zeros(n)), 1),), 1) for n in range(1, 20)]
        assert len(list(watch_shapes(iter(batches), lambda: calls.append(1), most=1))) == 19
        assert calls == []

    def test_a_run_says_it_and_remembers(self, tmp_path, monkeypatch):
        """On a GPU; here the switch is a stand-in's."""

        def as_on_cuda(backend, **kwargs):
            apply_backend(backend, **kwargs)
            kwargs["choices"].choose("backend.cudnn_benchmark", bool(backend.cudnn_benchmark))

        monkeypatch.setattr(machine_stage, "apply_backend", as_on_cuda)
        monkeypatch.setattr(machine_stage, "MOST_SHAPES", 1)
        monkeypatch.setattr(machine_stage, "watch_shapes", partial(watch_shapes, most=1))
        words = ("model.hidden=[8]", "epochs=1", "batch_size=512", "eval.every=4steps")
        run = build_run(tmp_path, *words)
        assert run.watch_batches is not None
        notes = []
        monkeypatch.setattr(run.display, "note", notes.append)
        assert fit(run) == "finished"
        line = "backend.cudnn_benchmark=false because inputs have more than 1 shapes"
        assert notes == [f"{line}, from step 3 on"]
        assert str(read_choices(tmp_path)["backend.cudnn_benchmark"]) == line
        assert build_run(tmp_path / "off", *words, "backend.cudnn_benchmark=true").watch_batches is None

    def test_a_resumed_run_does_not_search_again(self, tmp_path, monkeypatch):
        """On a GPU; a run that comes from a CPU had not tried."""

        def as_on_cuda(backend, **kwargs):
            apply_backend(backend, **{**kwargs, "device": torch.device("cuda")})

        monkeypatch.setattr(machine_stage, "apply_backend", as_on_cuda)
        found = []
        for device in ("cuda", "cpu"):
            (tmp_path / "resolved.json").write_text(
                json.dumps({"device": device, "cudnn_benchmark": False, "world_size": 1})
            )
            found.append(
                build_run(tmp_path, "model.hidden=[8]", "steps=1").choices.get("backend.cudnn_benchmark")
            )
        assert found == [False, True]


class TestSeeding:
    def test_dropout_is_a_function_of_seed_step_and_micro_batch(self):
        seed_micro_batch = build_seeder(CPU)

        def draw(*at: int) -> tuple[float, ...]:
            seed_micro_batch(*at)
            return tuple(torch.rand(4).tolist())

        places = [(seed, step, micro) for seed in (0, 1) for step in range(20) for micro in range(4)]
        first = {place: draw(*place) for place in places}
        assert {place: draw(*place) for place in reversed(places)} == first
        assert len(set(first.values())) == len(places)

    def test_low_bits_are_mixed(self):
        low = {
            mix(seed, step, micro) & 0xFFFF_FFFF
            for seed in range(10)
            for step in range(100)
            for micro in range(10)
        }
        assert len(low) >= 9_998
        bits = [bin(mix(0, step, 0) ^ mix(0, step + 1, 0)).count("1") for step in range(1000)]
        assert 31 < sum(bits) / len(bits) < 33

    def test_any_seed_will_do(self):
        for seed in (0, -1, 2**31, 2**63, 2**64 - 1):
            build_seeder(CPU)(seed, 10**9, 7)

    def test_models_are_the_same_for_the_same_seed(self):
        weights = []
        for seed in (3, 3, 4):
            seed_everything(seed)
            weights.append(nn.Linear(3, 3).weight.detach())
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])


def channels_last(setting, model, kind, device):
    choices, rewrites = AutoChoices(), Rewrites(channels_last=setting)
    device = torch.device(device)
    apply_rewrites(model, rewrites, kind=kind, device=device, cancelled_biases=None, choices=choices)
    return choices.get("rewrites.channels_last")


class TestChannelsLast:
    def test_weights_are_stored_so(self):
        model = conv_net()
        assert channels_last(True, model, "image", "cpu")
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)

    @pytest.mark.parametrize(
        ("model", "kind", "device", "expected"),
        [
            (conv_net(), "image", "cpu", True),
            (conv_net(), "image", "cuda", True),
            (conv_net(), "image", "mps", False),
            (conv_net(), "features", "cpu", False),
            (conv_net(groups=4), "image", "cpu", False),
            (nn.Linear(2, 2), "image", "cpu", False),
        ],
    )
    def test_auto(self, model, kind, device, expected):
        assert channels_last("auto", model, kind, device) is expected

    def test_a_setting_wins(self):
        assert channels_last(True, nn.Linear(2, 2), "features", "cpu") is True
        assert channels_last(False, conv_net(), "image", "cpu") is False


@pytest.mark.parametrize(
    ("wanted", "many_lengths", "captures", "expected"),
    [
        ("auto", True, False, True),
        ("auto", True, True, False),
        ("auto", False, False, False),
        (True, False, True, True),
        (False, True, False, False),
    ],
)
def test_segments_grow_where_lengths_vary(
    monkeypatch: pytest.MonkeyPatch, wanted: Any, many_lengths: bool, captures: bool, expected: bool
) -> None:
    given: list[str] = []
    monkeypatch.setattr(torch_settings, "set_allocator", given.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    facts = {"many_lengths": many_lengths, "captures": captures}
    backend = Backend(expandable_segments=wanted)
    expand_segments(backend, torch.device("cuda"), choices := AutoChoices(), **facts)
    assert choices.get("backend.expandable_segments") is expected
    assert given == [f"expandable_segments:{expected}"]
    expand_segments(backend, CPU, choices := AutoChoices(), **facts)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    expand_segments(backend, torch.device("cuda"), choices, **facts)
    assert choices.made == {}
    assert len(given) == 1


@pytest.mark.parametrize(
    ("wanted", "many_lengths", "expected"),
    [("auto", True, False), ("auto", False, True), (True, True, True), (False, False, False)],
)
def test_cudnn_plans_no_attention_where_lengths_vary(wanted: Any, many_lengths: bool, expected: bool) -> None:
    before, backend = torch.backends.cuda.cudnn_sdp_enabled(), Backend(cudnn_attention=wanted)
    try:
        allow_cudnn_attention(backend, CPU, choices := AutoChoices(), many_lengths=many_lengths)
        assert choices.made == {}
        allow_cudnn_attention(backend, torch.device("cuda"), choices, many_lengths=many_lengths)
        given = choices.get("backend.cudnn_attention")
        assert given is torch.backends.cuda.cudnn_sdp_enabled() is expected
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.gpu("expandable segments")
@pytest.mark.parametrize("expands", [True, False])
def test_new_segments_of_a_gpu_grow(monkeypatch: pytest.MonkeyPatch, expands: bool) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = {segment["address"] for segment in torch.cuda.memory_snapshot()}
    try:
        facts = {"many_lengths": False, "captures": False}
        expand_segments(Backend(expandable_segments=expands), device, AutoChoices(), **facts)
        kept = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        made = [s for s in torch.cuda.memory_snapshot() if s["address"] not in before]
        assert [segment["is_expandable"] for segment in made] == [expands]
        del kept
    finally:
        torch.cuda.empty_cache()
        set_allocator("expandable_segments:False")


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


class TestDebug:
    @pytest.mark.filterwarnings("ignore:Error detected in BrokenBackward")
    def test_anomaly_names_the_function(self):
        def train() -> None:
            with debugging("anomaly"):
                assert torch.is_anomaly_enabled()
                Broken.apply(torch.ones(2, requires_grad=True)).sum().backward()

        with pytest.raises(NumericsError, match="BrokenBackward") as caught:
            train()
        assert caught.value.code == "N001"
        assert not torch.is_anomaly_enabled()

    def test_other_errors_pass_through(self):
        with pytest.raises(RuntimeError, match="else"), debugging("anomaly"):
            raise RuntimeError("something else")

    def test_none_is_off(self):
        with debugging("none"):
            assert not torch.is_anomaly_enabled()
