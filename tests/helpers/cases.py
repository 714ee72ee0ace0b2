"""Cases that repeat a law at more sizes: `make test-all` runs them, `make test` leaves them out."""

import pytest


def more(*values):
    """Values of a parameter that are of one argument: [1, 3, *more(2, 4)]."""
    return [pytest.param(value, marks=pytest.mark.more) for value in values]


def more_of(*rows):
    """The same where a case is a row of several arguments."""
    return [pytest.param(*row, marks=pytest.mark.more) for row in rows]


def holds_for_each(rows):
    """One case for a whole table: the test is called with each row, and names all that fail."""

    def decorate(check):
        def test():
            failures = []
            for row in rows:
                try:
                    check(*row)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{row}: {error!r}")
            assert not failures, "\n".join(failures)

        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        return test

    return decorate
