"""How batches and numbers reach the device."""

from __future__ import annotations

from ptfast.core.sections.technique import Technique

TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="pinned memory",
        family="transfers",
        kind="exact",
        on=("dataloader.pin=true",),
        off=("dataloader.pin=false",),
        why="Only from page-locked memory does a copy run beside the kernels while the host goes on.",
        claim="Hides the copy behind the step; worth what copies take, so most for images in float32.",
        source="PyTorch tutorial 'A guide on good usage of non_blocking and pin_memory()'.",
        avoid="The host is short of memory, since pinned pages cannot be swapped out.",
        audit="A DataLoader without pin_memory, or .to(device) without non_blocking, before a GPU.",
        needs=("cuda",),
        trial=("dataloader=plain", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="transfers on a side stream",
        family="transfers",
        kind="exact",
        on=("dataloader.side_stream=true", "dataloader.pin=true"),
        off=("dataloader.side_stream=false", "dataloader.pin=false"),
        why="The next batch is copied while this one trains; on one stream they would take turns.",
        claim="Hides a copy behind the step, up to all of it; most for large inputs, such as images.",
        source="CUDA C++ Programming Guide, 'Overlap of Data Transfer and Kernel Execution'.",
        avoid="Device memory has no room for one more batch.",
        audit="Batches are moved by .to(device) at the start of the step that uses them.",
        needs=("cuda",),
        trial=("dataloader=plain", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="tensors made on the device",
        family="transfers",
        kind="exact",
        why="A tensor made on the host and moved costs an allocation, a copy and often a wait.",
        claim="One copy less for each such tensor and step, and one wait where its memory is not pinned.",
        source="PyTorch Performance Tuning Guide, 'Create tensors directly on the target device'.",
        avoid="Never.",
        audit="torch.zeros(...).to(device), torch.tensor(...).cuda() and the like in what runs every step.",
    ),
    Technique(
        name="arrays without a copy",
        family="transfers",
        kind="exact",
        why="as_tensor and from_numpy share an array's memory, where torch.tensor copies it.",
        claim="One copy of the data less in memory and in time.",
        source="PyTorch documentation of torch.from_numpy and torch.as_tensor.",
        avoid="The array is written to while the tensor is in use.",
        audit="torch.tensor(array) in a data set or in a collate function.",
    ),
)
