"""Records of what keeps a network from fitting its training data too closely, so that it learns sooner."""

from __future__ import annotations

from ptfast.core.sections.technique import Technique

TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="label smoothing",
        family="regularisation",
        kind="training",
        on=("task.label_smoothing=0.1",),
        off=("task.label_smoothing=0",),
        why="Targets that a network can reach keep its logits small, and it generalises better at the same "
        "length.",
        claim="About 0.2 % lower top-1 and top-5 error of Inception-v3 on ImageNet (Szegedy et al.); "
        "better calibrated, too (Müller et al.).",
        source="Szegedy, Vanhoucke, Ioffe, Shlens, Wojna 2016, arXiv:1512.00567; Müller, Kornblith, Hinton "
        "2019, arXiv:1906.02629.",
        avoid="Where the network is to teach another one by its logits, or labels are known to be without "
        "error and its confidence matters.",
        audit="A classification run longer than a few epochs with task.label_smoothing at 0.",
    ),
    Technique(
        name="stochastic depth",
        family="regularisation",
        kind="training",
        on=("model.drop_path=0.1",),
        off=("model.drop_path=0",),
        why="Samples skip residual branches at random, so that gradients reach early layers by shorter ways.",
        claim="ResNet-110 on CIFAR-10: test error from 6.41 to 5.25 % over 500 epochs, and a quarter less"
        " training time where whole batches skip a block; drawn by sample, as ptfast does, no "
        "arithmetic is spared.",
        source="Huang, Sun, Liu, Sedra, Weinberger 2016, arXiv:1603.09382.",
        avoid="Shallow networks and short runs, which underfit anyway.",
        audit="A residual network of 50 layers or more that overfits, with model.drop_path "
        "(model.drop_path_rate in timm, model.stochastic_depth_prob in torchvision) at 0.",
        trial=("model=resnet_digits",),
    ),
)
