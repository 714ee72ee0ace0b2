"""TopK sends the largest elements of every piece; and the bytes of TopK and Quantize by hand."""

import pytest
import torch
from helpers.compressors import BITS, lone, partitions

from onebit.compression import Quantize, TopK
from onebit.layout import Layout, round_up


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_by_hand(ranks):
    """n bits an element and a scale for each piece, up to a multiple of 16 bytes.

    8 or 12 bytes for each element of the largest and for each piece, up to a multiple of four.
    """
    partition, _ = partitions(ranks)[0]
    pieces = max(int((row > 0).sum()) for row in partition.piece_lengths)
    for bits in BITS:
        assert Quantize(partition, torch.float32, bits=bits).row_bytes == round_up(
            partition.row_elements * bits // 8 + 4 * pieces, 16
        )
        assert Quantize(partition, torch.float64, bits=bits).row_bytes == round_up(
            partition.row_elements * bits // 8 + 8 * pieces, 16
        )
    for density in (0.01, 0.3):
        sent = round_up(-int(-density * partition.row_elements // 1) + pieces, 4)
        assert TopK(partition, torch.float32, density=density).row_bytes == 8 * sent
        assert TopK(partition, torch.float64, density=density).row_bytes == 12 * sent


def test_the_largest_by_hand_and_the_first_of_equals():
    assert lone([1.0, -5.0, 3.0, 5.0, -3.0, 0.0], TopK, density=0.5)[2] == [0, -5.0, 3.0, 5.0, 0, 0]
    assert lone([2.0, -2.0, 2.0], TopK, density=0.01)[2] == [2.0, 0, 0]


def test_every_piece_of_a_tensor_sends_its_largest():
    """A tensor of 128 on two ranks, all its large elements in the first half: the second half
    sends one of its own.
    """
    layout = Layout([(128,)], 2)
    made = TopK(layout.worker_partition(), torch.float32, density=1 / 64)
    x = torch.cat([torch.arange(64.0) + 100, torch.arange(64.0)])
    assert made.decompress(made.compress(x)).nonzero().flatten().tolist() == [63, 127]
