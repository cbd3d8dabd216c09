"""Records of random changes to training samples."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import Range
from ptfast.core.sections.section import (
    Count,
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

Chance = Annotated[float, Range(0, 1)]
Strength = Annotated[float, Range(0, 3)]


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
    erasing: Chance = 0.0
    """Part of the images in which a random box is hidden."""
    color_jitter: Strength = 0.0
    """Largest change of brightness, contrast and saturation, as a part of them."""
    brightness: Strength | None = None
    """Largest change of brightness; null for that of `color_jitter`."""
    contrast: Strength | None = None
    """Largest change of contrast; null for that of `color_jitter`."""
    saturation: Strength | None = None
    """Largest change of saturation; null for that of `color_jitter`."""
    hue: Annotated[float, Range(0, 0.5)] = 0.0
    """Largest turn of the color wheel either way, as a part of it."""
    grayscale: Chance = 0.0
    """Part of the images that lose their colors."""
    blur: Chance = 0.0
    """Part of the images that are blurred."""
    policy: Literal["trivial", "rand", "auto", "augmix"] | None = None
    """Published choice of random operations: TrivialAugment, RandAugment, AutoAugment or AugMix."""
    rand_ops: Count = 2
    """Operations of RandAugment for each image."""
    rand_magnitude: Annotated[int, Range(0, 30)] = 9
    """Strength of RandAugment's operations, of 30."""
    auto_table: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """Data for which AutoAugment's operations were found."""
    augmix_severity: Annotated[int, Range(1, 10)] = 3
    """Largest strength of AugMix's operations, of 10."""
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

    @property
    def jitter(self) -> dict[str, float]:
        """Largest change of each property of the colors."""
        own = {"brightness": self.brightness, "contrast": self.contrast, "saturation": self.saturation}
        return {name: self.color_jitter if most is None else most for name, most in own.items()}


def one_way_of_cropping(augment: AugmentSection) -> PtfastError | None:
    """Refuse two ways of cropping or hiding at once, and ranges the wrong way round."""
    for name in ("resized_crop", "resized_ratio"):
        low, high = getattr(augment, name) or (0, 0)
        if low > high:
            what, hint = "the largest comes first", f"Use augment.{name}=[{high:g},{low:g}]"
            return ConfigError("C011", what, key=f"augment.{name}", value=[low, high], suggestion=hint)
    for name, other in (("resized_crop", "crop_padding"), ("erasing", "cutout")):
        value, against = getattr(augment, name), getattr(augment, other)
        if value and against:
            what, hint = f"contradicts augment.{other}={against}", f"Set augment.{other}=0"
            shown = [*value] if isinstance(value, tuple) else value
            return ConfigError("C011", what, key=f"augment.{name}", value=shown, suggestion=hint)
    return None


def panel(augment: AugmentSection) -> dict[str, object]:
    """The random changes to images that are on."""
    parts, names = augment.resized_crop, ("translation", "scaling", "hue", "grayscale", "blur", "erasing")
    numbers = augment.jitter | {name: getattr(augment, name) for name in (*names, "mixup", "cutmix")}
    reflected = "reflected " * (augment.crop_padding_mode == "reflect")
    images = {
        f"crop after {augment.crop_padding} pixels of {reflected}padding": augment.crop_padding,
        "resized crop of {:.0%} to {:.0%}".format(*(parts or (0, 1))): parts,
        "alternating flip" if augment.flip == "alternating" else "flip": augment.flip,
        f"turn by up to {augment.rotation_degrees:g} degrees": augment.rotation_degrees,
        f"policy {augment.policy}": augment.policy,
        **{f"{name} {most:g}": most for name, most in numbers.items()},
        f"cutout of {augment.cutout} pixels": augment.cutout,
    }
    return {"augment": ", ".join(name for name, on in images.items() if on) or None}


_OVERFITTING = "An image classifier whose training loss falls far below its validation loss."
_SMALL = "Short runs, which underfit anyway, and images whose class shows in one small place."

_augment = partial(
    Technique,
    kind="training",
    needs=("images",),
    avoid=_SMALL,
    audit=_OVERFITTING,
    trial=("model=resnet_digits", "optimizer.lr=0.005"),
)

