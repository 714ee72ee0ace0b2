"""Fixtures of the optimizers' tests."""

import pytest
from helpers.reference_runs import GROUPS


@pytest.fixture
def large_eps(monkeypatch):
    """Where the variance is 0, or has been rounded to it, x moves by m / eps: with the small
    eps of `GROUPS` it would reach 1e8.
    """
    monkeypatch.setattr("helpers.reference_runs.GROUPS", [dict(group, eps=0.1) for group in GROUPS])
