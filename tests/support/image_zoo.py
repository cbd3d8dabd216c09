"""A hundred image files of all kinds, each with the pixels that it must give, or the error.

Files whose values matter are written byte by byte here, so that no library's reading is compared with its own
writing; lossy files are compared with PIL's pixels.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin, TiffImagePlugin

Array = NDArray[Any]
RNG = np.random.default_rng(0)
COLOR = RNG.integers(0, 256, (9, 13, 3)).astype(np.uint8)
GREY = COLOR[..., 0]
DEEP = RNG.integers(0, 65536, (9, 13)).astype(np.uint16)
DEEP_COLOR = RNG.integers(0, 65536, (9, 13, 4)).astype(np.uint16)
SMOOTH = np.linspace(0, 255, 40 * 56 * 3).reshape(40, 56, 3).astype(np.uint8)
UNKNOWN = "so its white is unknown"
SHALLOW = "12 bits in 16"
DAMAGED = "is damaged or truncated"
NO_IMAGE = "is not an image that can be decoded"


class ZooImage(NamedTuple):
    name: str
    content: bytes
    expected: Array | str
    """uint8 (height, width, 3), or part of the message of the D005."""
    within: int = 0
    """Largest difference of a value that another rounding may make."""


def rgb(grey: Array) -> Array:
    return np.repeat(np.asarray(grey, np.uint8)[..., None], 3, axis=2)


def png(values: Array, bits: int, kind: int, *chunks: tuple[bytes, bytes], filtered: bytes = b"") -> bytes:
    """A PNG of color type `kind`; rows are (height, bytes) if packed, else values of 8 or 16 bits."""
    rows = values.astype(">u2") if bits == 16 else values.astype(np.uint8)
    body = filtered or b"".join(b"\0" + row.tobytes() for row in rows)
    width = values.shape[1] * 8 // bits if bits < 8 else values.shape[1]
    header = struct.pack(">IIBBBBB", width, values.shape[0], bits, kind, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(body)), (b"IEND", b"")]
    written = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def tiff(values: Array, bits: int, *, sample: int = 1, photometric: int = 1, big: bool = False) -> bytes:
    """An uncompressed TIFF; `sample` is 1 for unsigned, 2 for signed, 3 for floats."""
    order = ">" if big else "<"
    data = values.tobytes()
    height, width = values.shape[:2]
    depth = values.shape[2] if values.ndim == 3 else 1
    width = width * 8 // bits if bits == 12 else width
    end = 8 + len(data) + len(data) % 2
    # Several numbers of bits stand behind the tags.
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, depth, bits if depth == 1 else end)]
    tags += [(259, 3, 1, 1), (262, 3, 1, photometric), (273, 4, 1, 8), (277, 3, 1, depth)]
    tags += [(278, 4, 1, height), (279, 4, 1, len(data)), (339, 3, 1, sample)]
    several = struct.pack(f"{order}{depth}H", *[bits] * depth) if depth > 1 else b""
    first = end + len(several)
    out = (b"MM\0*" if big else b"II*\0") + struct.pack(f"{order}I", first) + data
    out = out.ljust(end, b"\0") + several + struct.pack(f"{order}H", len(tags))
    for tag, kind, count, value in tags:
        packed = (
            struct.pack(f"{order}HH", value, 0)
            if kind == 3 and count == 1
            else struct.pack(f"{order}I", value)
        )
        out += struct.pack(f"{order}HHI", tag, kind, count) + packed
    return out + struct.pack("<I", 0)


def pnm(kind: bytes, values: Array, most: int) -> bytes:
    height, width = values.shape[:2]
    header = b"%s\n# made here\n%d %d\n" % (kind, width, height) + (b"%d\n" % most if most else b"")
    if kind in (b"P1", b"P2", b"P3"):
        return header + " ".join(map(str, values.ravel().tolist())).encode() + b"\n"
    return header + values.astype(">u2" if most > 255 else np.uint8).tobytes()


def saved(image: Image.Image, kind: str, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def opened(content: bytes) -> Array:
    """The first frame as PIL alone converts it."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def pngs() -> Iterator[ZooImage]:
    yield ZooImage("rgb8.png", png(COLOR, 8, 2), COLOR)
    yield ZooImage("grey8.png", png(GREY, 8, 0), rgb(GREY))
    yield ZooImage("grey16.png", png(DEEP, 16, 0), rgb(DEEP >> 8))
    yield ZooImage("rgb16.png", png(DEEP_COLOR[..., :3], 16, 2), (DEEP_COLOR[..., :3] >> 8).astype(np.uint8))
    yield ZooImage("rgba16.png", png(DEEP_COLOR, 16, 6), (DEEP_COLOR[..., :3] >> 8).astype(np.uint8))
    yield ZooImage("la16.png", png(DEEP_COLOR[..., :2], 16, 4), rgb(DEEP_COLOR[..., 0] >> 8))
    yield ZooImage("la8.png", png(COLOR[..., :2], 8, 4), rgb(GREY))
    alpha = np.concatenate([COLOR, GREY[..., None]], 2)
    yield ZooImage("rgba8.png", png(alpha, 8, 6), COLOR)
    yield ZooImage("grey_key.png", png(GREY, 8, 0, (b"tRNS", struct.pack(">H", int(GREY[0, 0])))), rgb(GREY))
    key = struct.pack(">HHH", *COLOR[0, 0].tolist())
    yield ZooImage("rgb_key.png", png(COLOR, 8, 2, (b"tRNS", key)), COLOR)
    table = RNG.integers(0, 256, (256, 3)).astype(np.uint8)
    palette = (b"PLTE", table.tobytes())
    yield ZooImage("palette.png", png(GREY, 8, 3, palette), table[GREY])
    clear = (b"tRNS", bytes(range(256)))
    yield ZooImage("palette_clear.png", png(GREY, 8, 3, palette, clear), table[GREY])
    yield ZooImage("palette_one_clear.png", png(GREY, 8, 3, palette, (b"tRNS", b"\0")), table[GREY])
    for bits in (1, 2, 4):
        packed = RNG.integers(0, 256, (8, 3)).astype(np.uint8)
        each = np.stack([packed >> shift & (2**bits - 1) for shift in range(8 - bits, -1, -bits)], 2)
        values = each.reshape(8, -1)
        yield ZooImage(f"grey{bits}.png", png(packed, bits, 0), rgb(values * (255 // (2**bits - 1))))
        few = (b"PLTE", table[: 2**bits].tobytes())
        yield ZooImage(f"palette{bits}.png", png(packed, bits, 3, few), table[values])
    ups = np.diff(GREY.astype(int), axis=0, prepend=0).astype(np.uint8)
    by_row = b"".join(b"\2" + row.tobytes() for row in ups)
    yield ZooImage("filtered.png", png(GREY, 8, 0, filtered=by_row), rgb(GREY))
    yield ZooImage("gamma.png", png(COLOR, 8, 2, (b"gAMA", struct.pack(">I", 100_000))), COLOR)
    yield ZooImage("shallow.png", png(DEEP >> 4, 16, 0), SHALLOW)
    yield ZooImage("shallow_rgb.png", png(DEEP_COLOR[..., :3] >> 4, 16, 2), SHALLOW)
    yield ZooImage("black16.png", png(DEEP * 0, 16, 0), rgb(GREY * 0))
    yield ZooImage("white16.png", png(DEEP * 0 + 65535, 16, 0), rgb(GREY * 0 + 255))
    comment = PngImagePlugin.PngInfo()
    comment.add_text("c", "x" * 2_000_000, zip=True)
    yield ZooImage("long_comment.png", saved(Image.fromarray(COLOR), "PNG", pnginfo=comment), DAMAGED)
    frames = [Image.fromarray(COLOR), Image.fromarray(255 - COLOR)]
    yield ZooImage("animated.png", saved(frames[0], "PNG", save_all=True, append_images=frames[1:]), COLOR)
    yield ZooImage("truncated.png", png(COLOR, 8, 2)[:200], DAMAGED)
    broken = bytearray(png(COLOR, 8, 2))
    broken[60] ^= 255
    yield ZooImage("bad_data.png", bytes(broken), DAMAGED)
    yield ZooImage("header_alone.png", png(COLOR, 8, 2)[:33], NO_IMAGE)
    content = png(np.zeros((1, 1)), 8, 0)
    for side in (12_000, 40_000):
        huge = content[:8] + huge_header(side) + content[33:]
        yield ZooImage(f"huge_{side}.png", huge, f"claims {side * side:,} pixels, more than 100,000,000")


def huge_header(side: int) -> bytes:
    data = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return struct.pack(">I", 13) + data + struct.pack(">I", zlib.crc32(data))


def tiffs() -> Iterator[ZooImage]:
    for big in (False, True):
        order, word = (">", "big") if big else ("<", "little")
        deep = DEEP.astype(f"{order}u2")
        yield ZooImage(f"grey16_{word}.tif", tiff(deep, 16, big=big), rgb(DEEP >> 8))
        yield ZooImage(
            f"white_first_{word}.tif",
            tiff(deep, 16, photometric=0, big=big),
            NO_IMAGE if big else rgb(255 - (DEEP >> 8)),
        )
        color = DEEP_COLOR[..., :3].astype(f"{order}u2")
        right = (DEEP_COLOR[..., :3] >> 8).astype(np.uint8)
        yield ZooImage(f"rgb16_{word}.tif", tiff(color, 16, photometric=2, big=big), right)
        floats = (DEEP / 65535).astype(f"{order}f4")
        right = rgb(np.rint(floats.astype(np.float32) * np.float32(255)))
        yield ZooImage(f"float_{word}.tif", tiff(floats, 32, sample=3, big=big), right)
        whole = GREY.astype(f"{order}i4")
        yield ZooImage(f"int32_{word}.tif", tiff(whole, 32, sample=2, big=big), rgb(GREY))
        yield ZooImage(f"int32_wide_{word}.tif", tiff(whole * 70_000, 32, sample=2, big=big), UNKNOWN)
    yield ZooImage("grey8.tif", tiff(GREY, 8), rgb(GREY))
    yield ZooImage("white_first8.tif", tiff(GREY, 8, photometric=0), rgb(255 - GREY))
    yield ZooImage("rgb8.tif", tiff(COLOR, 8, photometric=2), COLOR)
    yield ZooImage("shallow.tif", tiff(DEEP >> 4, 16), SHALLOW)
    yield ZooImage("shallow_rgb.tif", tiff(DEEP_COLOR[..., :3] >> 4, 16, photometric=2), SHALLOW)
    packed = RNG.integers(0, 256, (8, 12)).astype(np.uint8)
    first, second, third = packed.reshape(8, 4, 3).astype(int).transpose(2, 0, 1)
    twelve = np.stack([first << 4 | second >> 4, (second & 15) << 8 | third], 2).reshape(8, 8)
    yield ZooImage("grey12.tif", tiff(packed, 12), rgb(twelve >> 4))
    yield ZooImage("float_whole.tif", tiff(GREY.astype("<f4"), 32, sample=3), rgb(GREY))
    yield ZooImage("float_wide.tif", tiff(GREY.astype("<f4") * 1.1, 32, sample=3), UNKNOWN)
    yield ZooImage("int32_ones.tif", tiff((GREY > 9).astype("<i4"), 32, sample=2), rgb(GREY > 9))
    yield ZooImage("float_negative.tif", tiff(-GREY.astype("<f4") / 255, 32, sample=3), UNKNOWN)
    missing = np.where(GREY > 99, np.nan, 0.5).astype("<f4")
    yield ZooImage("float_missing.tif", tiff(missing, 32, sample=3), UNKNOWN)
    yield ZooImage("float64.tif", tiff(GREY / 255, 64, sample=3), NO_IMAGE)
    yield ZooImage("signed16.tif", tiff((DEEP.astype(int) - 32768).astype("<i2"), 16, sample=2), UNKNOWN)
    yield ZooImage("unsigned32.tif", tiff(DEEP.astype("<u4") << 16, 32), UNKNOWN)
    for how in ("tiff_lzw", "tiff_adobe_deflate", "packbits"):
        yield ZooImage(f"{how}.tif", saved(Image.fromarray(DEEP), "TIFF", compression=how), rgb(DEEP >> 8))
    bits = Image.fromarray(GREY > 127)
    yield ZooImage("fax.tif", saved(bits, "TIFF", compression="group4"), rgb((GREY > 127) * 255))
    pages = [Image.fromarray(COLOR), Image.fromarray(255 - COLOR)]
    yield ZooImage("pages.tif", saved(pages[0], "TIFF", save_all=True, append_images=pages[1:]), COLOR)
    cmyk = Image.fromarray(np.concatenate([COLOR, GREY[..., None]], 2), "CMYK")
    ink = 255 - np.concatenate([COLOR, GREY[..., None]], 2).astype(int)
    yield ZooImage("cmyk.tif", saved(cmyk, "TIFF"), np.rint(ink[..., :3] * ink[..., 3:] / 255), within=1)
    lab = saved(Image.fromarray(COLOR, "LAB"), "TIFF")
    yield ZooImage("lab.tif", lab, opened(lab))
    turned = TiffImagePlugin.ImageFileDirectory_v2()
    turned[274] = 6
    # PIL turns TIFFs itself, and shows their turned size.
    yield ZooImage("turned.tif", saved(Image.fromarray(COLOR), "TIFF", tiffinfo=turned), np.rot90(COLOR, -1))
    yield ZooImage("truncated.tif", tiff(DEEP, 16)[:120], "")
    yield ZooImage("no_tags.tif", tiff(DEEP, 16)[:8], "")


def portable() -> Iterator[ZooImage]:
    yield ZooImage("grey8.pgm", pnm(b"P5", GREY, 255), rgb(GREY))
    yield ZooImage("grey16.pgm", pnm(b"P5", DEEP, 65535), rgb(DEEP >> 8))
    yield ZooImage("rgb8.ppm", pnm(b"P6", COLOR, 255), COLOR)
    deep = DEEP_COLOR[..., :3]
    # Where the file names its white, any number of bits is scaled by it.
    yield ZooImage("rgb16.ppm", pnm(b"P6", deep, 65535), np.rint(deep / 65535 * 255), within=1)
    yield ZooImage("rgb12.ppm", pnm(b"P6", deep >> 4, 4095), np.rint((deep >> 4) / 4095 * 255), within=1)
    yield ZooImage("grey12.pgm", pnm(b"P5", DEEP >> 4, 4095), rgb((DEEP >> 4) / 4095 * 255), within=1)
    yield ZooImage("grey7.pgm", pnm(b"P5", GREY >> 1, 127), rgb(np.rint((GREY >> 1) / 127 * 255)), within=1)
    dark = DEEP >> 9
    yield ZooImage("dark12.pgm", pnm(b"P5", dark, 4095), rgb(dark / 4095 * 255), within=1)
    yield ZooImage("shallow.pgm", pnm(b"P5", DEEP >> 4, 65535), SHALLOW)
    yield ZooImage("shallow.ppm", pnm(b"P6", deep >> 4, 65535), SHALLOW)
    yield ZooImage("ascii_grey.pgm", pnm(b"P2", GREY, 255), rgb(GREY))
    yield ZooImage("ascii_rgb.ppm", pnm(b"P3", COLOR, 255), COLOR)
    yield ZooImage("ascii16.pgm", pnm(b"P2", DEEP, 65535), rgb(DEEP >> 8))
    yield ZooImage("bits.ppm", pnm(b"P1", (GREY > 127).astype(int), 0), rgb((GREY <= 127) * 255))
    yield ZooImage("truncated.pgm", pnm(b"P5", DEEP, 65535)[:90], DAMAGED)
    yield ZooImage("truncated.ppm", pnm(b"P6", COLOR, 255)[:90], DAMAGED)
    floats = np.flipud(GREY / 255).astype("<f4")
    header = b"Pf\n%d %d\n-1.0\n" % GREY.shape[::-1]
    yield ZooImage("float.ppm", header + floats.tobytes(), rgb(GREY))
    yield ZooImage("float_wide.ppm", header + (floats * 4).tobytes(), UNKNOWN)


def lossy() -> Iterator[ZooImage]:
    """JPEG, WebP, BMP and GIF, against PIL's pixels where they are not known."""
    smooth = Image.fromarray(SMOOTH)
    for name, how in {
        "plain": {},
        "progressive": {"progressive": True},
        "full_chroma": {"subsampling": 0, "quality": 95},
        "half_chroma": {"subsampling": 1},
        "optimized": {"optimize": True},
        "restarts": {"restart_marker_rows": 1},
        "worst": {"quality": 1},
        "rgb_inside": {"keep_rgb": True},
    }.items():
        content = saved(smooth, "JPEG", **how)
        yield ZooImage(f"{name}.jpg", content, opened(content))
    for orientation in (3, 6, 8):
        exif = Image.Exif()
        exif[274] = orientation
        content = saved(smooth, "JPEG", exif=exif)
        yield ZooImage(f"turned_{orientation}.jpeg", content, opened(content))
    for mode in ("L", "CMYK"):
        content = saved(smooth.convert(mode), "JPEG")
        yield ZooImage(f"{mode.lower()}.jpg", content, opened(content))
    content = saved(smooth, "JPEG")
    yield ZooImage("truncated.jpg", content[: len(content) // 2], DAMAGED)
    yield ZooImage("cut_in_header.jpg", content[:40], DAMAGED)
    yield ZooImage("no_end.jpg", content[:-2], "")
    yield ZooImage("after_end.jpg", content + b"more bytes", opened(content))
    yield ZooImage("empty.jpg", b"", "is empty (0 bytes)")
    yield ZooImage("text.jpg", b"this is no image", NO_IMAGE)
    yield ZooImage("page.png", b"<!DOCTYPE html><html>Not found</html>", NO_IMAGE)
    yield ZooImage("png_inside.jpg", png(COLOR, 8, 2), COLOR)
    yield ZooImage("jpeg_inside.png", content, opened(content))
    narrow = Image.new("RGB", (65_000, 1), (9, 8, 7))
    content = saved(narrow, "JPEG")
    yield ZooImage("narrow.jpg", content, opened(content))
    yield ZooImage("tall.png", png(np.full((30_000, 1), 7), 8, 0), np.full((30_000, 1, 3), 7))
    yield ZooImage("dot.png", png(np.full((1, 1), 7), 8, 0), np.full((1, 1, 3), 7))
    yield ZooImage("rgb.bmp", saved(Image.fromarray(COLOR), "BMP"), COLOR)
    yield ZooImage("grey.bmp", saved(Image.fromarray(GREY), "BMP"), rgb(GREY))
    yield ZooImage("bits.bmp", saved(Image.fromarray(GREY > 127), "BMP"), rgb((GREY > 127) * 255))
    alpha = Image.fromarray(np.concatenate([COLOR, GREY[..., None]], 2))
    yield ZooImage("alpha.bmp", saved(alpha, "BMP"), COLOR)
    yield ZooImage("truncated.bmp", saved(Image.fromarray(COLOR), "BMP")[:100], DAMAGED)
    yield ZooImage("grey.gif", saved(Image.fromarray(GREY), "GIF"), rgb(GREY))
    table = RNG.integers(0, 256, (256, 3)).astype(np.uint8)
    indexed = Image.fromarray(GREY)
    indexed.putpalette(table.tobytes())
    yield ZooImage("palette.gif", saved(indexed, "GIF"), table[GREY])
    yield ZooImage("clear.gif", saved(indexed, "GIF", transparency=int(GREY[0, 0])), table[GREY])
    moving = [indexed, indexed.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    content = saved(moving[0], "GIF", save_all=True, append_images=moving[1:], duration=50)
    yield ZooImage("moving.gif", content, table[GREY])
    yield ZooImage("truncated.gif", saved(indexed, "GIF")[:-60], DAMAGED)
    exact = saved(Image.fromarray(COLOR), "WEBP", lossless=True)
    yield ZooImage("lossless.webp", exact, COLOR)
    content = saved(smooth, "WEBP", quality=80)
    yield ZooImage("lossy.webp", content, opened(content))
    content = saved(alpha, "WEBP", lossless=True, exact=True)
    yield ZooImage("alpha.webp", content, COLOR)
    frames = [Image.fromarray(COLOR), Image.fromarray(255 - COLOR)]
    content = saved(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    yield ZooImage("moving.webp", content, COLOR)
    yield ZooImage("truncated.webp", exact[:60], "")


ZOO = [*pngs(), *tiffs(), *portable(), *lossy()]
