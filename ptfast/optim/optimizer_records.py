"""Records of the optimizers, of settings of single parameters, and of rates that go with the batch size."""

from __future__ import annotations

from functools import partial

from ptfast.core.sections.section import Technique

_SMALL = ("model.hidden=[16]",)

_optimizer = partial(Technique, kind="training", off=("optimizer=adamw",), alternatives="optimizer")

OPTIMIZERS: tuple[Technique, ...] = (
    _optimizer(
        name="fused optimizer step",
        kind="reordered",
        on=("optimizer.fused=auto",),
        off=("optimizer.fused=false",),
        why="One kernel updates weights and state in one pass over memory; separate operations make about "
        "ten.",
        claim="The quickest of torch's three ways to step, before foreach and the loop over parameters.",
        source="PyTorch documentation of torch.optim, 'Algorithms'.",
        measured="A step on one CPU thread at the size of ResNet-18 and of DistilBERT: AdamW 8.4 and 45 ms "
        "instead of 46 and 322, SGD with Nesterov's momentum 6.1 and 32 ms instead of 38 and 283, with plain "
        "momentum 6.1 and 33 ms instead of 16 and 113.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Never: optimizer.fused=auto skips it where it is not supported.",
        audit="torch.optim.SGD, Adam or AdamW without fused=True.",
        alternatives="step kernel",
        trial=_SMALL,
    ),
    _optimizer(
        name="foreach optimizer step",
        kind="reordered",
        on=("optimizer.foreach=true", "optimizer.fused=false"),
        off=("optimizer.fused=false",),
        why="Each operation handles all parameters in a few launches instead of one per parameter.",
        claim="Torch's default on GPUs: quicker there than a loop over parameters, slower than a fused step.",
        source="PyTorch documentation of torch.optim, 'Algorithms'.",
        avoid="On the CPU, or where the fused step runs.",
        audit="torch.optim with foreach=False on a GPU, or an optimizer that loops over parameters.",
        alternatives="step kernel",
        trial=_SMALL,
    ),
    _optimizer(
        name="sgd with momentum",
        on=("optimizer=sgd",),
        why="The cheapest step, with one number of state per weight; ConvNets with BatchNorm need no more "
        "epochs.",
        claim="On CIFAR-10 a lower test error than Adam's.",
        source="Wilson, Roelofs, Stern, Srebro, Recht 2017, arXiv:1705.08292.",
        measured="A fused step takes 0.73 of AdamW's time at ResNet-18's size and 0.71 at DistilBERT's.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Transformers, whose gradients differ too much in scale between layers.",
        audit="A ResNet under Adam.",
    ),
    _optimizer(
        name="adam",
        on=("optimizer=adam",),
        off=("optimizer=sgd",),
        why="Step sizes do not depend on the gradient's scale, so one learning rate suits all layers.",
        claim="After as many epochs as SGD with Nesterov's momentum, a far lower loss on sparse features of "
        "IMDB's reviews, and about as low a one on images of CIFAR-10.",
        source="Kingma, Ba 2015, arXiv:1412.6980.",
        avoid="With weight decay, which AdamW keeps out of the moments.",
        audit="SGD on a transformer.",
        trial=("optimizer.lr=0.01",),
    ),
    _optimizer(
        name="adamw",
        on=("optimizer=adamw",),
        off=("optimizer=sgd",),
        why="Adam with decoupled weight decay, which is not rescaled by the gradient's magnitude.",
        claim="A lower test error than Adam with L2 on CIFAR-10 and ImageNet32, at the same length.",
        source="Loshchilov, Hutter 2019, arXiv:1711.05101.",
        avoid="Memory is short: it keeps two numbers per weight.",
        audit="torch.optim.Adam with a weight decay.",
        trial=("optimizer.lr=0.01",),
    ),
    _optimizer(
        name="schedule-free adamw",
        on=("optimizer=adamw_schedulefree", "schedule=constant"),
        off=("optimizer=adamw", "schedule=constant"),
        why="Averaged weights replace a decaying rate: the model is good at any step, not only at a planned "
        "end.",
        claim="As good as schedules from convex problems to large models; won AlgoPerf's self-tuning track "
        "in 2024.",
        source="Defazio, Yang, Khaled, Mishchenko, Mehta, Cutkosky 2024, arXiv:2405.15682.",
        avoid="A recipe whose schedule is tuned for its length.",
        audit="A cosine in a run that is stopped early, or prolonged.",
        needs=("schedulefree",),
        trial=("optimizer.lr=0.01",),
    ),
    _optimizer(
        name="schedule-free sgd",
        on=("optimizer=sgd_schedulefree", "schedule=constant"),
        off=("optimizer=sgd", "schedule=constant"),
        why="The same for SGD, at a higher rate than with momentum.",
        claim="As good as SGD under a schedule for image classification, and often better.",
        source="Defazio, Yang, Khaled, Mishchenko, Mehta, Cutkosky 2024, arXiv:2405.15682.",
        avoid="A recipe whose schedule is tuned for its length.",
        audit="SGD with steps at milestones in a run that is stopped early, or prolonged.",
        needs=("schedulefree",),
    ),
    _optimizer(
        name="cautious weight decay",
        on=("optimizer=adamw_cautious",),
        why="Decay is skipped where it opposes the gradient, so weights reach a minimum of the loss itself.",
        claim="Better loss and accuracy than decoupled decay, without tuning, for language models of "
        "millions to billions of weights and on ImageNet, with AdamW, Lion and Muon.",
        source="Chen et al. 2025, arXiv:2510.12402.",
        avoid="Without weight decay it has no effect.",
        audit="AdamW with a weight decay of 0.1 or more.",
        trial=("optimizer.lr=0.01", "optimizer.weight_decay=0.1"),
    ),
    _optimizer(
        name="nadam",
        on=("optimizer=nadam",),
        why="Adam with Nesterov's look-ahead along the momentum.",
        claim="A lower loss than Adam after as many steps in its author's few comparisons.",
        source="Dozat 2016, 'Incorporating Nesterov Momentum into Adam', ICLR workshop.",
        avoid="Step time matters: torch has no fused NAdam.",
        audit="Adam with a high beta1, where the momentum often overshoots.",
    ),
    _optimizer(
        name="radam",
        on=("optimizer=radam",),
        why="Steps are not rescaled until enough gradients have been seen, so no warm-up is needed.",
        claim="As good as Adam with a tuned warm-up, without one.",
        source="Liu, Jiang, He, Chen, Liu, Gao, Han 2020, arXiv:1908.03265.",
        avoid="Together with a warm-up, which does the same; torch has no fused RAdam.",
        audit="Adam that diverges in its first steps, without schedule.warmup.",
        trial=("optimizer.lr=0.03",),
    ),
    _optimizer(
        name="adafactor",
        on=("optimizer=adafactor",),
        why="Second moments are stored per row and column, which frees memory for a larger model or batch.",
        claim="Adam's results on machine translation with a state of almost nothing.",
        source="Shazeer, Stern 2018, arXiv:1804.04235.",
        avoid="Memory is not short.",
        audit="Out-of-memory errors while Adam's state takes twice the weights.",
    ),
    _optimizer(
        name="muon",
        on=("optimizer=muon",),
        why="Orthogonal updates of hidden matrices move rare directions as far as common ones: fewer steps.",
        claim="1.35 times AdamW's NanoGPT speed record; 94 % on CIFAR-10 in 2.59 s on an A100.",
        source="Jordan et al. 2024, 'Muon: An optimizer for hidden layers in neural networks'; "
        "KellerJordan/cifar10-airbench.",
        avoid="On a CPU or at small batches: the matrix iteration is expensive compared with such a step.",
        audit="AdamW on a transformer or ResNet that is trained from scratch at a large batch.",
    ),
    _optimizer(
        name="sgd beside muon",
        on=("optimizer=muon", "optimizer.rest=sgd", "optimizer.rest_lr=0.05"),
        off=("optimizer=muon", "optimizer.rest=adamw", "optimizer.rest_lr=null"),
        why="Biases, norms and the ends of a ConvNet train as well with SGD as with AdamW, at half the "
        "state.",
        claim="A part of 94 % on CIFAR-10 in 2.59 s on an A100.",
        source="KellerJordan/cifar10-airbench, airbench94_muon.py.",
        avoid="Transformers, whose embeddings and head have gradients of very different scale.",
        audit="Muon on a convolutional network with AdamW for biases and norms.",
        trial=("model=resnet_digits", "optimizer.lr=0.02"),
        alternatives=None,
    ),
    _optimizer(
        name="normalized weights",
        on=("optimizer=muon", "optimizer.normalize=true"),
        off=("optimizer=muon", "optimizer.normalize=false"),
        why="A norm cancels a layer's scale: weights of one length keep relative steps constant without "
        "decay.",
        claim="A part of 94 % on CIFAR-10 in 2.59 s on an A100; its own share is not given.",
        source="KellerJordan/cifar10-airbench, airbench94_muon.py.",
        avoid="Layers without a norm after them, whose scale matters.",
        audit="Muon with weight decay on layers that a BatchNorm follows.",
        trial=("model=resnet_digits", "optimizer.lr=0.02"),
        alternatives=None,
    ),
    _optimizer(
        name="lars",
        on=("optimizer=lars",),
        off=("optimizer=sgd",),
        why="Each layer moves by a fraction of its own norm, so batches of thousands still converge.",
        claim="ResNet-50 on ImageNet at a batch of 32,768 without loss of accuracy.",
        source="You, Gitman, Ginsburg 2017, arXiv:1708.03888.",
        measured="On one CPU thread a step takes 1.31 to 1.35 of fused AdamW's, 0.25 to 0.53 of timm's.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Batches of hundreds, where a plain optimizer trains as well with fewer settings.",
        audit="SGD at a batch of 8,192 or more, with a warm-up and still diverging.",
    ),
    _optimizer(
        name="lamb",
        on=("optimizer=lamb",),
        why="Adam in which each layer moves by a fraction of its norm, for transformers at batches of "
        "thousands.",
        claim="BERT at batches of 32,768 and more in 76 minutes on a TPUv3 pod, as good as at 512.",
        source="You et al. 2020, arXiv:1904.00962.",
        measured="A step on one CPU thread takes 2.1 of fused AdamW's, and 0.20 to 0.29 of timm's LAMB.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Batches of hundreds, where a plain optimizer trains as well with fewer settings.",
        audit="AdamW at a batch of thousands of sequences.",
    ),
    _optimizer(
        name="nvlamb",
        on=("optimizer=nvlamb",),
        why="LAMB with gradients clipped before the moments, so early large ones do not shrink later steps.",
        claim="How NVIDIA trains BERT at large batches.",
        source="Sreenivas et al. 2019, NVIDIA developer blog, 'Pretraining BERT with Layer-wise Adaptive "
        "Learning Rates'.",
        measured="A step on one CPU thread takes 2.6 to 2.8 of fused AdamW's, which takes 1.50 to 1.54 with "
        "clipping, and 0.19 to 0.32 of timm's.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="Batches of hundreds, where a plain optimizer trains as well with fewer settings.",
        audit="LAMB with gradients.clip_norm, which takes further passes.",
    ),
    _optimizer(
        name="novograd",
        on=("optimizer=novograd",),
        why="Gradients are normalised per layer, which needs one number of state per weight instead of two.",
        claim="As good as tuned SGD or AdamW on images, speech and translation, with half of Adam's state.",
        source="Ginsburg et al. 2019, arXiv:1905.11286.",
        measured="A step on one CPU thread takes 1.07 to 1.14 of fused AdamW's, and 0.26 of timm's NovoGrad.",
        command="python scripts/bench_optimizers.py --threads 1 --cpu-time",
        avoid="You want to keep a rate tuned for AdamW: NovoGrad needs its own.",
        audit="AdamW where its state does not fit into the memory.",
    ),
)

