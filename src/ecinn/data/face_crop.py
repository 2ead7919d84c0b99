"""The square of a face that a model knows: cropped, resized and stored as before training."""

import io
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

ALIGNED = (178, 218)
"""Width and height of CelebA's aligned faces."""
HQ_CORNER, HQ_SIDE = (14.0, 40.7), 150.0
"""CelebA-HQ's square in pixels of the aligned face, for a face of average proportions.

CelebA aligns faces to eyes at (70.2, 111.5) and (107.7, 111.5) and a mouth at (88.9, 153.0).
CelebA-HQ's square is upright with respect to eyes and mouth, its centre is a tenth of the way from
the eyes to the mouth, and half its side is 2 × the distance of the eyes, or 1.8 × that of eyes and
mouth if it is larger. The square differs a little from face to face; this is not undone.
"""
ADVICE = "the face should fill the frame: eyes level at half the height, mouth at four fifths"


@dataclass(frozen=True)
class FaceCrop:
    """The centred square of CelebA's aligned faces that a model was trained on.

    The defaults reproduce the training faces of the shipped models pixel by pixel.
    """

    side: int = 148
    """Side of the square, in pixels of the aligned face."""
    webp_quality: int | None = 88
    """Quality of the WebP compression of resized faces; None does not compress them.

    Training faces were stored like this, which smooths them. Without it, 5 % of real faces are
    flagged because their texture is rougher.
    """

    def fit(
        self, face: Image.Image, size: tuple[int, int], *, hq: bool = False
    ) -> tuple[Image.Image, str]:
        """Crop and resize a face to height × width; also return what was done, "" for nothing.

        A picture with CelebA's aspect ratio is cropped as an aligned face. A square is taken as
        already cropped, and of any other picture the central square is taken. A picture of the
        given size is not changed.

        Args:
            hq: the face has CelebA-HQ's framing instead.
        """
        height, width = size
        before, after = f"{face.width}×{face.height}", f"resized to {width}×{height}"
        if hq:
            square, note = self._crop_hq(face), f"taken as CelebA-HQ ({before}) and {after}"
        elif face.size == (width, height):
            return face, ""
        elif is_aligned(face.size):
            square = _crop_centre(face, round(face.width * self.side / ALIGNED[0]))
            shape = f"{square.width}×{square.height}"
            note = f"taken as CelebA's aligned face: cropped from {before} to {shape}, {after}"
        elif face.width == face.height:
            square, note = face, f"taken as cropped, {after} from {before}; {ADVICE}"
        else:
            square = _crop_centre(face, min(face.size))
            shape = f"{square.width}×{square.height}"
            note = f"cropped from {before} to the central {shape}, {after}; {ADVICE}"
        resized = ImageOps.fit(square, (width, height), Image.Resampling.LANCZOS)
        return self._store(resized), note

    def _crop_hq(self, face: Image.Image) -> Image.Image:
        """Crop the same square from CelebA-HQ; what lies outside the picture is mirrored."""
        scale = face.width / HQ_SIDE
        left, top = (
            round(((whole - self.side) / 2 - corner) * scale)
            for whole, corner in zip(ALIGNED, HQ_CORNER, strict=True)
        )
        side = round(self.side * scale)
        right, bottom = left + side - face.width, top + side - face.height
        margins = ((max(0, -top), max(0, bottom)), (max(0, -left), max(0, right)), (0, 0))
        padded = np.pad(np.asarray(face.convert("RGB")), margins, "reflect")
        left, top = max(0, left), max(0, top)
        square = Image.fromarray(padded).crop((left, top, left + side, top + side))
        return square.convert(face.mode)

    def _store(self, face: Image.Image) -> Image.Image:
        if self.webp_quality is None:
            return face
        file = io.BytesIO()
        # Method 6 is what the training faces were written with; others differ by 2 of 255 levels.
        face.save(file, "WEBP", quality=self.webp_quality, method=6)
        with Image.open(file) as stored:
            return stored.convert(face.mode)


CELEBA_CROP = FaceCrop()
"""The crop of the shipped face models."""


def is_aligned(size: tuple[int, int]) -> bool:
    """Return whether width and height have the ratio 178 : 218, to within a pixel."""
    width, height = size
    return abs(width - height * ALIGNED[0] / ALIGNED[1]) < 1 and width < height


def _crop_centre(picture: Image.Image, side: int) -> Image.Image:
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    return picture.crop((left, top, left + side, top + side))
