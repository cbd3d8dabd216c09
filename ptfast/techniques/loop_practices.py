"""Records of techniques without a group of their own: what a loop does right, and what regularises."""

from __future__ import annotations

from ptfast.core.sections.section import Family, Technique

TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="input normalisation",
        family="data",
        kind="training",
        on=("data.normalize=true",),
        why="With inputs of mean 0 and deviation 1, one learning rate suits all directions of the loss.",
        claim="Fewer steps to the same loss; how many depends on how far the raw inputs are from it.",
        source="LeCun, Bottou, Orr, Müller 1998, 'Efficient BackProp', section 4.3.",
        avoid="Inputs are already normalised, or their scale means something.",
        audit="Inputs whose mean is far from 0 or whose deviation is far from 1.",
        trial=("model=mlp", "model.hidden=[32]", "optimizer.lr=0.01"),
    ),
    Technique(
        name="loss over the global count of items",
        family="loop",
        kind="training",
        why="Items count equally over ragged micro-batches and ranks, so speed alone decides about both.",
        claim="Any cut of a batch gives the gradient of the whole batch, up to rounding.",
        source="Unsloth and Hugging Face, October 2024, 'Fixing Gradient Accumulation'.",
        avoid="Never.",
        audit="loss / accumulate in front of backward, over micro-batches that differ in what they count.",
    ),
    Technique(
        name="running sums on the device",
        family="loop",
        kind="exact",
        why="Reading the loss in every step makes host and device wait for each other.",
        claim="The launch time of a step is hidden; a step that does not log reads nothing from the device.",
        source="PyTorch Performance Tuning Guide, 'Avoid unnecessary CPU-GPU synchronization'.",
        avoid="Never.",
        audit=".item(), .cpu(), float(loss) or print(loss) in every step.",
    ),
    Technique(
        name="weights converted once a step",
        family="loop",
        kind="exact",
        why="Autocast forgets converted weights as it is left: kept, they serve all micro-batches of a step.",
        claim="A cast of each weight less in every micro-batch but the first; no figure for it alone.",
        source="PyTorch documentation, 'Automatic Mixed Precision package', `cache_enabled`.",
        avoid="Never.",
        audit="torch.autocast entered anew for each micro-batch of an accumulated step.",
    ),
    Technique(
        name="learning rates from a table",
        family="loop",
        kind="exact",
        why="The rates of many steps are computed at once instead of by a scheduler call in every step.",
        claim="Saves a Python call per step; no figure for it alone.",
        source="torch.optim.lr_scheduler, whose step() is that call.",
        measured="With all else that the loop saves, a step of a small MLP takes 254 us, and 667 us with a "
        "DataLoader, SGD and LambdaLR.",
        command="python scripts/bench_overhead.py --hidden 1",
        avoid="Never.",
        audit="scheduler.step() after every optimizer step of a small model.",
    ),
    Technique(
        name="label smoothing",
        kind="training",
        on=("task.label_smoothing=0.1",),
        why="Attainable targets keep the logits small, and the network generalises better at equal length.",
        claim="About 0.2 % lower error of Inception-v3 on ImageNet (Szegedy); better calibration (Müller).",
        source="Szegedy et al. 2016, arXiv:1512.00567; Müller, Kornblith, Hinton 2019, arXiv:1906.02629.",
        avoid="The logits are to teach another network, or labels are free of errors and confidence matters.",
        audit="A classification run longer than a few epochs with task.label_smoothing at 0.",
    ),
    Technique(
        name="stochastic depth",
        kind="training",
        on=("model.drop_path=0.1",),
        why="Samples skip residual branches at random, which shortens the path of gradients to early layers.",
        claim="ResNet-110 on CIFAR-10: 5.25 % test error instead of 6.41; no time less if drawn by sample.",
        source="Huang, Sun, Liu, Sedra, Weinberger 2016, arXiv:1603.09382.",
        avoid="Shallow networks and short runs, which underfit anyway.",
        audit="An overfitting residual network of 50 layers or more with model.drop_path at 0 "
        "(model.drop_path_rate in timm, model.stochastic_depth_prob in torchvision).",
        trial=("model=resnet_digits",),
    ),
)

FAMILY = Family(name="regularisation", techniques=TECHNIQUES)
