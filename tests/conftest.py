import torch

from onebit import OneBitAdam
from onebit.comm import Single


def pytest_collection_finish(session):
    """Compile the kernels before any test, so that no rank is waited for while it compiles.

    Later processes find them in numba's cache. No test's time-out counts here.
    """
    if session.items and not session.config.option.collectonly:
        for dtype in (torch.float32, torch.float64):
            compile_kernels(dtype)


def compile_kernels(dtype):
    p = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = OneBitAdam([p], warmup=1, communicator=Single())
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
