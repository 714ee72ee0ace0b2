"""The step sets of 0/1 Adam: when the variance changes and when the ranks meet."""

import numpy as np
import pytest

from onebit.optim.step_sets import step_sets


def test_gaps_of_variance_updates_double_after_kappa_updates_until_the_freeze():
    T_v, T_u = step_sets(
        40, variance_freeze_step=30, variance_update_scaler=3, local_step_clipper=1
    )
    assert sorted(T_v) == [1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 30]
    assert T_u == set(range(1, 41))


def test_gaps_of_syncs_double_after_so_many_syncs_and_are_clipped():
    T_v, T_u = step_sets(30, variance_freeze_step=1, local_step_scaler=3, local_step_clipper=4)
    assert T_v == {1}
    assert sorted(T_u) == [1, 2, 3, 4, 6, 8, 10, 14, 18, 22, 26, 30]


@pytest.mark.parametrize("interval", [1, 2, 5])
def test_a_scaler_of_one_makes_the_interval_constant_once_it_has_grown(interval):
    _, T_u = step_sets(60, variance_freeze_step=1, local_step_scaler=1, local_step_clipper=interval)
    assert set(np.diff(sorted(T_u))[4:]) == {interval}


def test_variance_changes_only_right_after_a_sync_and_that_step_syncs():
    T_v, T_u = step_sets(
        400,
        variance_freeze_step=300,
        variance_update_scaler=4,
        local_step_scaler=10,
        local_step_clipper=8,
    )
    assert max(T_v) <= 300 and len(T_v) > 8
    assert all(t == 1 or t - 1 in T_u for t in T_v) and T_v <= T_u
    assert T_u - T_v and set(range(1, 401)) - T_u
