"""Records of random changes to training samples."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import Range
from ptfast.core.sections.section import (
    Family,
    Fraction,
    Natural,
    NotNegative,
    Part,
    Positive,
    Section,
    Technique,
    Unused,
)


class AugmentSection(Section):
    """Random changes to training images."""

    crop_padding: Natural = 0
    """Pixels of padding around an image before a random crop of its size."""
    crop_padding_mode: Literal["constant", "reflect"] = "constant"
    """`constant` pads with black, `reflect` with the pixels inside, mirrored at the edge."""
    flip: bool | Literal["alternating"] = False
    """Mirror half of the images, drawn anew every epoch; `alternating` turns each over every epoch."""
    resized_crop: tuple[Part, Part] | None = None
    """Least and largest part of an image's area that is cut out and scaled to full size; null for none."""
    resized_ratio: tuple[Positive, Positive] = (0.75, 1.3333)
    """Least and largest width of such a part over its height."""
    cutout: Natural = 0
    """Side in pixels of a square that is hidden; 0 for none."""
    brightness: Annotated[float, Range(0, 3)] = 0.0
    """Largest change of brightness, as a part of it."""
    contrast: Annotated[float, Range(0, 3)] = 0.0
    """Largest change of contrast, as a part of it."""
    saturation: Annotated[float, Range(0, 3)] = 0.0
    """Largest change of saturation, as a part of it."""
    rotation_degrees: Annotated[float, Range(0, 180)] = 0.0
    """Largest turn either way."""
    translation: Annotated[float, Range(0, 1)] = 0.0
    """Largest shift each way, as a part of height and width."""
    scaling: Fraction = 0.0
    """Largest change of size, as a part of it."""
    mixup: NotNegative = 0.0
    """Blend each sample with another: parameter of its Beta distribution; 0 for none."""
    cutmix: NotNegative = 0.0
    """Paste a patch of another image into each: parameter of its Beta distribution; 0 for none."""
    targets: Literal["auto", "keep"] = "auto"
    """`auto` moves masks with their images, and refuses targets that may be places; `keep` moves none."""


def one_way_of_cropping(augment: AugmentSection) -> PtfastError | None:
    """Refuse two ways of cropping at once, and ranges the wrong way round."""
    for name in ("resized_crop", "resized_ratio"):
        low, high = getattr(augment, name) or (0, 0)
        if low > high:
            what, hint = "the largest comes first", f"Use augment.{name}=[{high:g},{low:g}]"
            return ConfigError("C011", what, key=f"augment.{name}", value=[low, high], suggestion=hint)
    if augment.resized_crop is None or not augment.crop_padding:
        return None
    what, hint = f"contradicts augment.crop_padding={augment.crop_padding}", "Set augment.crop_padding=0"
    value = list(augment.resized_crop)
    return ConfigError("C011", what, key="augment.resized_crop", value=value, suggestion=hint)


def panel(augment: AugmentSection) -> dict[str, object]:
    """The random changes to images that are on."""
    parts, jitter = augment.resized_crop, ("brightness", "contrast", "saturation", "translation", "scaling")
    reflected = "reflected " * (augment.crop_padding_mode == "reflect")
    images = {
        f"crop after {augment.crop_padding} pixels of {reflected}padding": augment.crop_padding,
        "resized crop of {:.0%} to {:.0%}".format(*(parts or (0, 1))): parts,
        "alternating flip" if augment.flip == "alternating" else "flip": augment.flip,
        f"turn by up to {augment.rotation_degrees:g} degrees": augment.rotation_degrees,
        **{f"{name} {getattr(augment, name):g}": getattr(augment, name) for name in jitter},
        f"cutout of {augment.cutout} pixels": augment.cutout,
        f"mixup {augment.mixup:g}": augment.mixup,
        f"cutmix {augment.cutmix:g}": augment.cutmix,
    }
    return {"augment": ", ".join(name for name, on in images.items() if on) or None}


_augment = partial(
    Technique, kind="training", needs=("images",), trial=("model=resnet_digits", "optimizer.lr=0.005")
)

_OVERFITTING = (
    "An image classifier trained for tens of epochs whose training loss falls far below its validation loss."
)