_groups = partial(Technique, family="parameter groups", kind="training")

PARAMETERS: tuple[Technique, ...] = (
    _groups(
        name="no decay on norms and biases",
        on=("optimizer.decay_1d=false",),
        why="Weight decay is meant for matrices; decaying the few scales and biases only costs accuracy.",
        claim="Part of recipes that train ResNet-50 on ImageNet at large batches (6.6 minutes on 2,048 GPUs, "
        "Jia et al.); its own share is small.",
        source="Jia et al. 2018, arXiv:1807.11205; He et al. 2019, arXiv:1812.01187, section 3.1.",
        avoid="There is no weight decay; lars, lamb, nvlamb and novograd have exclude_1d for it.",
        audit="Weight decay above 0 with optimizer.decay_1d at true.",
        trial=("model=resnet_digits", "optimizer.weight_decay=0.1"),
    ),
    _groups(
        name="layer-wise learning rate decay",
        on=("optimizer.layer_decay=0.8",),
        off=("optimizer.layer_decay=null",),
        why="Early pretrained layers need little change; with lower rates there, the top moves faster.",
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
        claim="Part of 94 % on CIFAR-10 in seconds: 64 times the rate for BatchNorm's biases.",
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
        claim="Freezing layer after layer: 20 % less time for ResNets at the same accuracy, and for "
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
        why="A new head's wrong gradients do not damage pretrained layers, and backward stops above them.",
        claim="Part of ULMFiT, as good with 100 labelled texts as training from scratch with 100 times as "
        "many.",
        source="Howard, Ruder 2018, arXiv:1801.06146, section 3.3.",
        avoid="Random weights.",
        audit="Fine-tuning with a new head (model.replace_head) in which all layers train at once.",
        alternatives="named groups",
    ),
    _groups(
        name="head before backbone",
        on=("optimizer.backbone_from=30%",),
        off=("optimizer.backbone_from=null",),
        why="The head trains alone, without backward below it; once it fits, its errors disturb the rest "
        "less.",
        claim="Fine-tuning after the head, over ten distribution shifts: 1 % more accurate than at once on "
        "data like that of training, 10 % on shifted data.",
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
        why="With k times the batch, SGD takes k times fewer steps, each k times as long, and fills a GPU.",
        claim="ResNet-50 on ImageNet at a batch of 8,192 on 256 GPUs in an hour, as accurate as at 256, with "
        "a warm-up and unchanged weight decay.",
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
        why="Adam's step does not grow with the gradient, whose noise falls with the root of the batch.",
        claim="Training with Adam or RMSprop at one batch matches another, in theory and on vision and "
        "language models, if betas and eps are scaled too, which ptfast does not do.",
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
        claim="Holds the activations of one part; without BatchNorm and dropout the gradient is that of the "
        "whole batch, up to rounding.",
        source="Ott, Edunov, Grangier, Auli 2018, arXiv:1806.00187 ('delayed updates').",
        avoid="The whole batch fits: small parts use the device less well, and BatchNorm sees one at a time.",
        audit="Out-of-memory errors at the batch size that is wanted, or a smaller batch because of them.",
        trial=("model.hidden=[32]", "optimizer=sgd"),
    ),
)