TECHNIQUES: tuple[Technique, ...] = (
    _augment(
        name="crop and flip",
        on=("augment.crop_padding=1", "augment.flip=true"),
        why="Every epoch shows different images, by one gather of rows a batch, so overfitting begins later.",
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
        why="Any two consecutive epochs show both views; random flips show half of the images alike twice.",
        claim="CIFAR-10, CIFAR-100 and ImageNet: better than random flips wherever flips help at all.",
        source="Jordan 2024, arXiv:2404.00498.",
        avoid="The mirror image means something else; in long runs the gain over random flips fades.",
        audit="RandomHorizontalFlip in a run of tens of epochs at most.",
        about=("augment/alternating_flip", "augment/airbench94"),
    ),
    _augment(
        name="cutout",
        on=("augment.cutout=2",),
        why="With a square hidden, the network cannot rely on one part of an object; it costs one write.",
        claim="ResNet-18 on CIFAR-10, 200 epochs, squares of 16 pixels: test error from 4.72 to 3.99 %; "
        "WRN-28-10: from 3.87 to 3.08 %.",
        source="DeVries, Taylor 2017, arXiv:1708.04552.",
        about=("augment/cutout", "augment/airbench96"),
    ),
    _augment(
        name="color jitter",
        on=("augment.brightness=0.2", "augment.contrast=0.2", "augment.saturation=0.2"),
        why="An object stays the same under different light, which is one product and one sum in integers.",
        claim="Colors moved along their principal components lower AlexNet's ImageNet error by over 1 point.",
        source="Krizhevsky, Sutskever, Hinton 2012, NeurIPS, section 4.1.",
        measured="An image of 32 x 32 takes 10.2 us with it, 2.2 us with crops and flips alone.",
        command="python scripts/bench_data.py jitter",
        avoid="Color tells the classes apart, or the run is short.",
        audit="ColorJitter of torchvision in __getitem__, which works on one image at a time.",
        about=("augment/color_jitter",),
    ),
    _augment(
        name="grayscale and blur",
        on=("augment.grayscale=0.2", "augment.blur=0.5"),
        why="The network cannot tell objects apart by their colors or by fine texture alone.",
        claim="With jitter a part of the standard of contrastive learning, where colors matter most.",
        source="Chen, Kornblith, Norouzi, Hinton 2020, arXiv:2002.05709, section 3.",
        about=("augment/grayscale", "augment/blur"),
    ),
    _augment(
        name="random erasing",
        on=("augment.erasing=0.25",),
        why="As cutout, with boxes of any size and shape, in a part of the images.",
        claim="WRN-28-10: test error on CIFAR-10 from 3.72 to 3.08 %, on CIFAR-100 from 18.68 to 17.65 %.",
        source="Zhong, Zheng, Kang, Li, Yang 2017, arXiv:1708.04896.",
        about=("augment/erasing",),
    ),
    _augment(
        name="policy of operations",
        on=("augment.policy=trivial",),
        off=("augment.policy=null",),
        why="Each image is turned, sheared, recolored or sharpened; all that share an operation at once.",
        claim="RandAugment: ImageNet accuracy 1.0 % above the baseline's; TrivialAugment: as good with one "
        "operation an image; AugMix: robust against corrupted images.",
        source="Cubuk et al. 2018, arXiv:1805.09501, and 2019, arXiv:1909.13719; Mueller, Hutter 2021, "
        "arXiv:2103.10158; Hendrycks et al. 2019, arXiv:1912.02781.",
        measured="An image of 32 x 32 takes 31 us with TrivialAugment, 234 us by torchvision v2.",
        command="python scripts/bench_data.py policies",
        audit="TrivialAugmentWide, RandAugment, AutoAugment or AugMix of torchvision in __getitem__.",
        about=("augment/trivial", "augment/rand", "augment/auto", "augment/augmix"),
    ),
    _augment(
        name="affine jitter",
        on=("augment.rotation_degrees=5", "augment.translation=0.05", "augment.scaling=0.05"),
        why="A rotated, shifted or scaled object is the same object; a batch is resampled at once.",
        claim="With affine and elastic changes every epoch a plain perceptron reaches 0.35 % error on MNIST.",
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
        why="Objects appear at a new place, size and shape every epoch; only the box is worked on.",
        claim="The standard of ImageNet since GoogLeNet: of boxes of 8 to 100 % of the area.",
        source="Szegedy et al. 2014, arXiv:1409.4842, section 6.",
        measured="JPEG files of 500 x 400 in 884 us each, against 2,199 us by PIL and torchvision.",
        command="python scripts/bench_data.py jpeg",
        avoid="Short runs, images of a few dozen pixels, and classes that show in one small place.",
        audit="RandomResizedCrop on PIL images, or ToTensor before a crop.",
        about=("augment/resized_crop",),
    ),
    Technique(
        name="mixup",
        kind="training",
        on=("augment.mixup=0.2",),
        why="Training on blends of two samples and their targets reduces memorization.",
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
        why="With a patch of another image pasted in, the network cannot rely on one part of an object.",
        claim="ResNet-50 on ImageNet, 300 epochs: top-1 error from 23.68 to 21.40 %; PyramidNet-200 on "
        "CIFAR-100: from 16.45 to 14.47 %.",
        source="Yun, Han, Oh, Chun, Choe, Yoo 2019, arXiv:1905.04899.",
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
        Unused.unless("augment.policy", ("rand",), "augment.rand_ops", "augment.rand_magnitude"),
        Unused.unless("augment.policy", ("auto",), "augment.auto_table"),
        Unused.unless("augment.policy", ("augmix",), "augment.augmix_severity"),
    ),
    panel=panel,
    techniques=TECHNIQUES,
)
