"""Any common picture file as an `ImageMedia`. Pillow decodes; limits are checked before a pixel is made."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vkit.errors import MissingExtra
from vkit.media.items import ImageMedia
from vkit.media.unusable import UnusableMedia

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""What is decoded. Formats that name other files, run programs or are rarely fuzzed are left out."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a picture may cost."""

    max_bytes: int = 1 << 28
    """Size of the file."""
    max_pixels: int = 1 << 26
    """Width times height; 8192 x 8192."""


DEFAULT_LIMITS = ImageLimits()


def decode_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS) -> ImageMedia:
    """The picture, upright as its EXIF data say, what is transparent over white; of an animation the first frame.

    Raises:
        UnusableMedia: no picture, a damaged one, or one above a limit.
        MissingExtra: Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise MissingExtra("image input", "video") from None
    if not data:
        raise UnusableMedia("image", "it is empty")
    if len(data) > limits.max_bytes:
        raise UnusableMedia("image", f"it has {len(data)} bytes, at most {limits.max_bytes} are taken")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels:
                message = f"{width} x {height} pixels, at most {limits.max_pixels} in all are taken"
                raise UnusableMedia("image", message)
            image.load()
            upright = ImageOps.exif_transpose(image)
            return ImageMedia(rgb_pixels(upright))
    except UnidentifiedImageError:
        raise UnusableMedia("image", f"no known picture format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise UnusableMedia("image", f"more than {limits.max_pixels} pixels") from None
    except (OSError, ValueError, SyntaxError, IndexError, EOFError, TypeError, OverflowError) as error:
        # What Pillow's decoders raise over damaged files.
        raise UnusableMedia("image", f"it is damaged ({error})") from None


def rgb_pixels(image: Image.Image) -> NDArray[np.uint8]:
    """Pixels (H, W, 3) of a picture in any mode."""
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        return _from_deep_gray(np.asarray(image), image.mode)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        over = image.convert("RGBA")
        white = Image.new("RGBA", over.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, over)
    pixels: NDArray[np.uint8] = np.asarray(image.convert("RGB"))
    return pixels


def _from_deep_gray(values: NDArray[Any], mode: str) -> NDArray[np.uint8]:
    """16-bit and 32-bit gray as 8-bit: Pillow's own conversion would clip instead of scale."""
    top = 1.0 if mode == "F" and values.size and float(np.nanmax(values)) <= 1.0 else 65535.0
    gray = np.nan_to_num(values.astype(np.float64) / top * 255.0)
    return np.repeat(np.clip(np.rint(gray), 0, 255).astype(np.uint8)[..., None], 3, axis=2)
