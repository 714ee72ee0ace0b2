"""The text of the error that a call ends in, and whether it is the expected one."""

import re


def refusal(call, *args, **options):
    """The kind and text of the error that a call ends in; None: it does not."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def matches(found, expected):
    return (
        found == expected
        if expected is None or found is None
        else re.search(expected, found) is not None
    )
