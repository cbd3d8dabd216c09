"""Records of what is asked of single parameters, and of what goes with the size of the batch."""

from __future__ import annotations

from functools import partial

from ptfast.core.sections.technique import Family, Technique

_groups = partial(Technique, kind="training")

TECHNIQUES: tuple[Technique, ...] = (
    _groups(
        name="no decay on norms and biases",
        on=("optimizer.decay_1d=false",),
        why="Weight decay is meant for matrices; decaying the few scales and biases only costs accuracy.",
        claim="Part of the recipes that train ResNet-50 on ImageNet at large batches (6.6 minutes on 2,048 "
        "GPUs, Jia et al.); its own share is small.",
        source="Jia et al. 2018, arXiv:1807.11205; He et al. 2019, arXiv:1812.01187, section 3.1.",
        avoid="Without weight decay it has no effect; lars, lamb, nvlamb and novograd have exclude_1d for "
        "it.",
        audit="Weight decay above 0 with optimizer.decay_1d at true.",
        trial=("model=resnet_digits", "optimizer.weight_decay=0.1"),
    ),
    _groups(
        name="layer-wise learning rate decay",
        on=("optimizer.layer_decay=0.8",),
        off=("optimizer.layer_decay=null",),
        why="Early layers of a pretrained network need little change; giving them lower rates lets the top "
        "move faster.",
        claim="Used in fine-tuning ULMFiT (a factor of 1/2.6 a layer), ELECTRA (0.8 to 0.9) and BEiT.",
        source="Howard, Ruder 2018, arXiv:1801.06146; Clark, Luong, Le, Manning 2020, arXiv:2003.10555; Bao, "
        "Dong, Piao, Wei 2022, arXiv:2106.08254.",
        avoid="Training from random weights.",
        audit="Pretrained weights (model.weights) under one learning rate for all layers.",
        trial=("model=resnet_digits", "optimizer.lr=0.01"),
    ),
    _groups(
        name="learning rate by name",
        on=('optimizer.groups=[{match: "*.bias", lr_scale: 64}]',),
        off=("optimizer.groups=[]",),
        why="Parameters that tolerate a higher rate than the rest, such as BatchNorm's biases, get one.",
        claim="One of the changes behind 94 % on CIFAR-10 in seconds: 64 times the rate for BatchNorm's "
        "biases.",
        source="Jordan 2024, arXiv:2404.00498, after Page 2019, 'How to train your ResNet'.",
        avoid="You cannot afford to search for the factor: a wrong one diverges.",
        audit="BatchNorm under SGD with one rate for all parameters, in a short run.",
        alternatives="named groups",
        trial=("model=resnet_digits", "optimizer=sgd", "optimizer.lr=0.01"),
    ),
    _groups(
        name="frozen layers",
        on=('optimizer.groups=[{match: "*1.*", trains_until: 0}]',),
        off=("optimizer.groups=[]",),
        why="Backward stops above the frozen layers, which need no gradients, steps or optimizer state.",
        claim="Freezing layers one after the other: 20 % less time for ResNets at the same accuracy, and for "
        "DenseNets at 3 % less; none for VGG (CIFAR).",
        source="Brock, Lim, Ritchie, Weston 2017, arXiv:1706.04983.",
        avoid="Random weights, or data far from what the pretrained layers have seen.",
        audit="Fine-tuning in which the front of the network hardly changes.",
        alternatives="named groups",
    ),
    _groups(
        name="gradual unfreezing",
        on=('optimizer.groups=[{match: "*1.*", trains_from: 30%}]',),
        off=("optimizer.groups=[]",),
        why="While a new head is still wrong, its gradients cannot damage the pretrained layers, and "
        "backward stops above them.",
        claim="A part of ULMFiT, which was as good with 100 labelled texts as training from scratch with 100 "
        "times as many.",
        source="Howard, Ruder 2018, arXiv:1801.06146, section 3.3.",
        avoid="Random weights.",
        audit="Fine-tuning with a new head (model.replace_head) in which all layers train at once.",
        alternatives="named groups",
    ),
    _groups(
        name="head before backbone",
        on=("optimizer.backbone_from=30%",),
        off=("optimizer.backbone_from=null",),
        why="The head trains alone first, with no backward pass below it; once it fits, its errors disturb "
        "the rest less.",
        claim="Fine-tuning once the head was trained alone, over ten distribution shifts: 1 % more accurate "
        "than fine-tuning at once on data like that of training, 10 % on shifted data.",
        source="Kumar, Raghunathan, Jones, Ma, Liang 2022, arXiv:2202.10054.",
        avoid="Random weights, or a head that is not new.",
        audit="Fine-tuning with a new head (model.replace_head) in which all layers train at once.",
        trial=("model=resnet_digits", "optimizer.lr=0.01"),
    ),
    _groups(
        name="linear learning rate scaling",
        family="batch",
        on=("optimizer.lr_scaling=linear", "optimizer.reference_batch=64"),
        off=("optimizer.lr_scaling=none",),
        why="With k times the batch, SGD takes k times fewer steps, each k times as long, and fills a GPU "
        "that had room.",
        claim="ResNet-50 on ImageNet at a batch of 8,192 on 256 GPUs in an hour, as accurate as at 256, "
        "with a warm-up; weight decay stays as it is.",
        source="Goyal et al. 2017, arXiv:1706.02677.",
        avoid="Batches beyond a few thousand samples, runs without a warm-up, and Adam-like optimizers.",
        audit="SGD at another batch size than that which its rate was found at.",
        alternatives="learning rate scaling",
        trial=("optimizer=sgd", "optimizer.lr=0.05", "batch_size=128"),
    ),
    _groups(
        name="square-root learning rate scaling",
        family="batch",
        on=("optimizer.lr_scaling=sqrt", "optimizer.reference_batch=64"),
        off=("optimizer.lr_scaling=none",),
        why="Adam's step does not grow with the gradient, whose noise falls with the square root of the "
        "batch; the rate and the decoupled decay follow it.",
        claim="Adam's and RMSprop's course at one batch is that at another, in theory and on vision and "
        "language models, if betas and eps are scaled too, which ptfast leaves alone.",
        source="Malladi, Lyu, Panigrahi, Arora 2022, arXiv:2205.10287; for the decay Wang, Aitchison 2024, "
        "arXiv:2405.13698.",
        avoid="SGD, and batches so large that the betas would have to change.",
        audit="Adam or AdamW at another batch size than that which its rate was found at.",
        alternatives="learning rate scaling",
        trial=("optimizer=adamw", "batch_size=256"),
    ),
    Technique(
        name="gradient accumulation",
        family="batch",
        kind="reordered",
        on=("gradients.accumulate=4",),
        off=("gradients.accumulate=1",),
        why="A batch too large for memory is processed in parts, each freed by its own backward pass.",
        claim="Activations of one part are held at a time; the gradient is that of the whole batch, up to "
        "rounding, without BatchNorm and dropout.",
        source="Ott, Edunov, Grangier, Auli 2018, arXiv:1806.00187 ('delayed updates').",
        avoid="The whole batch fits: small parts use the device less well, and BatchNorm sees each part "
        "alone.",
        audit="Out-of-memory errors at the batch size that is wanted, or a smaller batch because of them.",
        trial=("model.hidden=[32]", "optimizer=sgd"),
    ),
)

FAMILY = Family(
    name="parameter groups",
    techniques=TECHNIQUES,
)
