"""Drawn faces: images for a generator to learn where there are no photographs."""

from collections.abc import Iterator

import numpy as np

# The lightest and the darkest skin; all colours between them occur.
SKIN = np.array([[255, 224, 189], [88, 54, 35]], float)
HAIR = np.array([[35, 25, 20], [94, 58, 32], [205, 165, 95], [165, 70, 35], [175, 175, 175]], float)
EYES = np.array([[90, 56, 30], [70, 110, 165], [75, 120, 80]], float)
LIPS = np.array([175, 60, 70], float)
WHITE, DARK = np.full(3, 245.0), np.full(3, 20.0)


class Faces:
    """Faces of soft ellipses: head, hair, eyes, brows, nose and mouth. All labels are 0.

    Colours, sizes and places are random.

    count: the number of faces.
    side: the side of an image in pixels.
    seed: another seed gives other faces of the same kind.
    """

    title = source = "drawn faces"

    def __init__(self, *, count: int, side: int, seed: int):
        self.count, self.side, self.seed = count, side, seed

    def fingerprint(self) -> str:
        return f"faces {self.count} {self.side} {self.seed}"

    def pictures(self) -> Iterator[tuple[np.ndarray, int]]:
        random = np.random.default_rng(self.seed)
        for _ in range(self.count):
            yield face(self.side, random), 0


class Canvas:
    """An image of one colour, on which ellipses are painted.

    Coordinates go from 0 to 1; y goes downwards.
    """

    def __init__(self, side: int, colour: np.ndarray):
        self.side = side
        self.y, self.x = (np.mgrid[:side, :side] + 0.5) / side
        self.colours = np.broadcast_to(colour, (side, side, 3)).copy()

    def paint(
        self,
        colour: np.ndarray,
        x: float,
        y: float,
        width: float,
        height: float,
        below: float = 0.0,
    ) -> None:
        """Paint the part below y = `below` of an ellipse around (x, y), with a soft edge.

        width, height: its half axes. The edge is one pixel wide.
        """
        radius = np.hypot((self.x - x) / width, (self.y - y) / height)
        covered = np.clip(0.5 + (1 - radius) * min(width, height) * self.side, 0, 1) * np.clip(
            0.5 + (self.y - below) * self.side, 0, 1
        )
        self.colours += covered[:, :, None] * (colour - self.colours)


def face(side: int, random: np.random.Generator) -> np.ndarray:
    """One face, uint8 [side, side, 3]."""
    canvas = Canvas(side, random.uniform(60, 230, 3))
    x, y = 0.5 + random.uniform(-0.05, 0.05, 2) + (0, 0.05)
    width, height = random.uniform((0.24, 0.31), (0.30, 0.38))
    share = random.random()
    skin = (1 - share) * SKIN[0] + share * SKIN[1]
    hair = HAIR[random.integers(len(HAIR))] * random.uniform(0.85, 1.1)
    length = random.choice((0.0, 0.12, 0.28))  # of the hair below the head
    canvas.paint(hair, x, y - 0.08 + length / 2, width + 0.07, height + length / 2)
    canvas.paint(0.85 * skin, x, y + height + 0.1, 0.5 * width, 0.2)
    canvas.paint(skin, x, y, width, height)
    canvas.paint(hair, x + random.uniform(-0.08, 0.08), y - height, width, random.uniform(0.1, 0.2))
    apart, eye_y, open_by, iris = random.uniform(
        (0.10, -0.08, 0.025, 0.028), (0.14, -0.02, 0.045, 0.036)
    )
    look, raised, eyes = (
        random.uniform(-0.02, 0.02),
        random.uniform(0.065, 0.10),
        EYES[random.integers(len(EYES))],
    )
    for eye in (x - apart, x + apart):
        canvas.paint(WHITE, eye, y + eye_y, 0.062, open_by)
        canvas.paint(eyes, eye + look, y + eye_y, iris, min(iris, open_by))
        canvas.paint(DARK, eye + look, y + eye_y, 0.5 * iris, 0.5 * min(iris, open_by))
        canvas.paint(0.6 * hair, eye, y + eye_y - raised, 0.07, 0.015)
    canvas.paint(0.8 * skin, x, y + 0.08, random.uniform(0.025, 0.04), 0.05)
    mouth_y, mouth, smile = (
        y + random.uniform(0.17, 0.22),
        random.uniform(0.07, 0.13),
        random.uniform(0.02, 0.05),
    )
    lips = random.uniform(0.8, 1.1) * LIPS
    corners = mouth_y - smile  # the mouth is the lower half of an ellipse
    canvas.paint(lips, x, corners, mouth, 2 * smile, below=corners)
    return np.clip(canvas.colours, 0, 255).astype(np.uint8)
