"""What all optimizers of the family share, and what one step of them is."""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from onebit.allreduce import CompressedAllreduce, ExactAllreduce
from onebit.comm import Communicator, default_communicator
from onebit.comm.background import Background, Inline, results
from onebit.kernels.torch_ops import Terms
from onebit.optim import checkpoint, notices
from onebit.optim.agreement import (
    Agreement,
    agree,
    check_same_on_all_ranks,
    check_scaler_may_step,
    checksums,
    clip_factor,
    describe_optimizer,
    describe_options,
    describe_parameters,
    is_scaled,
    name_of,
    ranks_with,
    unscaling,
)
from onebit.optim.bucket import Bucket, Group, buckets
from onebit.optim.overlap import Overlap
from onebit.optim.run_state import Option, RunState
from onebit.optim.state import ParameterState, follow
from onebit.optim.traffic import Communication, Meter
from onebit.optim.validation import (
    check_communicator,
    check_compressor,
    check_dense,
    check_flag,
    check_group,
    check_group_keys,
    check_number,
    check_option_names,
    check_tensors,
    describe_option,
    option_names,
)

MAX_CONSECUTIVE_SKIPS = 100
DEFAULT_BUCKET_CAP = 25 * 2**20  # bytes; as DistributedDataParallel's


def scaled(g: torch.Tensor, factor: float) -> torch.Tensor:
    """factor g, in place."""
    return g if factor == 1.0 else g.mul_(factor)


