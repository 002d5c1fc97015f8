"""Pictures: pixels as Pillow's own functions have them, and one line for what is none."""

from __future__ import annotations

import base64
import tracemalloc
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from surroundings import examples

import edge

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def drawn(width: int = 37, height: int = 23) -> Any:
    """A picture whose corners differ, so that no orientation looks like another."""
    y, x = np.mgrid[:height, :width]
    return PIL.fromarray(np.stack([x * 255 // width, y * 255 // height, (x * y) % 256], -1).astype(np.uint8))


def saved(picture: Any, form: str, **options: Any) -> bytes:
    stream = BytesIO()
    picture.save(stream, form, **options)
    return stream.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once(form: str, orientation: int) -> None:
    from PIL import ImageOps

    exif = PIL.Exif()
    exif[0x0112] = orientation
    data = saved(drawn(), form, exif=exif.tobytes())
    expected = np.asarray(ImageOps.exif_transpose(PIL.open(BytesIO(data))).convert("RGB"))
    found = edge.Image(data)
    assert (found.height, found.width) == expected.shape[:2]
    np.testing.assert_array_equal(found.pixels, expected)


def test_modes_are_those_of_the_eye() -> None:
    rgb = drawn()
    quantized = rgb.quantize(64)
    for mode, data in {
        "palette": saved(quantized, "PNG"),
        "GIF": saved(quantized, "GIF"),
        "grey": saved(rgb.convert("L"), "BMP"),
        "CMYK": saved(rgb.convert("CMYK"), "JPEG"),
        "bits": saved(rgb.convert("1"), "PNG"),
    }.items():
        expected = np.asarray(PIL.open(BytesIO(data)).convert("RGB"))
        np.testing.assert_array_equal(edge.Image(data).pixels, expected, mode)
    deep = (np.arange(23 * 37, dtype=np.uint16) * 77).reshape(23, 37)
    found = edge.Image(saved(PIL.fromarray(deep), "PNG")).pixels[..., 1]
    assert np.abs(found - deep / 257).max() <= 0.5  # Pillow's own conversion cuts off at 255


def test_transparent_pixels_are_composed_on_white() -> None:
    rgba = np.dstack([np.asarray(drawn()), np.linspace(0, 255, 37 * 23).reshape(23, 37).astype(np.uint8)])
    white = PIL.new("RGBA", (37, 23), "white")
    white.alpha_composite(PIL.fromarray(rgba))
    expected = np.asarray(white.convert("RGB")).astype(int)
    for source in (rgba, saved(PIL.fromarray(rgba), "PNG")):
        assert np.abs(edge.Image(source).pixels - expected).max() <= 1
    keyed = PIL.new("P", (37, 23), 5)
    keyed.putpalette([7] * 768)
    assert (edge.Image(saved(keyed, "PNG", transparency=5)).pixels == 255).all()


def test_digest_comes_from_undecoded_bytes(tmp_path: Path) -> None:
    """And a file that changed since it was shown is refused."""
    pixels = np.asarray(drawn())
    file = tmp_path / "snap.png"
    file.write_bytes(saved(drawn(), "PNG"))
    url = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    cut = edge.Image(file.read_bytes()[:-40])
    same = {edge.Image(each).digest for each in (file, str(file), file.read_bytes())}
    assert same == {edge.Image.of(url).digest}
    arrays = {edge.Image(each).digest for each in (pixels, pixels.reshape(37, 23, 3))}
    assert len({cut.digest} | same | arrays) == 4
    with pytest.raises(edge.InputError, match="damaged"):
        _ = cut.pixels
    shown = edge.Image(file)
    file.write_bytes(saved(drawn().transpose(PIL.Transpose.ROTATE_180), "PNG"))
    for look in (lambda: shown.pixels, lambda: shown.url):
        with pytest.raises(edge.InputError, match=r"snap\.png has changed since it was shown"):
            look()


def test_large_jpeg_is_decoded_at_half_size() -> None:
    noise = PIL.effect_noise((500, 350), 90).resize((5000, 3500)).convert("RGB")
    for progressive in (False, True):
        found = edge.Image(saved(noise, "JPEG", quality=60, progressive=progressive))
        assert (found.width, found.height) == (2500, 1750)
        tracemalloc.start()
        pixels = found.pixels
        assert tracemalloc.get_traced_memory()[1] < 1.3 * pixels.nbytes  # of NumPy: strips, not a second copy
        tracemalloc.stop()
        assert max(found.within(4 << 20).pixels.shape) == 625 if not progressive else found.within(200 << 20) is found
        with pytest.raises(edge.InputError, match=r"takes .* while it is decoded"):
            found.within(1 << 20)
        small = np.asarray(noise.resize((2500, 1750), PIL.Resampling.BOX)).astype(int)
        assert np.abs(pixels - small).mean() < 4


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (b"", "is empty"),
        (b"%PDF-1.7 and so on", "is PDF, no JPEG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "is HEIC, no JPEG"),
        (saved(drawn(), "PNG")[:200], "damaged or cut off"),
        (saved(drawn(300, 200), "JPEG")[:900], "damaged or cut off"),
        (saved(drawn(300, 200), "WEBP")[:200], "damaged or cut off"),
        (saved(PIL.new("1", (1, 60_000)), "PNG"), "1 × 60000 pixels: one side is more than 200 times"),
        (lambda: saved(PIL.new("1", (20_000, 20_000)), "PNG"), "20000 × 20000 pixels, and 64 million are the most"),
        (b"RIFF\x40\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xff\x3f\0\xff\x3f\0", "16384 × 16384 pixels, and 64"),
        ("nowhere.png", "no such file"),
        ("/proc/self/mem", r"cannot be read \(Input/output error\)"),  # the system's words
        ("https://x.org/a.png", "https://x.org/a.png: addresses are not fetched"),
        (np.full((4, 4, 3), np.nan), "must be uint8"),
        (np.zeros((4, 4, 2), np.uint8), "must be uint8"),
        (np.zeros((0, 4, 3), np.uint8), "it is empty"),
        (None, "must be a path, bytes of a file, or an array"),
    ],
)
def test_invalid_picture_raises_one_line(source: Any, why: str) -> None:
    with pytest.raises(edge.InputError, match=why) as raised:
        _ = edge.Image(source() if callable(source) else source).pixels
    assert "\n" not in str(raised.value)


FILES = [
    saved(drawn().quantize(16), "PNG", transparency=3), saved(drawn(), "JPEG", progressive=True),
    saved(drawn(), "WEBP", lossless=True), saved(drawn(), "GIF"), saved(drawn(), "BMP"),
]  # fmt: skip


@settings(max_examples=examples(80))
@given(st.sampled_from(FILES), st.lists(st.tuples(st.floats(0, 1), st.binary(min_size=1, max_size=4)), max_size=6),
       st.floats(0, 1))  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_damaged_file_decodes_or_raises_one_line(data: bytes, changes: list[tuple[float, bytes]], kept: float) -> None:
    found = bytearray(data[: 1 + int(kept * len(data))] if kept < 0.5 else data)
    for place, value in changes:
        at = int(place * len(found))
        found[at : at + len(value)] = value
    with suppress(edge.InputError):
        picture = edge.Image(bytes(found))
        assert picture.pixels.shape == (picture.height, picture.width, 3)
