"""Plans: the paper's own scale, told without training."""

import pytest

from onebit.lab.plan import MACHINES, describe


def test_the_papers_profile_is_the_papers_run():
    text = describe("figure_04", "paper", MACHINES["paper"])
    for part in ("336,226,108 parameters",  # transformers' BERT-Large with its two heads
                 "wikimedia/wikipedia", "152,000 steps", "T_w = 23,000", "4,096 examples of 128 tokens", "64 workers x 4 x 16",
                 "622,592,000", "torchrun --nnodes 8", "mpirun -n 64", "comm=nccl", "optimizer=NAME"):
        assert part in text


@pytest.mark.parametrize("profile", ["smoke", "laptop"])
def test_a_smaller_profile_keeps_the_share_of_warm_up(profile):
    text = describe("figure_04", profile, MACHINES[profile])
    steps, warmup = (int(text.split(before)[1].split(after)[0].replace(",", "")) for before, after in (("seq128", "steps"), ("T_w = ", ",")))
    assert warmup / steps == pytest.approx(23 / 152, abs=0.01)
    assert "comm=gloo workers=4" in text
