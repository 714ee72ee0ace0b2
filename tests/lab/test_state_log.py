"""What is recorded of an optimizer's state, tensor by tensor."""

import pytest
import torch
from helpers.cases import holds_for_each

import onebit
from onebit.comm import Single
from onebit.lab.config import composed
from onebit.lab.runs.recorder import TENSORS
from onebit.lab.runs.state_log import Watch, Watcher
from onebit.lab.training.run import run_from


def test_only_experiments_that_ask_are_watched():
    """An option that is not null would set new runs apart from those that are committed."""
    assert all(
        composed([f"experiment={name}"]).get("watch") is None
        for name in ("figure_04", "table_02", "figure_06")
    )


def watched(kind, quantities, steps=6, by_tensor=True, every=2, **more):
    """The rows of an optimizer of three tensors, and the states after each step, from before
    the first on.
    """
    torch.manual_seed(0)
    named = {
        "a": torch.nn.Parameter(torch.randn(4, 3)),
        "b": torch.nn.Parameter(torch.randn(5)),
        "c": torch.nn.Parameter(torch.zeros(2)),
    }
    optimizer = kind(list(named.items()), lr=0.01, communicator=Single(), **more)
    watcher = Watcher(
        Watch(every=every, quantities=quantities, by_tensor=by_tensor),
        torch.nn.ParameterDict(named),
        [optimizer],
    )
    rows, states = {}, []
    for step in range(1, steps + 1):
        states.append(
            {
                name: {
                    key: torch.as_tensor(optimizer.state[p][key]).clone()
                    for key in ("exp_avg_sq", *optimizer.tensor_scalars)
                }
                for name, p in named.items()
            }
        )
        for p in named.values():
            p.grad = torch.randn_like(p)
        watcher.before(step)
        optimizer.step()
        rows[step] = watcher.after(step)
    keys = ("exp_avg_sq", *optimizer.tensor_scalars)
    states.append(
        {name: {key: optimizer.state[p][key] for key in keys} for name, p in named.items()}
    )
    return rows, states


def test_what_is_recorded_is_the_optimizers_state_by_tensor():
    rows, states = watched(onebit.OneBitLamb, list(TENSORS[-4:]), warmup=3, coefficient_beta=0.5)
    assert [len(rows[step]) for step in range(1, 7)] == [0, 3, 0, 3, 0, 3]
    for row in rows[6]:
        before, after = (state[row["tensor"]] for state in states[-2:])
        assert row["coefficient"] == pytest.approx(float(after["coefficient"]), rel=1e-5)
        assert row["ratio"] == pytest.approx(float(after["ratio"]), rel=1e-5)
        assert row["variance"] == pytest.approx(after["exp_avg_sq"].norm().item(), rel=1e-5)
        assert row["variance_change"] == 0 and torch.equal(
            before["exp_avg_sq"], after["exp_avg_sq"]
        )  # frozen
    for row in rows[2]:
        before, after = (state[row["tensor"]]["exp_avg_sq"] for state in states[1:3])
        assert (
            row["variance_change"] == pytest.approx((after - before).norm().item(), rel=1e-4)
            and row["variance_change"] > 0
        )


def test_norms_over_all_tensors_are_those_of_the_whole_state():
    rows, states = watched(onebit.DistributedAdam, ["variance", "variance_change"], by_tensor=False)
    before, after = (
        torch.cat([entry["exp_avg_sq"].flatten() for entry in state.values()])
        for state in states[-2:]
    )
    assert [row["tensor"] for row in rows[6]] == ["all"]
    assert rows[6][0]["variance"] == pytest.approx(after.norm().item(), rel=1e-4)
    assert rows[6][0]["variance_change"] == pytest.approx((after - before).norm().item(), rel=1e-4)


def test_an_optimizer_leaves_empty_what_it_does_not_have():
    rows, _ = watched(onebit.DistributedAdam, ["coefficient", "variance"])
    assert [set(row) for row in rows[2]] == [{"tensor", "variance"}] * 3
    rows, _ = watched(onebit.DistributedAdam, ["coefficient"])
    assert rows[2] == []


@holds_for_each(
    [
        (["watch.quantities=[variances]"], "some of coefficient, ratio"),
        (["watch.quantities=[]"], "not none"),
        (["watch.every=0"], "at least 1"),
        (
            ["watch.quantities=[ratio]", "+watch.by_tensor=false"],
            "some of variance, variance_change, not ratio",
        ),
        (["record_every=2", "watch.every=3"], "multiple of record_every=2"),
    ]
)
def test_a_watch_that_cannot_be_is_refused(changes, error):
    with pytest.raises(Exception, match=error):
        run_from(composed(["profile=smoke", "experiment=lamb", *changes]))
