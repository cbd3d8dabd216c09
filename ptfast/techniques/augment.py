"""Records of random changes to training samples."""

from __future__ import annotations

from ptfast.techniques.record import Technique

TECHNIQUES: tuple[Technique, ...] = (
    Technique(
        name="crop and flip",
        family="augment",
        kind="training",
        on=("augment.crop_padding=1", "augment.flip=true"),
        off=("augment.crop_padding=0", "augment.flip=false"),
        why="Every epoch shows other images, so that a network can train longer before it fits them by "
        "heart; a whole batch is cropped and flipped by one gather of rows.",
        claim="The standard of CIFAR since ResNet: 91.25 % test accuracy of ResNet-20. Here an image of 32 "
        "x 32 takes 1.15 us, against 110 us by PIL and torchvision in a DataLoader (one core of an AMD "
        "EPYC).",
        source="He, Zhang, Ren, Sun 2015, arXiv:1512.03385, section 4.2.",
        avoid="Images whose mirror image means something else, such as digits and text, and objects that "
        "fill the frame to its border.",
        audit="Transforms of single images in a data set's __getitem__, or training images without any.",
        options=("augment/crop_flip",),
        needs=("images",),
        trial=("model=resnet_digits", "optimizer.lr=0.005"),
    ),
    Technique(
        name="mixup",
        family="augment",
        kind="training",
        on=("augment.mixup=0.2",),
        off=("augment.mixup=0",),
        why="A network trained on blends of two samples and of their targets remembers less by heart and "
        "generalises better at the same length.",
        claim="PreAct ResNet-18 on CIFAR-10, 200 epochs: test error from 5.6 to 4.2 %; ResNet-50 on "
        "ImageNet: from 23.6 to 22.1 % over 200 epochs, but only from 23.5 to 23.3 % over 90.",
        source="Zhang, Cisse, Dauphin, Lopez-Paz 2018, arXiv:1710.09412.",
        avoid="Short runs, which underfit anyway, and data in which a blend of two samples means nothing.",
        audit="An image classifier trained for tens of epochs whose training loss falls far below its "
        "validation loss.",
        options=("augment/mixup",),
    ),
    Technique(
        name="cutmix",
        family="augment",
        kind="training",
        on=("augment.cutmix=1",),
        off=("augment.cutmix=0",),
        why="With a patch of another image in its place, a network cannot rely on one part of an object "
        "alone.",
        claim="ResNet-50 on ImageNet, 300 epochs: top-1 error from 23.68 to 21.40 %; PyramidNet-200 on "
        "CIFAR-100: from 16.45 to 14.47 %.",
        source="Yun, Han, Oh, Chun, Choe, Yoo 2019, arXiv:1905.04899.",
        avoid="Short runs, which underfit anyway, and images whose class shows in one small place only.",
        audit="An image classifier trained for tens of epochs whose training loss falls far below its "
        "validation loss.",
        options=("augment/cutmix",),
        needs=("images",),
        trial=("model=resnet_digits",),
    ),
)
