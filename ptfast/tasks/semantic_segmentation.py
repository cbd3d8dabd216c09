"""One class per pixel: cross entropy, and mean intersection over union and accuracy as metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptfast.core.protocols import IGNORE_INDEX, DataInfo, Metrics, Mixed
from ptfast.core.sections.section import NotNegative
from ptfast.tasks.cross_entropy import CrossEntropyTask, Weights
from ptfast.tasks.loss_functions import LossFunction
from ptfast.tasks.ratios import DeviceSums
from ptfast.tasks.supervised import names_of_classes

if TYPE_CHECKING:
    from PIL.Image import Image

AUXILIARY_WEIGHT = 0.5
"""Weight of the loss of an auxiliary head in training, as in torchvision's references/segmentation."""


class SemanticSegmentation(CrossEntropyTask):
    """Cross entropy between logits (batch, num_classes, height, width) and masks (batch, height, width).

    Each pixel that is not ignored is an item, so images with many ignored pixels weigh less. If a model
    returns a mapping, like torchvision's, its logits are `out`; the loss of an auxiliary head, `aux`, is
    added with weight 0.5 in training.

    Args:
        loss: replaces the cross entropy, see `SupervisedTask`; gets logits as above and int64 masks.
        ignore_index: label of pixels to ignore; 255 in many datasets.
        class_weights: weight of each class: a list, a mapping by name, or `balanced` by its training pixels.
        focal_gamma: focal loss: a pixel whose class has probability p has weight (1 - p) ** gamma.
    """

    metric = "mean_iou"
    mode = "max"
    counts_samples = False
    measures_aligned = True

    def __init__(
        self,
        info: DataInfo,
        loss: LossFunction | None = None,
        ignore_index: int = IGNORE_INDEX,
        class_weights: Literal["balanced"] | Weights | None = None,
        focal_gamma: NotNegative = 0.0,
    ) -> None:
        super().__init__(info, loss, 0.0, class_weights, focal_gamma)
        self.ignore_index = ignore_index

    def aligned(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _logits(outputs), targets.reshape(len(targets), *targets.shape[-2:]).long()

    def outputs_of(self, given: Any) -> Any:
        # Keep the whole mapping: the loss also uses an auxiliary head.
        return given if isinstance(given, Mapping) and "out" in given else super().outputs_of(given)

    def misfit(self, outputs: Any, data: Any) -> str | None:
        targets = data[1].targets if isinstance(data[1], Mixed) else data[1]
        outputs, targets = self.aligned(outputs, targets)
        return super().misfit(outputs, (None, targets))

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        # Torch's loss with reduction="sum" has no deterministic CUDA kernel for pixels.
        return SemanticSegmentation.sample_losses(self, outputs, targets).sum()

    def sample_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        if isinstance(outputs, Mapping) and "aux" in outputs:
            losses_of = SemanticSegmentation.sample_losses
            main, auxiliary = (losses_of(self, outputs[head], targets) for head in ("out", "aux"))
            return main + AUXILIARY_WEIGHT * auxiliary
        return super().sample_losses(outputs, targets)

    def evaluation_loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.loss_sum(_logits(outputs), targets)

    def metrics(self) -> Metrics:
        return Overlaps(self.num_classes, self.ignore_index)

    def predict(self, model: nn.Module, inputs: Any) -> list[dict[str, Any]]:
        """Return the mask of each image, rows of class indices, and each class's share of its pixels."""
        logits = _logits(self.forward(model, inputs))[:, : self.num_classes]
        names = names_of_classes(self.info)
        masks = logits.argmax(1)
        shares = F.one_hot(masks, self.num_classes).flatten(1, 2).float().mean(1)
        return [
            {"shares": {name: share for name, share in zip(names, row, strict=True) if share}, "mask": mask}
            for row, mask in zip(shares.tolist(), masks.tolist(), strict=True)
        ]


def mask_picture(mask: Any) -> Image:
    """Return a mask, (height, width) of class indices below 256, as a picture in the colors of VOC."""
    from PIL import Image

    picture = Image.fromarray(np.asarray(mask, np.uint8), "P")
    bits = np.arange(256)[:, None] >> np.arange(0, 24, 3)[None]
    # Each next three bits of a class index set the next-highest bits of its red, green and blue.
    colors = [((bits >> channel & 1) << np.arange(7, -1, -1)).sum(axis=1) for channel in range(3)]
    picture.putpalette(np.stack(colors, axis=1).astype(np.uint8).tobytes())
    return picture


class Overlaps(DeviceSums):
    """Mean intersection over union and pixel accuracy of one evaluation, from one table of counts.

    Rows are the masks' classes, columns the predicted ones; the last column counts classes that the data
    lacks. The mean excludes classes that occur in no mask and no prediction.

    Source: Everingham et al. 2010, the PASCAL VOC challenge, section 4.1, for the intersection over union.
    """

    def __init__(self, num_classes: int, ignore_index: int) -> None:
        # The extra entry counts ignored pixels, so that batches need not be filtered by value.
        super().__init__(("mean_iou", "pixel_accuracy"), num_classes * (num_classes + 1) + 1)
        self._num_classes, self._ignore_index = num_classes, ignore_index

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch of logits (batch, num_classes, height, width) and masks (batch, height, width)."""
        table = self.sums
        predicted = outputs.argmax(1).clamp(max=self._num_classes)
        places = targets * (self._num_classes + 1) + predicted
        places = places.where(targets != self._ignore_index, len(table) - 1).flatten()
        table.scatter_add_(0, places, table.new_ones(()).expand_as(places))

    def compute(self) -> dict[str, Tensor]:
        """Return the metrics over all batches of all ranks, 0-d; 0 without items. Waits for all ranks."""
        table = self.over_ranks()[:-1].view(self._num_classes, self._num_classes + 1)
        right = table.diagonal()
        union = table.sum(0)[:-1] + table.sum(1) - right
        overlap = torch.where(union > 0, right / union, 0.0)
        total = table.sum()
        return {
            "mean_iou": overlap.sum() / (union > 0).sum().clamp(min=1),
            "pixel_accuracy": torch.where(total > 0, right.sum() / total, 0.0),
        }


def _logits(outputs: Any) -> Any:
    return outputs.get("out") if isinstance(outputs, Mapping) else outputs
