"""Batches of images in PNG, JPEG or another format that pillow reads; it must be installed on service and workers."""

from io import BytesIO

import numpy as np
from PIL import Image
from torch import Tensor
from vit import SIZE, normalised


def batch(columns: dict) -> dict[str, Tensor]:
    """Return a batch from some rows, whose images are the content of files."""
    images = [Image.open(BytesIO(image)).convert("RGB").resize((SIZE, SIZE)) for image in columns["image"]]
    return normalised([np.asarray(image) for image in images], columns)
