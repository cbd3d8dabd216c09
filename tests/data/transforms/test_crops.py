"""Random resized crops: drawn as torchvision draws them, cut as torchvision cuts them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from running import same_pixels
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as v2

from ptfast.data.map_source import MapSource
from ptfast.data.sampling import counter_draws
from ptfast.data.transforms.resized_crops import draw_boxes, resize, resized_crop

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def image(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def boxes_of(number: int, height: int, width: int, epoch: int = 0, scale: tuple[float, float] = SCALE):
    sizes = np.full(number, height), np.full(number, width)
    return draw_boxes(5, epoch, np.arange(number), *sizes, scale, RATIO)


def pixels_of(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Relative boxes in pixels of the image that they were drawn for."""
    return boxes * [height, width, height, width]


@pytest.mark.parametrize("shape", [(400, 500), (90, 60), (50, 300), (400, 40)])
def test_boxes_are_distributed_as_those_of_torchvision(shape: tuple[int, int]):
    number = 4000
    ours = pixels_of(boxes_of(number, *shape), *shape)
    torch.manual_seed(0)
    picture = torch.zeros(3, *shape)
    parameters = [RandomResizedCrop.get_params(picture, list(SCALE), list(RATIO)) for _ in range(number)]
    theirs = np.array(parameters, float)
    for column in range(4):
        # Kolmogorov and Smirnov's distance of two samples; 1.63 is its 99 % bound.
        edges = np.unique(np.concatenate([ours[:, column].round(), theirs[:, column]]))
        below = [
            np.searchsorted(np.sort(values), edges + 0.5) / number
            for values in (ours[:, column], theirs[:, column])
        ]
        assert np.abs(below[0] - below[1]).max() < 1.63 * np.sqrt(2 / number)


def test_boxes_lie_between_the_pixels_of_the_original():
    boxes = pixels_of(boxes_of(500, 333, 251), 333, 251)
    assert np.abs(boxes - boxes.round()).max() < 1e-9
    assert boxes.min() >= 0
    assert (boxes[:, 2:].round() >= 1).all()
    assert ((boxes[:, :2] + boxes[:, 2:]).round() <= [333, 251]).all()


def test_where_no_box_fits_the_middle_is_taken():
    # No box of a shape between 3 to 4 and 4 to 3 has more than a fifteenth of the area.
    boxes = pixels_of(boxes_of(20, 20, 400, scale=(0.9, 1.0)), 20, 400)
    assert np.array_equal(boxes.round(), np.tile([0, (400 - 27) // 2, 20, 27], (20, 1)))
    tall = pixels_of(boxes_of(20, 400, 20, scale=(0.9, 1.0)), 400, 20)
    assert np.array_equal(tall.round(), np.tile([(400 - 27) // 2, 0, 27, 20], (20, 1)))


def test_a_box_depends_on_nothing_but_its_own_sample():
    indices, heights, widths = np.arange(50), np.arange(50) + 30, 200 - np.arange(50)
    whole = draw_boxes(1, 3, indices, heights, widths, SCALE, RATIO)
    some = np.array([7, 40, 7, 0])
    assert np.array_equal(whole[some], draw_boxes(1, 3, some, heights[some], widths[some], SCALE, RATIO))
    assert not np.array_equal(whole, draw_boxes(1, 4, indices, heights, widths, SCALE, RATIO))
    assert not np.array_equal(whole, draw_boxes(2, 3, indices, heights, widths, SCALE, RATIO))


def test_streams_of_boxes_meet_no_other():
    others = [
        value
        for name, value in vars(counter_draws).items()
        if name.isupper() and name[0] != "_" and isinstance(value, int)
    ]
    assert [stream for stream in others if counter_draws.BOX <= stream < counter_draws.BOX + 22] == [
        counter_draws.BOX
    ]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mirrored", [False, True])
def test_a_crop_is_that_of_torchvision(channels: int, mirrored: bool):
    pixels = image(37, 52, channels)
    for box in boxes_of(10, 37, 52):
        top, left, height, width = (round(x) for x in pixels_of(box, 37, 52))
        picture = torch.from_numpy(pixels).permute(2, 0, 1)
        expected = v2.resized_crop(picture, top, left, height, width, [24, 24], antialias=True)
        expected = (expected.flip(-1) if mirrored else expected).permute(1, 2, 0)
        assert same_pixels(resized_crop(pixels, box, mirrored, 24), expected)


def test_a_box_is_the_same_part_of_a_smaller_copy():
    large = resize(torch.from_numpy(image(8, 10)), 400, 500).numpy()
    small = resize(torch.from_numpy(large), 256, 320).numpy()
    for box in boxes_of(20, 400, 500):
        one, other = (resized_crop(pixels, box, False, 32).int() for pixels in (large, small))
        # Edges go to the nearest pixel of the copy, half a pixel away at most.
        assert (one - other).abs().float().mean() < 3


def test_a_crop_has_one_pixel_at_least():
    tiny = np.array([0.999, 0.999, 0.001, 0.001])
    pixels = image(5, 4)
    assert (resized_crop(pixels, tiny, False, 6).numpy() == pixels[4, 3]).all()


def test_images_of_any_size_become_one_batch():
    images = [image(30, 40, seed=1), image(20, 20, seed=2)]
    images[1].flags.writeable = False

    class Images(MapSource):
        def original(self, index: int) -> np.ndarray:
            return images[index]

    boxes = draw_boxes(0, 0, np.arange(2), np.array([30, 20]), np.array([40, 20]), SCALE, RATIO)
    batch = Images().crops(np.arange(2), boxes, 16, np.array([0, 1]))
    assert batch.shape == (2, 16, 16, 3)
    assert torch.equal(batch[1], resized_crop(images[1], boxes[1], True, 16))
