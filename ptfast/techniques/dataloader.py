"""How samples reach the training loop."""

from __future__ import annotations

from ptfast.techniques.record import Technique

TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="data in memory",
        family="dataloader",
        kind="exact",
        on=("dataloader=memory",),
        off=("dataloader=plain",),
        why="Samples are decoded once; a batch is then one gather instead of a read and a decode per sample.",
        claim="A step of a small MLP in 266 us against 564 us with a DataLoader over samples, here on a CPU.",
        source="Measured here, scripts/bench_overhead.py.",
        avoid="The data takes more than half of the memory that is free, or changes while training runs.",
        audit="A DataLoader over a data set whose files would fit into memory.",
        options=("dataloader/memory", "dataloader/auto"),
        alternatives="dataloader",
        trial=("model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="augmented batches from memory",
        family="dataloader",
        kind="exact",
        on=("dataloader=memory",),
        off=("dataloader=plain",),
        why="Each row of a crop is one contiguous run of bytes in a padded copy, so a batch is one gather.",
        claim="32x32 images cropped, flipped and normalised in 2.3 us each, against 170 us with "
        "torchvision on PIL images.",
        source="Measured here on one CPU core, against torchvision's v1 and v2 transforms per sample.",
        avoid="Images fill half of the memory that is free: padded and mirrored copies take twice as much.",
        audit="Random crops and flips are drawn image by image in __getitem__.",
        trial=("augment=crop_flip", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="data on the device",
        family="dataloader",
        kind="reordered",
        on=("dataloader=device",),
        off=("dataloader=plain",),
        why="The data lies where the model is, so that batches are gathered, augmented and normalised by "
        "some kernels for many steps at once, and nothing crosses the bus but the order of an epoch.",
        claim="Part of what takes CIFAR-10 to 94 % in 2.59 s on one A100; no figure for it alone.",
        source="KellerJordan/cifar10-airbench.",
        avoid="The data takes more than half of the memory that is free there, or training needs that "
        "memory; on a CPU dataloader=memory is quicker.",
        audit="A GPU that waits for a loader of images that would fit into its memory.",
        options=("dataloader/device",),
        alternatives="dataloader",
        needs=("cuda",),
        trial=("augment=crop_flip", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="data in a pack",
        family="dataloader",
        kind="exact",
        on=("dataloader=packed",),
        off=("dataloader=plain",),
        why="What was decoded once lies on disk as the model takes it, and reading it is reading memory: "
        "training starts at once, on data of any size, and no core decodes.",
        claim="JPEG files of 500x400 to random crops of 224, as bytes: 5.6x decoding them from the files, "
        "13.7x PIL with torchvision's transforms, out of a pack at a shorter side of 256.",
        source="Measured here, scripts/bench_data.py jpeg, on one core of an AMD EPYC.",
        avoid="There is no room on disk for the pixels, or the data changes often. Shrunk by --size it is "
        "other data than the files are, and has to show its accuracy.",
        audit="Files that are decoded anew in every epoch and do not fit into memory.",
        options=("dataloader/packed",),
        alternatives="dataloader",
        needs=("pack",),
        trial=("data=imagefolder", "data.root={pack}", "model=mlp", "model.hidden=[16]", "batch_size=8"),
    ),
    Technique(
        name="worker processes",
        family="dataloader",
        kind="exact",
        on=("dataloader=workers", "dataloader.workers=2"),
        off=("dataloader=plain", "dataloader.workers=auto"),
        why="Other cores read, decode and augment the next batches while this one trains.",
        claim="Up to the number of workers where decoding limits; 0.94 to 1.02x on two busy cores here.",
        source="PyTorch Performance Tuning Guide, 'Enable asynchronous data loading'; measured here.",
        avoid="No core is to spare, or samples are in memory already: then passing batches on only costs.",
        audit="num_workers=0 while the device waits for data.",
        options=("dataloader/workers", "dataloader/auto"),
        alternatives="dataloader",
        needs=("cores",),
        trial=("model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="reading ahead in a thread",
        family="dataloader",
        kind="exact",
        on=("dataloader.read_ahead=true",),
        off=("dataloader.read_ahead=false",),
        why="Decoding and gathering need no interpreter: they go on beside the training without a process.",
        claim="As much as reading takes where a core is idle; 1.00 to 1.03x here, with ResNet-20 on CIFAR-10 "
        "in JPEG files and two busy cores.",
        source="NVIDIA apex's data_prefetcher does the same on a GPU; measured here.",
        avoid="Every core is at work already, or samples are in memory.",
        audit="A CPU that reads and trains by turns while a core is idle.",
        needs=("cores",),
        trial=("dataloader=plain", "model=mlp", "model.hidden=[16]"),
    ),
    Technique(
        name="full last batch",
        family="dataloader",
        kind="training",
        on=("dataloader.last=pad",),
        off=("dataloader.last=keep",),
        why="Every step has one shape, for which kernels are searched or compiled once, and BatchNorm never "
        "sees a handful of samples.",
        claim="Saves the compilation, the capture or the search for kernels that another size would cost.",
        source="PyTorch documentation of DistributedSampler, which fills up the same way.",
        avoid="Every sample should count alike: those that an epoch begins with are seen twice in it.",
        audit="A compiled model whose last batch of an epoch is smaller than the others.",
        trial=("model=mlp", "model.hidden=[16]", "optimizer.lr=0.01"),
    ),
)
