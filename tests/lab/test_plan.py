"""Plans: the paper's own scale, told without training."""

import pytest
from helpers.cases import more

from onebit.lab.plan import MACHINES, describe


def test_the_papers_profile_is_the_papers_run():
    text = describe("figure_04", "paper", MACHINES["paper"])
    for part in (
        "336,226,108 parameters",  # transformers' BERT-Large with its two heads
        "wikimedia/wikipedia",
        "152,000 steps",
        "T_w = 23,000",
        "4,096 examples of 128 tokens",
        "64 workers x 4 x 16",
        "622,592,000",
        "sbatch --job-name=figure_04 --nodes=8 --ntasks-per-node=8 --gpus-per-node=8 "
        "--time=48:00:00 scripts/slurm/train.sbatch figure_04 optimizer=NAME\n",
        "torchrun --nnodes 8",
        "mpirun -n 64",
        "comm=nccl",
        "optimizer=NAME",
    ):
        assert part in text


@pytest.mark.parametrize(
    "name", ["figure_06", *more("figure_10", "figure_11", "figure_12", "figure_13")]
)
def test_the_papers_profile_on_images_is_the_papers_run(name):
    """ResNet-18 with a stem for small images, whose 0.555 G multiplications and additions an
    image are known: 2 x 3 x 0.555e9 x 10e6 = 3.3e16.
    """
    text = describe(name, "paper", MACHINES["paper"])
    for part in (
        "11,173,962 parameters",
        "data        uoft-cs/cifar10\n",
        "9,800 steps",
        "T_w = 637",
        "1,024 examples a step",
        "8 workers x 1 x 128",
        "10,035,200",
        "3.3e+16 FLOP",
        "torchrun --nnodes 1 --nproc-per-node 8",
        "mpirun -n 8",
    ):
        assert part in text


def test_the_papers_profile_on_faces_is_radfords_network_for_the_papers_steps():
    """DCGAN's generator has 3,576,704 parameters, its discriminator 2,765,568."""
    text = describe("figure_08", "paper", MACHINES["paper"])
    for part in (
        "6,342,272 parameters",
        "data        flwrlabs/celeba\n",
        "8,000 steps",
        "T_w = 1,600",
        "128 examples a step",
        "8 workers x 1 x 16",
    ):
        assert part in text


def test_the_asked_number_of_workers_is_taken():
    assert "16 workers x 1 x 64" in describe("figure_06", "paper", MACHINES["paper"], workers=16)


@pytest.mark.parametrize("profile", ["smoke", "laptop"])
@pytest.mark.parametrize(
    ("name", "phase", "share"),
    [
        ("figure_04", "seq128", 23 / 152),
        ("figure_06", "train", 13 / 200),
        ("figure_08", "train", 0.2),
    ],
)
def test_a_smaller_profile_keeps_the_share_of_warm_up(profile, name, phase, share):
    text = describe(name, profile, MACHINES[profile])
    steps, warmup = (
        int(text.split(before)[1].split(after)[0].replace(",", ""))
        for before, after in ((phase, "steps"), ("T_w = ", ","))
    )
    assert warmup / steps == pytest.approx(share, abs=0.01)
    assert "comm=gloo workers=4" in text