class DistributedOptimizer(torch.optim.Optimizer):
    """Base of the family. Gradients are each rank's own; `step` does all the averaging.

    Args:
        params: parameters, named parameters or groups. The options of a group are those of
            `group_options` and compress (False: its gradients are averaged exactly, and the
            uncompressed baseline trains it); all are read at every step.
        group_options: defaults of the groups' options.
        max_grad_norm: clip all gradients by one factor, the same on all ranks; None: do not clip.
        check_finite: skip a step, on all ranks, if a gradient on any rank is not finite.
        bucket_cap_mb: gradients travel in buckets of at most so many MB; None: all at once, or 25
            with overlap.
        overlap: whether a bucket leaves during backward, see `Overlap`; the communicator is then
            duplicated.
        communicator: see `onebit.comm`; None: torch.distributed's default group, or a single
            worker.

    What a subclass declares:
        run_state: its extension of `RunState`.
        vectors: what is kept for each element: attribute of a `Bucket` -> name in `state`.
        more_vectors: the same, of compressed groups only.
        tensor_scalars: what is kept for each tensor: name -> value at the start.
        sent_options: options of a group on which it depends what is sent.
        compresses: whether it ever compresses. Then it has an option `compressor`, and gives
            `_terms` and `_compressed_update`.
        compresses_from_the_start: whether it compresses from the first step on.
        trains_apart: whether the ranks' models may differ between syncs. Then it gives `_sync`
            and `_common_between_syncs`, and keeps `is_synced` and `moved` in its `RunState`.
        takes_frozen_variance: whether it can go on with a variance that was frozen.
        masked_remedy: what helps coordinates that are masked and get a gradient; "": no warning.

    What a subclass gives: `_exact_update`, and if it needs them the other methods under
    "the contract of subclasses".
    """

    run_state: type[RunState] = RunState
    vectors: dict[str, str] = {"momentum": "exp_avg", "variance": "exp_avg_sq"}
    more_vectors: dict[str, str] = {}
    tensor_scalars: dict[str, float] = {}
    sent_options: tuple[str, ...] = ("betas",)
    compresses = compresses_from_the_start = trains_apart = takes_frozen_variance = False
    masked_remedy: str = ""

    max_grad_norm: float | None = Option()
    check_finite: bool = Option()
    overlap: bool = Option()
    # the ranks compare parameters and state every so many steps; None: only options
    check_ranks_every: int | None = Option()

    # so that torch's GradScaler calls step() even on a rank on which it found an inf
    _step_supports_amp_scaling = True

    def __new__(cls, *args: Any, **options: Any) -> "DistributedOptimizer":
        """Check the names of the options, and make the `RunState`, to which options belong."""
        check_option_names(cls, options)
        optimizer = super().__new__(cls)
        optimizer._run = cls.run_state(given=options)
        return optimizer

    def __init__(
        self,
        params: Iterable,
        group_options: Group,
        *,
        max_grad_norm: float | None,
        check_finite: bool,
        bucket_cap_mb: float | None,
        overlap: bool,
        communicator: Communicator | None,
    ) -> None:
        check_flag("check_finite", check_finite)
        check_flag("overlap", overlap)
        for name, value in (("max_grad_norm", max_grad_norm), ("bucket_cap_mb", bucket_cap_mb)):
            if value is not None:
                check_number(name, value, 0, strict=True)
        if overlap and max_grad_norm is not None:
            raise ValueError(
                "max_grad_norm cannot be used with overlap=True: a bucket leaves before the norm "
                "of all gradients is known. Set max_grad_norm=None, or overlap=False"
            )
        self._communicator_is_given = communicator is not None
        chosen = default_communicator() if communicator is None else communicator
        check_communicator(chosen)
        self.max_grad_norm = max_grad_norm
        self.check_finite = check_finite
        self.overlap = overlap
        # with overlap the user's collectives must not come between those of the background
        self.communicator: Communicator = chosen.duplicate() if overlap else chosen
        if overlap:
            weakref.finalize(self, self.communicator.close)
        self.check_ranks_every = 100
        self._run.meter = Meter(self.communicator)
        cap = bucket_cap_mb * 2**20 if bucket_cap_mb else DEFAULT_BUCKET_CAP if overlap else None
        self._run.options["bucket_cap"] = self._bucket_cap = cap
        group_options = group_options | {"compress": True}
        self._group_options = tuple(group_options)
        super().__init__(params, group_options)
        self._lay_out({})
        # what communicates cannot be compiled
        self._uncompiled_step = torch.compiler.disable(type(self)._step_with_all_ranks)

    def __getstate__(self) -> None:
        raise TypeError(
            "an optimizer that communicates can be neither copied nor pickled: copy or save its "
            "state_dict()"
        )

    def __repr__(self) -> str:
        lines = [
            f"phase of the next step: {self.phase}, after {self.steps} steps",
            *(f"{name}: {text}" for name, text in self._overview().items()),
            f"world size: {self.communicator.size}, rank: {self.communicator.rank}",
        ]
        return super().__repr__().replace("\n", "\n" + "".join(f"{x}\n" for x in lines), 1)

    # ---- the contract of subclasses

    def _exact_update(self, bucket: Bucket, g: torch.Tensor) -> None:
        """What the mean gradient g, float [layout.size], does to a bucket. g may be overwritten."""
        raise NotImplementedError

    def _terms(self, bucket: Bucket, factor: float) -> Terms:
        """What this rank sends of a bucket in a compressed step, its gradients times `factor`.

        Called before the step is counted, with overlap and without.
        """
        raise NotImplementedError

    def _compressed_update(self, bucket: Bucket, outcome: Any) -> None:
        """What the outcome of `_start_compressed_exchange` does to a bucket."""
        raise NotImplementedError

    def _start_compressed_exchange(self, bucket: Bucket, factor: float) -> Future:
        """Start what a bucket exchanges in a compressed step, with this rank's gradients times
        `factor`. The future's result is the payload uint8 [W, row_bytes], unless a subclass sends
        more. Called before the step is counted."""
        allreduce = bucket.allreduce
        return self._run.runner.submit(
            allreduce.exchange, allreduce.compress(self._terms(bucket, factor))
        )

    def _count_step(self) -> None:
        """The ranks have agreed to take a step, which changes the state from here on."""
        self._run.step += 1

    def _finish_step(self) -> None:
        """What follows in a step once all buckets are updated."""

    def _follow_phase(self) -> None:
        """Before and after a step: bring the state into line with the phase.

        All ranks do it together; it is no part of the step's traffic.
        """

    def _lay_out(self, moments: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """Make the buckets anew. `moments`: for each parameter the entries of its state to keep, by
        their names in `state`; the others begin at their start values."""
        run, flags = self._run, self._compress_flags()
        if self.compresses and not any(flags):
            raise ValueError(
                "every parameter group has compress=False, so nothing would be compressed: use "
                f"onebit.DistributedAdam, or {type(self).__name__} with a group to compress"
            )
        run.compress_flags, run.moved = flags, set()
        run.groups = list(self.param_groups)
        run.params = [list(group["params"]) for group in run.groups]
        run.shown = {p: run.shown[p] for p in self._params() if p in run.shown}
        run.buckets = [
            self._bucket(contents, compress)
            for compress in (True, False)
            for contents in buckets(
                [group for group in self.param_groups if group["compress"] == compress],
                self._bucket_cap,
            )
        ]
        for bucket in run.buckets:
            for p, entries in zip(bucket.params, bucket.stored()):
                for name in entries.keys() & moments.get(p, {}).keys():
                    entries[name].copy_(moments[p][name])
            self._show_state(bucket)
        for bucket in self._compressed[:1] if self.compresses else ():
            check_compressor(self.compressor, bucket.partition, bucket.dtype)
        for bucket in self._compressed if self.compresses_from_the_start else ():
            self._make_allreduce(bucket)
        in_background = self.overlap or len(run.buckets) > 1
        run.runner = Background(run.buckets[0].device) if in_background else Inline()
        if run.overlap:
            run.overlap.remove()
        run.overlap = Overlap(self) if self.overlap else None

    def _change_layout(self, moments: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        """As `_lay_out`, since a group's `compress` has changed."""
        self._lay_out(moments)

    def _make_allreduce(self, bucket: Bucket, active: torch.Tensor | None = None) -> None:
        """From now on a bucket is compressed. `active`: bool [layout.size], which elements take
        part; None: all."""
        bucket.hold_errors(self._allreduce(bucket, bucket.layout, active))

    def _sync(self) -> None:
        """Give all ranks the same model between two steps, if it `trains_apart`."""
        raise NotImplementedError

    def _common_between_syncs(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """For each parameter what is the same on all ranks while they train apart."""
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors and options. It is the same on all ranks."""
        if not self.trains_apart:
            return {}
        moved = checkpoint.flags_of(self, self._run.moved)
        return {"is_synced": self._run.is_synced, "moved": moved}

    def _take_facts(self, facts: dict[str, Any]) -> None:
        """Go on from a checkpoint's `facts`; the buckets hold its vectors already.

        A fact may be missing: the checkpoint may be another optimizer's.
        """
        run, params = self._run, self._params()
        run.errors_are_shared = facts.get("errors_are_shared", False)
        run.ranks_are_compared = run.is_changing = False
        if self.trains_apart:
            run.is_synced = facts.get("is_synced", True)
            run.moved = {params[i] for i in checkpoint.places(facts.get("moved", []))}

    def _check_facts(self, facts: dict[str, Any], groups: list[Group]) -> None:
        """Raise ValueError if a checkpoint's state means something else than this optimizer's.

        Args:
            groups: the parameter groups as they will be.

        `checkpoint.check_facts` has already refused what no optimizer of another kind takes.
        """

    # ---- groups and buckets

    def add_param_group(self, group: Group) -> None:
        """As torch's, before the first step only. Raises ValueError afterwards."""
        if self._run.step:
            raise ValueError(
                "a parameter group cannot be added after the first step: its variance would be "
                "younger than the others'. Give all parameters at construction; one with "
                "requires_grad=False is left alone until you set it True, before the freeze"
            )
        check_group_keys(group, self._group_options, type(self), self._run.given)
        super().add_param_group(group)
        try:
            check_group(self.param_groups[-1], self._group_options)
            check_tensors(self._params())
        except ValueError:
            self.param_groups.pop()
            raise
        if self._run.buckets:
            self._lay_out({})

    def _bucket(self, contents: list[tuple[Group, list]], compress: bool) -> Bucket:
        vectors = self.vectors | (self.more_vectors if compress else {})
        return Bucket(
            contents,
            self.communicator.size,
            compress,
            vectors,
            self.tensor_scalars,
            self._run.with_gradient,
        )

    def _allreduce(
        self, bucket: Bucket, layout: Any, active: torch.Tensor | None
    ) -> CompressedAllreduce:
        """The compressed allreduce of a bucket whose vectors are cut as `layout` says."""
        return CompressedAllreduce(
            self.communicator,
            layout,
            bucket.dtype,
            self.compressor,
            active,
            in_place=not self.overlap,
            rounds=self.steps,
            stream=self._run.buckets.index(bucket),
        )

    def _show_state(self, bucket: Bucket) -> None:
        """Bring `state[p]` into line with how a bucket is stored."""
        shown = self._run.shown
        for i, (p, entries) in enumerate(zip(bucket.params, bucket.stored())):
            foreign = shown[p].foreign() if p in shown else {}
            shown[p] = ParameterState(entries | foreign, bucket, i, self._run.step)
            self.state[p] = shown[p]

    def _compress_flags(self) -> list[bool]:
        return [group["compress"] for group in self.param_groups]

    @property
    def _compressed(self) -> list[Bucket]:
        """The buckets whose groups ask for compression."""
        return [bucket for bucket in self._run.buckets if bucket.compress]

    @property
    def _is_compressing(self) -> bool:
        """Whether compression errors are held."""
        return any(bucket.allreduce for bucket in self._run.buckets)

    def _params(self) -> list[torch.nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _names(self) -> Iterator[str]:
        """A name for each parameter, in the groups' order."""
        for i, group in enumerate(self.param_groups):
            yield from group.get("param_names") or (
                name_of(p) or f"param_groups[{i}]['params'][{j}]"
                for j, p in enumerate(group["params"])
            )

    def _follow_groups(self) -> None:
        """The layout is made of parameters and groups. Raise RuntimeError if there are others now.

        Groups may be replaced by others that hold the same parameters.
        """
        run, params = self._run, [group["params"] for group in self.param_groups]
        if [list(map(id, of_group)) for of_group in params] != [
            list(map(id, of_group)) for of_group in run.params
        ]:
            raise RuntimeError(
                "param_groups holds other parameters, or in another order, than when the optimizer "
                "laid out its state, so that they would not be trained: after you replace, resize, "
                "add or remove parameters make a new optimizer for them, whose warm-up gives every "
                "parameter a variance of its own"
            )
        if any(a is not b for a, b in zip(self.param_groups, run.groups)):
            successors = {id(old): new for old, new in zip(run.groups, self.param_groups)}
            for bucket in run.buckets:
                bucket.follow_groups(successors)
            run.groups = list(self.param_groups)
        for bucket in run.buckets:
            bucket.check_tensors()

    def _follow_compress_flags(self) -> None:
        """Lay the parameters out anew if a group's `compress` has changed.

        Errors belong to a layout, so there must be none.
        """
        if self._compress_flags() == self._run.compress_flags:
            return
        self._must_be_idle("compress was changed")
        if self._is_compressing:
            way = (
                "Set it back, call restart_warmup(steps), then change it"
                if self.takes_frozen_variance
                else "Set it back, or begin a new optimizer"
            )
            raise ValueError(
                "compress was changed while compression errors are held: it may change in the "
                f"warm-up of OneBitAdam only. {way}"
            )
        if not self._run.is_synced:
            raise ValueError(
                "compress was changed between two syncs, while the ranks' models differ: set it "
                "back, call synchronize() on all ranks, then change it"
            )
        names = (*self.vectors.values(), *self.tensor_scalars)
        entries = {p: own.plain() for p, own in self._run.shown.items()}
        self._change_layout({p: {name: own[name] for name in names} for p, own in entries.items()})

    # ---- a step

    @property
    def steps(self) -> int:
        """Steps taken, without those skipped."""
        return int(self._run.step)

    @property
    def phase(self) -> str:
        """How the NEXT step communicates, "warmup" (exactly) or "compressed".

        After the last exact step it is therefore already "compressed". An optimizer that
        compresses from the start, or by its own rule at some steps, says "compressed" always; one
        that never compresses says "warmup".
        """
        return "compressed" if self.compresses else "warmup"

    @property
    def last_step_skipped(self) -> bool:
        """Whether the ranks agreed to skip the last step, since a gradient was not finite."""
        return self._run.last_step_skipped

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the ranks' gradients and update the parameters.

        Every rank must call it, even one without gradients. Called by torch.amp.GradScaler.step,
        it divides this rank's gradients by this rank's scale, and skips on all ranks if the scaler
        of any has found an inf. The ranks' scales need not be equal. This needs overlap=False.

        Returns what `closure` returns, if it is given. Raises RuntimeError on all ranks at the
        first step if their parameters differ, and after MAX_CONSECUTIVE_SKIPS steps skipped in a
        row.
        """
        if "deepspeed" in sys.modules and not hasattr(self, "in_engine"):
            self._check_caller()
        return self._uncompiled_step(self, closure)

    def _check_caller(self) -> None:
        """`onebit.deepspeed` replaces it: its engine may call step() in a way that cannot work."""

    def _step_with_all_ranks(self, closure: Callable[[], Any] | None) -> Any:
        run = self._run
        self._must_be_whole()
        check_scaler_may_step(self, self.overlap)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            check_group(group, self._group_options)
        self._follow_groups()
        follow(self)
        run.with_gradient.update(p for p in self._params() if p.grad is not None)
        self._check_ranks()
        self._follow_compress_flags()
        self._follow_phase()
        run.meter.open()
        taken = self._take_step()
        if taken:
            self._finish_step()
        run.is_changing = False
        run.last_step_skipped = not taken
        run.errors_are_shared &= not taken
        run.meter.close(self._exact_bytes())
        self._follow_phase()
        self._count_skips()
        return loss

    def _take_step(self) -> bool:
        """Agree, exchange and update; False if the ranks agree to skip the step.

        `onebit.optim.local_steps.LocalSteps` replaces it by steps that need not meet.
        """
        return self._compressed_step() if self._is_compressing else self._exact_step()

    def _exact_step(self) -> bool:
        """One step on the exact mean gradient.

        All ranks see the same bits, so that they clip and skip alike without asking each other. In
        the second step they look whether their own gradients are the same already.
        """
        # what has begun during backward comes first on every rank
        exchanges = self._exchanges() if self.overlap else None
        self._ask_ranks(self._measured() if self.steps == 1 and not is_scaled(self) else (0.0, 0.0))
        means = results(exchanges or self._exchanges(unscaling(self)))
        factor = self._factor(self._squared_norm(means)) if self._needs_norm else 1.0
        if factor is None:
            for bucket in self._run.buckets:
                bucket.drop_gradient()
            return False
        self._begin_change()
        self._count_step()
        for bucket, g in zip(self._run.buckets, means):
            self._exact_update(bucket, scaled(g, factor))
        return True

    def _compressed_step(self) -> bool:
        """One step in which the compressed groups' gradients are not averaged exactly.

        The ranks agree before anything is changed. With overlap the exchanges have begun by then,
        out of place; without it they begin once the factor is known.
        """
        exchanges = self._exchanges() if self.overlap else None
        factor, masked = self._agree()
        if factor is None:
            return False
        self._warn_of_masked_gradients(masked)
        self._begin_change()
        exchanges = exchanges or self._exchanges(factor)
        self._count_step()
        for bucket, exchange in zip(self._run.buckets, exchanges):
            outcome = exchange.result()
            if bucket.allreduce:
                bucket.allreduce.commit()
                self._compressed_update(bucket, outcome)
            else:
                self._exact_update(bucket, outcome)
        return True

    def _count_skips(self) -> None:
        run = self._run
        run.skips = run.skips + 1 if run.last_step_skipped else 0
        if run.skips >= MAX_CONSECUTIVE_SKIPS:
            raise RuntimeError(
                f"{run.skips} steps in a row were skipped because a gradient was not finite: lower "
                "the learning rate, the loss scale or max_grad_norm, or freeze the variance later"
            )

    # ---- agree

    @property
    def _needs_norm(self) -> bool:
        return self.check_finite or self.max_grad_norm is not None or is_scaled(self)

    def _measure(self, bucket: Bucket, gradients: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Of a bucket's gradients: (squared norm, elements that are not zero where masked),
        float64 [2]."""
        gradients = bucket.gradients() if gradients is None else gradients
        return bucket.kernels.measure(bucket.partition, gradients)

    def _squared_norm(self, means: list[torch.Tensor]) -> float:
        return sum(
            float(self._measure(bucket, bucket.layout.views(g))[0])
            for bucket, g in zip(self._run.buckets, means)
        )

    def _factor(self, norm_squared: float, unscale: float = 1.0) -> float | None:
        """The clipping factor for gradients of this squared norm, times `unscale`; None: skip."""
        factor = clip_factor(norm_squared, self.max_grad_norm)
        if factor is None and (self.check_finite or is_scaled(self)):
            return None
        return unscale * (1.0 if factor is None else factor)

    def _agree(self) -> tuple[float | None, int]:
        """(this rank's factor for its gradients, how many of all ranks' are masked).

        The factor is the ranks' common clipping factor, that of sqrt(mean_i ||g_i||^2), an upper
        bound of the norm of the mean gradient, times what undoes this rank's scale; None: skip the
        step. Raises RuntimeError on all ranks if their options have come to differ.
        """
        if not self._needs_norm:
            self._ask_ranks((0.0, 0.0))
            return 1.0, 0
        unscale = unscaling(self)
        squared_norm, masked = self._measured()
        agreement = self._ask_ranks((unscale**2 * squared_norm, masked))
        return self._factor(agreement.squared_norm, unscale), agreement.masked

    def _measured(self) -> list[float]:
        """Of this rank's gradients: [squared norm, elements that are not zero where masked]."""
        run = self._run
        measured = (
            run.overlap.measured()
            if run.overlap and self._is_compressing
            else [self._measure(bucket) for bucket in run.buckets]
        )
        return torch.stack(measured).sum(0).tolist()

    def _ask_ranks(self, measured: Sequence[float]) -> Agreement:
        """What the ranks know together; see `_measured`. Raises RuntimeError on all ranks if their
        steps, options, groups or requires_grad have come to differ, or every
        `check_ranks_every` steps their parameters and state."""
        run, options = self._run, self._in_common()
        flags = checkpoint.flags_of(self, run.with_gradient).tolist()
        agreement = run.runner.submit(
            agree,
            self.communicator,
            measured[0],
            int(measured[1]),
            f"{options}, {flags}",
            run.buckets[0].device,
        ).result()
        if not agreement.same_options:
            self._agree_on_gradients(options)
        if agreement.same_norm:
            self._warn_once(
                "all ranks' gradients have exactly the same norm. If DistributedDataParallel has "
                "averaged them already, they are sent twice: call "
                "onebit.ddp.attach(ddp_model, optimizer) before training. Otherwise give each rank "
                "its own data",
                about="equal gradients",
            )
        return agreement

    def _agree_on_gradients(self, options: str) -> None:
        """From now on all ranks know the same of `with_gradient`.

        Raises RuntimeError on all ranks if their `options` differ.
        """
        run = self._run
        flags = checkpoint.flags_of(self, run.with_gradient).tolist()
        device = run.buckets[0].device
        anywhere, same = run.runner.submit(
            ranks_with, self.communicator, flags, options, device
        ).result()
        run.with_gradient.update(p for p, flag in zip(self._params(), anywhere) if flag)
        if not same:
            self._compare_ranks()

    def _in_common(self) -> str:
        """What all ranks must have in common at this step, as text."""
        run = self._run
        trained = "".join(str(int(p.requires_grad)) for p in self._params())
        groups = [
            (len(group["params"]), describe_options(group, self._group_options))
            for group in self.param_groups
        ]
        own = describe_optimizer(
            type(self).__name__, self.steps, run.options, {"phase": self.phase}, is_scaled(self)
        )
        every = self.check_ranks_every
        if not every or self.steps - run.compared_at < every:
            return f"{own}, {trained}, {groups}"
        run.compared_at = self.steps
        return f"{own}, {trained}, {groups}, {self._facts()}, {self._sums()}"

    def _sums(self) -> list[int]:
        """A sum of each tensor, and of each vector of the state, that is the same on all ranks."""
        tensors: list[torch.Tensor] = []
        for bucket in self._run.buckets:
            if bucket.compress and not self._run.is_synced:
                for entries in self._common_between_syncs(bucket):
                    tensors.extend(entries.values())
                continue
            tensors.extend(bucket.params)
            tensors.extend(x for entries in bucket.stored() for x in entries.values())
            if bucket.packed is not None:
                tensors.append(bucket.packed)
        return checksums(tensors)

    def _check_ranks(self) -> None:
        """At the first step the ranks compare what they have; at every step each looks at its own
        gradients."""
        run = self._run
        if not run.ranks_are_compared:
            size = self.communicator.size
            if not self._communicator_is_given and default_communicator().size != size:
                raise RuntimeError(
                    "torch.distributed was initialised after the optimizer was made, which "
                    "therefore works alone: make the optimizer after init_process_group, or pass "
                    "communicator=onebit.comm.Single() to train separate models on purpose"
                )
            self._compare_ranks()
            self._agree_on_gradients("")
            run.ranks_are_compared = True
            run.compared_at = self.steps
        check_dense(self._params(), self._names())

    def _compare_ranks(self) -> None:
        """Raise RuntimeError on all ranks, naming the first difference, unless parameters, moments
        and options are the same on all."""
        shared: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for bucket in self._run.buckets:
            shared |= zip(bucket.params, self._common_state(bucket))
        check_same_on_all_ranks(
            self.communicator,
            [
                self._description(),
                *describe_parameters(self.param_groups, self._group_options, self._names(), shared),
            ],
            self._run.buckets[0].device,
            "Build the same model and optimizer on every rank, call "
            "onebit.broadcast_parameters(model) before the first step, and change options and load "
            "state on all ranks alike",
        )

    def _common_state(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        """For each parameter of a bucket what must be the same on all ranks."""
        if bucket.compress and not self._run.is_synced:
            return self._common_between_syncs(bucket)
        entries = bucket.everything()
        return [{"the parameter": p} | own for p, own in zip(bucket.params, entries)]

    def _description(self) -> str:
        """A line of what the optimizers of all ranks must have in common, apart from parameters."""
        options = {"phase": self.phase} | self._run.options
        return describe_optimizer(
            type(self).__name__, self.steps, options, self._facts(), is_scaled(self)
        )

    def _overview(self) -> dict[str, str]:
        """The options of the whole optimizer, as `repr` shows them."""
        shown = [name for name in option_names(type(self)) if name in self._run.options]
        return {name: describe_option(self._run.options[name]) for name in shown}

    # ---- exchange

    def _exchanges(self, factor: float = 1.0) -> list[Future]:
        """Each bucket's average; with overlap most exchanges have begun during backward."""
        run = self._run
        if run.overlap:
            return run.overlap.exchanges()
        return [self._start_exchange(bucket, factor) for bucket in run.buckets]

    def _start_exchange(self, bucket: Bucket, factor: float = 1.0) -> Future:
        """Start to average a bucket's gradients, times `factor`: exactly, or compressed if it holds
        errors."""
        if bucket.allreduce:
            return self._start_compressed_exchange(bucket, factor)
        allreduce = ExactAllreduce(self.communicator, self._wire_dtype(bucket)).allreduce
        if factor == 1.0:
            return self._run.runner.submit(allreduce, *bucket.gradient_in_parts())
        return self._run.runner.submit(allreduce, bucket.flat_gradient().mul_(factor))

    def _wire_dtype(self, bucket: Bucket) -> torch.dtype:
        """What a bucket's gradients travel in when they are averaged exactly.

        float16 cannot hold what a GradScaler's scale was for.
        """
        if is_scaled(self) and bucket.wire_dtype == torch.float16:
            return bucket.dtype
        return bucket.wire_dtype

    def _may_start_early(self) -> bool:
        """Whether an exchange may begin before step(): not until the ranks have been compared."""
        return self._run.ranks_are_compared and self._compress_flags() == self._run.compress_flags

    def _start_early(self, bucket: Bucket) -> tuple[Future, torch.Tensor | None]:
        """Start to average a bucket's gradients before step(): (future, what `_measure` finds)."""
        bucket.check_tensors()
        self._run.meter.open()
        self._run.with_gradient.update(p for p in bucket.params if p.grad is not None)
        with torch.no_grad():
            exchange = self._start_exchange(bucket)
            needed = self._is_compressing and self._needs_norm
            return exchange, self._measure(bucket) if needed else None

    def no_sync(self) -> AbstractContextManager:
        """A context in which backward only accumulates gradients.

        Needed with overlap=True, for all but the last backward before a step.
        """
        return self._run.overlap.paused() if self._run.overlap else nullcontext()

    def _begin_change(self) -> None:
        """From here on a failure leaves the state in pieces, until `is_changing` is reset."""
        self._run.is_changing = True

    def _must_be_whole(self) -> None:
        """Raise RuntimeError if a step or a sync has failed in its middle."""
        if self._run.is_changing:
            raise RuntimeError(
                "an earlier step() or synchronize() of this optimizer failed in its middle, when "
                "a part of the parameters and of the state had changed already: load the last "
                "checkpoint into model and optimizer, on all ranks, and go on from there"
            )

    def _must_be_idle(self, what: str) -> None:
        """Raise RuntimeError if an exchange is under way, which `what` would disturb."""
        if self._run.overlap:
            self._run.overlap.check_idle(what)

    # ---- between steps

    def restart_warmup(self, steps: int) -> None:
        """Go back to exact Adam for `steps` steps.

        Nothing changes for an optimizer that never freezes its variance.
        """

    @torch.no_grad()
    def synchronize(self) -> None:
        """Give every rank the same state, so that one checkpoint serves all ranks, and any number
        of them. All ranks must call it, between the same two steps.

        An optimizer whose ranks train apart syncs their models: call it before evaluation, too.
        Each worker error becomes mean_i delta_i + delta_bar and the server error 0, by one exact
        all_reduce: what the errors hold together does not change.
        """
        self._must_be_idle("synchronize was called")
        self._must_be_whole()
        self._begin_change()
        if not self._run.is_synced:
            self._sync()
        for bucket in [bucket for bucket in self._run.buckets if bucket.allreduce]:
            bucket.allreduce.worker_error = bucket.allreduce.total_error()
            server_error = bucket.allreduce.server_error
            bucket.allreduce.server_error = torch.zeros_like(server_error)
            self._run.errors_are_shared = True
        self._run.is_changing = False

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's. Compression errors differ between ranks: let each rank save its own
        file, or call `synchronize` first.

        torch.distributed.checkpoint takes every tensor from some one rank: with it, always call
        `synchronize` first.

        Nothing in it is shared with the optimizer: it holds copies, as large as the state.
        """
        self._must_be_whole()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = checkpoint.saved(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            state_dict = after(self, state_dict) or state_dict
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], reset_errors: bool = False) -> None:
        """Take over a state, also that of torch's optimizer of the same kind (Adam, AdamW, SGD).

        State keeps its own dtype whatever the parameters'.

        Args:
            reset_errors: start with zero errors, and warn of how much is lost, where the
                checkpoint's belong to another rank.

        Raises ValueError if the state is another optimizer's or another model's, if the errors
        belong to another rank or world size, or if the groups do not match.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        checkpoint.load(self, state_dict, reset_errors)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # ---- traffic and warnings

    def _exact_bytes(self) -> int:
        """What a rank would send in one exact all_reduce of all gradients in their own dtype."""
        ranks = self.communicator.size
        return sum(
            2 * (ranks - 1) * sum(bucket.layout.numels) * bucket.wire_dtype.itemsize // ranks
            for bucket in self._run.buckets
        )

    @property
    def communication(self) -> Communication:
        """A frozen snapshot of this rank's traffic in steps: bytes_sent, bytes_received, calls,
        compression_ratio; and the same of the last step, as `.last_step`.

        It leaves out what passes between steps: how the ranks are compared at the first step and
        at the freeze, and what `restart_warmup` and `synchronize` send. The communicator's own
        counters have everything.
        """
        meter = self._run.meter
        return Communication(**vars(meter.total), last_step=meter.last)

    def _warn_of_masked_gradients(self, masked: int) -> None:
        if masked and self.masked_remedy:
            self._warn_once(
                f"{masked} gradient elements, over all ranks, belong to coordinates that had none "
                f"before the freeze: they are masked and do not train. {self.masked_remedy}",
                about="masked gradients",
            )

    def _warn_once(self, message: str, about: str) -> None:
        if about not in self._run.warned_of:
            self._run.warned_of.add(about)
            self._warn(message)

    def _warn(self, message: str) -> None:
        """On rank 0, for all ranks."""
        if self.communicator.rank == 0:
            notices.warn(message)
