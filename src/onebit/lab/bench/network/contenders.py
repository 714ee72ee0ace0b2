"""What is timed on a slow network: the exchange alone, and steps of a real model."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import onebit
from onebit.comm import Communicator, Mpi
from onebit.lab.bench.network.stand_ins import Absent, replay

PERIOD = 4  # steps in one timed call: LocalAdam and 0/1 Adam exchange once in so many
LEARNING_RATE = 1e-5
FLOOR = 1e-3  # of the variance: one warm-up step leaves coordinates without gradient
RIVALS = {"exchange": "all_reduce", "training": "ddp_adam"}

# ---- the exchange alone


def exchanges(communicator: Communicator, elements: int) -> dict[str, Callable]:
    """Name -> the exchange of one step, for a vector of `elements` float32."""
    return {
        **all_reduces(communicator, torch.ones(elements)),
        "compressed": replay(communicator, compressed_calls(communicator.size, elements)),
    }


def all_reduces(communicator: Communicator, x: torch.Tensor) -> dict[str, Callable]:
    """The library's own, in place, which is the fastest; half precision where it can add that."""
    if isinstance(communicator, Mpi):
        from mpi4py import MPI

        array = x.numpy()
        return {"all_reduce": lambda: communicator.comm.Allreduce(MPI.IN_PLACE, array)}
    half = x.half()
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce_fp16": lambda: dist.all_reduce(half),
    }


def compressed_calls(ranks: int, elements: int) -> list[tuple[str, torch.Size]]:
    """The collectives of a compressed step of 1-bit Adam, as the optimizer asks for them."""
    absent = Absent(ranks)
    p = torch.nn.Parameter(torch.zeros(elements))
    p.grad = torch.ones_like(p)
    optimizer = onebit.OneBitAdam([p], warmup=1, communicator=absent)
    quietly(optimizer.step)
    absent.calls_made.clear()
    quietly(optimizer.step)
    return list(absent.calls_made)


def quietly(step: Callable) -> None:
    """Warnings about a variance that is frozen after one step are right, and known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step()


# ---- training


class Training:
    """A BERT with its optimizer; calling it makes PERIOD steps, each on the same batch.

    Args:
        make: parameters -> optimizer, or anything with step() and zero_grad().
        wrap: what becomes of the model before it is used.
        shape: (vocabulary, width, layers, samples of a rank, tokens of a sample).
    """

    def __init__(self, make: Callable, shape: tuple[int, ...], wrap: Callable = lambda m: m):
        from transformers import BertConfig, BertForMaskedLM

        vocabulary, width, layers, samples, tokens = shape
        torch.manual_seed(1)
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=max(width // 64, 1),
            intermediate_size=4 * width,
            max_position_embeddings=tokens,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = wrap(BertForMaskedLM(config))
        self.optimizer = make(self.model.parameters())
        generator = torch.Generator().manual_seed(2 + rank())
        self.tokens = torch.randint(vocabulary, (samples, tokens), generator=generator)
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def __call__(self) -> None:
        for _ in range(PERIOD):
            self.optimizer.zero_grad()
            self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
            self.optimizer.step()


class LocalAdam(torch.optim.Adam):
    """Adam on every rank by itself; every PERIOD steps the parameters are averaged."""

    def __init__(self, params, communicator: Communicator):
        super().__init__(params, lr=LEARNING_RATE, fused=True)
        self.communicator, self.taken = communicator, 0

    def step(self, closure: Callable | None = None) -> None:
        """One step; the last of PERIOD averages."""
        super().step(closure)
        self.taken += 1
        if self.taken % PERIOD == 0:
            parameters = [p for group in self.param_groups for p in group["params"]]
            vector = torch.nn.utils.parameters_to_vector(parameters).detach()
            dist.all_reduce(vector)
            torch.nn.utils.vector_to_parameters(vector / self.communicator.size, parameters)


def rank() -> int:
    """In torch.distributed's default group."""
    return dist.get_rank() if dist.is_initialized() else 0


def trainings(communicator: Communicator, shape: tuple[int, ...]) -> dict[str, Training]:
    """Name -> steps of one model, each optimizer in the phase in which it spends its run."""

    def adam(params):
        return torch.optim.Adam(params, lr=LEARNING_RATE, fused=True)

    def ddp(hook=None):
        def wrap(model):
            wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
            if hook:
                wrapped.register_comm_hook(*hook)
            return wrapped

        return Training(adam, shape, wrap)

    common = {"lr": LEARNING_RATE, "variance_floor": FLOOR, "communicator": communicator}
    # as LocalAdam it syncs every PERIOD steps, the variance being frozen
    zero_one = {"variance_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": PERIOD}
    made = {
        "ddp_adam": ddp(),
        "ddp_fp16": ddp((None, default_hooks.fp16_compress_hook)),
        "ddp_powersgd": ddp((PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)),
        "local_adam": Training(lambda p: LocalAdam(p, communicator), shape),
        "onebit_adam": Training(lambda p: onebit.OneBitAdam(p, warmup=1, **common), shape),
        "onebit_lamb": Training(lambda p: onebit.OneBitLamb(p, warmup=1, **common), shape),
        "zero_one_adam": Training(lambda p: onebit.ZeroOneAdam(p, **zero_one, **common), shape),
    }
    for training in made.values():  # past the warm-up, and past PowerSGD's first two steps
        quietly(training)
    return made
