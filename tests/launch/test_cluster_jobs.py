"""What clusters are given: by golden files, by their schemas, and refusals before anything is submitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ptfast.cli import command_line

GOLDEN = Path(__file__).parent / "golden"
WORDS = ("+recipe=resnet_cifar", "optimizer.lr=0.1", "trust=[mine]", "run.dir=/shared/runs/mine")
PRINTED = {
    "slurm": "--nodes 2 --gpus H100:8 --cpus 64 --time 4h --partition gpu",
    "trainjob": "--nodes 2 --gpus 8 --cpus 64 --time 4h --image registry/ptfast:1 --storage runs",
    "sky": "--nodes 2 --gpus H100:8 --cpus 64 --storage runs",
    "ray": "--nodes 2 --gpus 8 --cpus 64",
}


def golden(engine: str) -> Path:
    (file,) = GOLDEN.glob(f"{engine}*")
    return file


@pytest.mark.parametrize("engine", PRINTED)
def test_a_printed_job_is_the_golden_one(
    engine: str, in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    assert command_line.run(["launch", engine, *WORDS, *PRINTED[engine].split(), "--print"]) == 0
    printed = capsys.readouterr().out.replace(str(in_tmp), "/shared/project")
    assert printed == golden(engine).read_text()
    assert not list(in_tmp.iterdir())


def of_type(value: Any, expected: Any) -> bool:
    """Return True if `value` has the types of a nest like it, in which keys with `?` may be left out."""
    if isinstance(expected, dict):
        known = {key.rstrip("?"): kind for key, kind in expected.items()}
        needed = {key for key in expected if not key.endswith("?")}
        return needed <= set(value) <= set(known) and all(of_type(value[k], known[k]) for k in value)
    if isinstance(expected, list):
        return isinstance(value, list) and bool(value) and all(of_type(item, expected[0]) for item in value)
    return isinstance(value, expected)


POD = {
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
    "containers": [{"name": str, "volumeMounts": [{"name": str, "mountPath": str}]}],
}
REPLICATED = [{"name": str, "template": {"spec": {"template": {"spec": POD}}}}]
TRAINJOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"generateName": str},
    "spec": {
        "runtimeRef": {"name": str},
        "activeDeadlineSeconds?": int,
        "trainer": {
            "image?": str,
            "command": [str],
            "args": [str],
            "numNodes": int,
            "numProcPerNode?": int,
            "resourcesPerNode?": {"limits?": dict, "requests?": dict},
        },
        "runtimePatches?": [
            {"manager": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": REPLICATED}}}}
        ],
    },
}
"""The part that is used of TrainJobSpec, kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go."""
SKY = {
    "name": str,
    "num_nodes": int,
    "workdir": str,
    "resources?": {"accelerators?": str, "cpus?": int, "image_id?": str},
    "volumes?": {"/storage": str},
    "setup?": str,
    "run": str,
}
"""The part that is used of the task schema, skypilot-org/skypilot, sky/utils/schemas.py."""


def test_manifests_have_the_form_that_their_clusters_read() -> None:
    assert of_type(yaml.safe_load(golden("trainjob").read_text()), TRAINJOB)
    assert of_type(yaml.safe_load(golden("sky").read_text()), SKY)
    compile(golden("ray").read_text(), "ray", "exec")
    for script in (golden("slurm").read_text(), yaml.safe_load(golden("sky").read_text())["run"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.slow
def test_packages_of_the_clusters_accept_the_manifests() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    models.TrainerV1alpha1TrainJob.from_dict(yaml.safe_load(golden("trainjob").read_text()))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("slrum", 2, "no such cluster. Did you mean slurm?"),
        ("slurm optimizer.lrr=1", 2, "optimizer.lrr=1 (command line): unknown key"),
        ("slurm --nodes 0", 2, "--nodes=0 (command line): expected a whole number above 0"),
        ("slurm --gpus H100", 2, "--gpus=H100 (command line): expected a whole number above 0"),
        ("slurm --image x", 2, "--image (command line): means nothing to slurm"),
        ("slurm --nodes 3 batch_size=64", 2, "batch_size=64"),
        ("slurm parallel=ddp parallel.nnodes=2", 2, "Use --nodes 2"),
        ("slurm --time soon", 2, "--time=soon"),
        ("sky --gpus 8", 2, "Write --gpus H100:8"),
        ("trainjob", 2, "the run's folder would be lost with the job. Give --storage VOLUME"),
        ("slurm", 4, "sbatch: not found on the path. Print the job with --print"),
        ("sky --storage runs", 4, "sky: not found on the path."),
    ],
)
def test_what_cannot_be_submitted_is_one_line(
    words: str,
    code: int,
    says: str,
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", os.fspath(in_tmp))
    assert command_line.run(["launch", *words.split()]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not list(in_tmp.iterdir())


def test_a_job_is_handed_to_the_command_of_its_cluster(
    in_tmp: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (in_tmp / "sbatch").write_text("#!/bin/sh\ncat > job; echo Submitted batch job 7; exit 3\n")
    (in_tmp / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(in_tmp), prepend=os.pathsep)
    assert command_line.run(["launch", "slurm", "device=cuda"]) == 3
    assert capfd.readouterr().out == "Submitted batch job 7\n"
    script = (in_tmp / "job").read_text()
    assert "nnodes" not in script
    assert f" device=cuda run.dir={in_tmp}/runs/train/" in script