TECHNIQUES: tuple[Technique, ...] = (
    _augment(
        name="crop and flip",
        on=("augment.crop_padding=1", "augment.flip=true"),
        off=("augment.crop_padding=0", "augment.flip=false"),
        why="Every epoch shows different images, so the network can train longer before it overfits; a whole"
        " batch is cropped and flipped by one gather of rows.",
        claim="The standard of CIFAR since ResNet: 91.25 % test accuracy of ResNet-20.",
        source="He, Zhang, Ren, Sun 2015, arXiv:1512.03385, section 4.2.",
        measured="An image of 32 x 32 takes 0.80 us, against 170 us by PIL and torchvision in a DataLoader.",
        command="python scripts/bench_data.py crops",
        avoid="The mirror image means something else, as with digits and text, or objects fill the frame.",
        audit="Transforms of single images in a dataset's __getitem__, or training images without any.",
        about=("augment/crop_flip",),
    ),
    _augment(
        name="alternating flip",
        on=("augment.flip=alternating",),
        off=("augment.flip=false",),
        why="Each image alternates with its mirror image, so any two consecutive epochs show both; with "
        "random flips half of the images appear the same way twice.",
        claim="CIFAR-10, CIFAR-100 and ImageNet: better than random flips in every case in which flips "
        "help at all.",
        source="Jordan 2024, arXiv:2404.00498.",
        avoid="The mirror image means something else; in long runs the gain over random flips fades.",
        audit="RandomHorizontalFlip in a run of tens of epochs at most.",
        about=("augment/alternating_flip", "augment/airbench94"),
    ),
    _augment(
        name="cutout",
        on=("augment.cutout=2",),
        off=("augment.cutout=0",),
        why="With a square hidden, the network cannot rely on one part of an object and generalises better "
        "at the same length; a batch costs one scattered write.",
        claim="ResNet-18 on CIFAR-10, 200 epochs, squares of 16 pixels: test error from 4.72 to 3.99 %; "
        "WRN-28-10: from 3.87 to 3.08 %.",
        source="DeVries, Taylor 2017, arXiv:1708.04552.",
        avoid="Short runs, which underfit anyway, and images whose class shows in one small place.",
        audit=_OVERFITTING,
        about=("augment/cutout", "augment/airbench96"),
    ),
    _augment(
        name="colour jitter",
        on=("augment.brightness=0.2", "augment.contrast=0.2", "augment.saturation=0.2"),
        off=("augment.brightness=0", "augment.contrast=0", "augment.saturation=0"),
        why="An object stays the same under different light; brightness, contrast and saturation of a whole "
        "batch are one product and one sum in integers.",
        claim="A related change, colours moved along their principal components, lowers AlexNet's top-1 "
        "error on ImageNet by over 1 point.",
        source="Krizhevsky, Sutskever, Hinton 2012, 'ImageNet Classification with Deep Convolutional "
        "Neural Networks', section 4.1.",
        measured="An image of 32 x 32 takes 10.2 us with it, 2.2 us with crops and flips alone.",
        command="python scripts/bench_data.py jitter",
        avoid="Colour tells the classes apart, or the run is short.",
        audit="ColorJitter of torchvision in __getitem__, which works on one image at a time.",
        about=("augment/colour",),
    ),
    _augment(
        name="affine jitter",
        on=("augment.rotation_degrees=5", "augment.translation=0.05", "augment.scaling=0.05"),
        off=("augment.rotation_degrees=0", "augment.translation=0", "augment.scaling=0"),
        why="A rotated, shifted or scaled object is still the same object; a whole batch is resampled at "
        "once, each image on its own grid.",
        claim="A plain perceptron reaches 0.35 % test error on MNIST with affine and elastic changes "
        "drawn anew every epoch.",
        source="Ciresan, Meier, Gambardella, Schmidhuber 2010, arXiv:1003.0358.",
        measured="An image of 32 x 32 takes 20.2 us with it, 2.2 us with crops and flips alone.",
        command="python scripts/bench_data.py jitter",
        avoid="Place, size or direction tell the classes apart, or the run is short.",
        audit="RandomAffine or RandomRotation of torchvision in __getitem__, one image at a time.",
        about=("augment/affine",),
    ),
    _augment(
        name="random resized crop",
        on=("augment.resized_crop=[0.5,1.0]",),
        off=("augment.resized_crop=null",),
        why="Objects appear at a new place, size and shape every epoch; the box is cut first, resized as "
        "bytes and normalised on the device, so no work is spent on pixels that are dropped.",
        claim="The standard of ImageNet since GoogLeNet: of boxes of 8 to 100 % of the area.",
        source="Szegedy et al. 2014, arXiv:1409.4842, section 6.",
        measured="JPEG files of 500 x 400 in 884 us each, against 2,199 us by PIL and torchvision's "
        "transforms.",
        command="python scripts/bench_data.py jpeg",
        avoid="Short runs, which underfit anyway, images of a few dozen pixels, and classes that show in one"
        " small place.",
        audit="RandomResizedCrop on PIL images, or ToTensor before a crop.",
        about=("augment/resized_crop",),
    ),
    Technique(
        name="mixup",
        kind="training",
        on=("augment.mixup=0.2",),
        off=("augment.mixup=0",),
        why="Training on blends of two samples and their targets reduces memorisation and generalises better"
        " at the same length.",
        claim="PreAct ResNet-18 on CIFAR-10, 200 epochs: test error from 5.6 to 4.2 %; ResNet-50 on "
        "ImageNet: from 23.6 to 22.1 % over 200 epochs, but only from 23.5 to 23.3 % over 90.",
        source="Zhang, Cisse, Dauphin, Lopez-Paz 2018, arXiv:1710.09412.",
        avoid="Short runs, which underfit anyway, and data where a blend of two samples means nothing.",
        audit=_OVERFITTING,
        about=("augment/mixup",),
    ),
    _augment(
        name="cutmix",
        on=("augment.cutmix=1",),
        off=("augment.cutmix=0",),
        why="With a patch of another image pasted in, the network cannot rely on one part of an object.",
        claim="ResNet-50 on ImageNet, 300 epochs: top-1 error from 23.68 to 21.40 %; PyramidNet-200 on "
        "CIFAR-100: from 16.45 to 14.47 %.",
        source="Yun, Han, Oh, Chun, Choe, Yoo 2019, arXiv:1905.04899.",
        avoid="Short runs, which underfit anyway, and images whose class shows in one small place.",
        audit=_OVERFITTING,
        about=("augment/cutmix",),
        trial=("model=resnet_digits",),
    ),
)

FAMILY = Family(
    name="augment",
    rules=(one_way_of_cropping,),
    unused=(
        Unused(
            ("augment.crop_padding_mode",),
            lambda augment: augment.crop_padding > 0,
            "without augment.crop_padding",
            "augment.crop_padding=4",
        ),
        Unused.without("augment.resized_crop", "[0.08,1]", "augment.resized_ratio"),
    ),
    panel=panel,
    techniques=TECHNIQUES,
)
