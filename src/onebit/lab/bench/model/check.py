"""How far the model is off: contradictions in print, the error over the rest, and the worst points.

The rule, written before the model was compared with any point: the model may judge claims if the
median of its error over all points that count and that no other point contradicts is at most LIMIT.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from onebit.lab.bench.model.points import Point, all_points

LIMIT = 0.15  # of the median error; a prediction is then taken to be right within this factor
CONTRADICTION = 0.15  # two numbers for one quantity that differ by more contradict each other


def ratio(one: float, other: float) -> float:
    """The larger over the smaller."""
    return max(one / other, other / one)


def contradictions(points: list[Point]) -> dict[int, str]:
    """Index of a point -> where the papers print another number for the same quantity."""
    same = defaultdict(list)
    for i, point in enumerate(points):
        if point.quantity:
            same[point.quantity].append(i)
    found = defaultdict(list)
    for indices in same.values():
        for i, j in combinations(indices, 2):
            if ratio(points[i].printed, points[j].printed) > 1 + CONTRADICTION:
                for one, other in ((i, j), (j, i)):
                    where = points[other]
                    found[one].append(f"{where.place}: {where.printed:,.0f} {where.unit}")
    return {i: "; ".join(where) for i, where in found.items()}


@dataclass(frozen=True)
class Check:
    """The model against print.

    Attributes:
        points: all of them.
        contradicted: index of a point -> by what.
    """

    points: tuple[Point, ...]
    contradicted: dict[int, str]

    @property
    def counted(self) -> list[Point]:
        """The points that the error is about."""
        return [
            point
            for i, point in enumerate(self.points)
            if not point.apart and i not in self.contradicted
        ]

    @property
    def median_error(self) -> float:
        """Over the points that count."""
        return float(np.median([point.error for point in self.counted]))

    @property
    def may_judge(self) -> bool:
        """Whether the rule above holds."""
        return self.median_error <= LIMIT

    def worst(self, count: int = 5) -> list[Point]:
        """Of the points that count."""
        return sorted(self.counted, key=lambda point: -point.error)[:count]


def check() -> Check:
    """All points of the papers."""
    points = all_points()
    return Check(tuple(points), contradictions(points))
