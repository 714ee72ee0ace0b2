import pytest
import torch

from onebit import OneBitAdam
from onebit.comm import Single


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels():
    """Compile the kernels before any test, so that no rank is waited for while it compiles.

    Later processes find them in numba's cache.
    """
    for dtype in (torch.float32, torch.float64):
        p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = OneBitAdam([p], warmup=1, communicator=Single())
        for _ in range(3):
            p.grad = torch.ones_like(p)
            optimizer.step()
