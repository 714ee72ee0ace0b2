"""Made-up texts in the schemas of GLUE and SQuAD, which need no download.

Their words tell the answer, so that a small model learns it in a few steps.
"""

from collections.abc import Callable

import numpy as np

from onebit.lab.tasks.glue import GLUE

KINDS = (
    ("red", "warm", "loud", "round"),
    ("blue", "cold", "quiet", "square"),
    ("green", "slow", "heavy", "flat"),
)
THINGS = ("house", "river", "train", "apple", "cloud", "stone", "chair", "horse")


class MadeUpRows:
    """Rows that are the same at each call. make: random generator -> a row."""

    def __init__(
        self, make: Callable[[np.random.Generator], dict], *, count: int, seed: int, name: str
    ):
        self.make, self.count, self.seed = make, count, seed
        self.source = f"made-up {name}"

    def fingerprint(self) -> str:
        return f"{self.source} {self.count} {self.seed}"

    def load(self, *columns: str) -> list[dict]:
        random = np.random.default_rng(self.seed)
        rows = [self.make(random) for _ in range(self.count)]
        return [{name: row[name] for name in columns} for row in rows]


class MadeUpGlue:
    """Each class has words of its own; a score is 5 times the share of one class's words.

    count: the number of examples in each split.
    """

    path = "made-up"

    def __init__(self, *, count: int):
        self.count = count

    def split(self, name: str, split: str) -> MadeUpRows:
        columns, classes = GLUE[name].columns, GLUE[name].classes

        def make(random: np.random.Generator) -> dict:
            label = int(random.integers(6)) if classes == 1 else int(random.integers(classes))
            kinds = [0] * label + [1] * (5 - label) if classes == 1 else [label] * 5
            return {
                column: " ".join(random.choice(KINDS[kind]) for kind in kinds) for column in columns
            } | {"label": label}

        return MadeUpRows(make, count=self.count, seed=len(split), name=name)


def made_up_questions(count: int, seed: int) -> MadeUpRows:
    """Texts that say what each thing is, and a question for one of them."""

    def make(random: np.random.Generator) -> dict:
        things = random.permutation(THINGS)
        said = {str(thing): " ".join(random.choice(kind) for kind in KINDS[:2]) for thing in things}
        context = ". ".join(f"the {thing} is {words}" for thing, words in said.items())
        asked = str(random.choice(things))
        begin = context.index(f"the {asked} is ") + len(f"the {asked} is ")
        answers = {"text": [said[asked]], "answer_start": [begin]}
        return {"context": context, "question": f"what is the {asked}?", "answers": answers}

    return MadeUpRows(make, count=count, seed=seed, name="questions")
