"""What a drawing shows, independent of fonts and of the version of Matplotlib.

`fingerprint` is written into every figure's file, so that a test can tell, without comparing
pictures, whether a committed figure is what the code draws from the committed rows.
"""

import hashlib
import json

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure as Drawing
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Text

DIGITS = 6


def fingerprint(drawing: Drawing) -> str:
    """The SHA-256 of `content`."""
    return hashlib.sha256(json.dumps(content(drawing)).encode()).hexdigest()


def content(drawing: Drawing) -> dict:
    """The texts and the data of a drawing: of the figure, its legends, and every panel."""
    return {
        "texts": [text.get_text() for text in drawing.texts],
        "legends": [legend_texts(legend) for legend in drawing.legends],
        "panels": [panel(axes) for axes in drawing.axes],
    }


def panel(axes: Axes) -> dict:
    """The texts and the data of a panel; data that nobody set, such as limits, are left out."""
    legend = axes.get_legend()
    artists = [artist for artist in axes.get_children() if artist is not axes.patch]
    return {
        "labels": [axes.get_title(), axes.get_xlabel(), axes.get_ylabel()],
        "scales": [axes.get_xscale(), axes.get_yscale()],
        "legend": legend_texts(legend) if legend else None,
        "texts": [text.get_text() for text in axes.texts],
        "lines": [line(artist) for artist in artists if isinstance(artist, Line2D)],
        "areas": [area(artist) for artist in artists if isinstance(artist, Collection)],
        "patches": [patch(artist) for artist in artists if is_drawn_patch(artist)],
        "images": [image(artist) for artist in artists if isinstance(artist, AxesImage)],
    }


def legend_texts(legend: Legend) -> list[str]:
    texts: list[Text] = legend.get_texts()
    return [text.get_text() for text in texts]


def line(artist: Line2D) -> list:
    """How a line looks and where its points are."""
    return [artist.get_linestyle(), str(artist.get_marker()), digits(artist.get_xydata())]


def area(artist: Collection) -> list:
    """The corners of a band, or of the bars of a spread."""
    return [digits(path.vertices) for path in artist.get_paths()]


def is_drawn_patch(artist: object) -> bool:
    """Whether it is a bar or a span; arrows of annotations depend on the size of the figure."""
    return type(artist) is Rectangle


def patch(artist: Patch) -> str:
    return digits(np.array([*artist.get_xy(), artist.get_width(), artist.get_height()]))


def image(artist: AxesImage) -> str:
    return digits(np.asarray(artist.get_array()))


def digits(values: np.ndarray) -> str:
    """A digest of the numbers to DIGITS significant digits."""
    text = " ".join(f"{value:.{DIGITS}g}" for value in np.asarray(values, float).ravel())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
