"""Cases that repeat a law at more sizes: `make test-all` runs them, `make test` leaves them out."""

import pytest


def more(*values):
    """Values of a parameter that are of one argument: [1, 3, *more(2, 4)]."""
    return [pytest.param(value, marks=pytest.mark.more) for value in values]


def more_of(*rows):
    """The same where a case is a row of several arguments."""
    return [pytest.param(*row, marks=pytest.mark.more) for row in rows]
