"""The config section of random changes to training images."""

from __future__ import annotations

from typing import Annotated, Literal

from ptfast.core.errors import ConfigError, PtfastError
from ptfast.core.sections.coerce import Range
from ptfast.core.sections.section import (
    Count,
    Family,
    Fraction,
    Natural,
    NotNegative,
    Positive,
    Section,
    Unused,
    UpToOne,
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
    """Mirror a random half of the images each epoch; `alternating` mirrors each one every second epoch."""
    resized_crop: tuple[UpToOne, UpToOne] | None = None
    """Smallest and largest fraction of an image's area to crop and scale to full size; null for none."""
    resized_ratio: tuple[Positive, Positive] = (0.75, 1.3333)
    """Smallest and largest aspect ratio (width / height) of that crop."""
    cutout: Natural = 0
    """Side in pixels of a square that is hidden; 0 for none."""
    erasing: Chance = 0.0
    """Fraction of the images in which a random box is hidden."""
    color_jitter: Strength = 0.0
    """Largest relative change of brightness, contrast and saturation."""
    brightness: Strength | None = None
    """Largest change of brightness; null for that of `color_jitter`."""
    contrast: Strength | None = None
    """Largest change of contrast; null for that of `color_jitter`."""
    saturation: Strength | None = None
    """Largest change of saturation; null for that of `color_jitter`."""
    hue: Annotated[float, Range(0, 0.5)] = 0.0
    """Largest hue shift either way, as a fraction of the color wheel."""
    grayscale: Chance = 0.0
    """Fraction of the images turned gray."""
    blur: Chance = 0.0
    """Fraction of the images that are blurred."""
    policy: Literal["trivial", "rand", "auto"] | None = None
    """Published choice of random operations: TrivialAugment, RandAugment or AutoAugment."""
    rand_ops: Count = 2
    """Number of operations that RandAugment applies to each image."""
    rand_magnitude: Annotated[int, Range(0, 30)] = 9
    """Strength of RandAugment's operations, from 0 to 30."""
    auto_table: Literal["imagenet", "cifar10", "svhn"] = "imagenet"
    """Data for which AutoAugment's operations were found."""
    rotation_degrees: Annotated[float, Range(0, 180)] = 0.0
    """Largest rotation either way."""
    translation: Annotated[float, Range(0, 1)] = 0.0
    """Largest shift each way, as a fraction of height and width."""
    scaling: Fraction = 0.0
    """Largest relative change of size."""
    mixup: NotNegative = 0.0
    """Blend each sample with another: parameter of its Beta distribution; 0 for none."""
    cutmix: NotNegative = 0.0
    """Paste a patch of another image into each: parameter of its Beta distribution; 0 for none."""
    targets: Literal["auto", "keep"] = "auto"
    """`auto` moves masks with their images and rejects targets that may be coordinates; `keep` moves none."""

    @property
    def jitter(self) -> dict[str, float]:
        """Largest change of each color property."""
        own = {"brightness": self.brightness, "contrast": self.contrast, "saturation": self.saturation}
        return {name: self.color_jitter if most is None else most for name, most in own.items()}


def one_way_of_cropping(augment: AugmentSection) -> PtfastError | None:
    """Return an error for two ways of cropping or erasing at once, or for a reversed range."""
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
    """Return the enabled augmentations, for the panel."""
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


FAMILY = Family(
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
    ),
    panel=panel,
)
