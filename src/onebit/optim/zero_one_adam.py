"""0/1 Adam."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from onebit.comm import Communicator
from onebit.compression import Sign
from onebit.kernels.torch_ops import (
    Path,
    Terms,
    apply_moves,
    zero_one_momentum,
    zero_one_variance,
)
from onebit.optim.agreement import unscaling
from onebit.optim.bounded_steps import BoundedSteps
from onebit.optim.bucket import Bucket, Group
from onebit.optim.freeze import large_steps, raise_to_floor, small_variance
from onebit.optim.local_steps import LocalSteps
from onebit.optim.run_state import Option, RunState
from onebit.optim.step_sets import StepSets
from onebit.optim.validation import check_flag, check_number, check_whole


@dataclass(eq=False)
class ZeroOneRun(RunState):
    """Attributes:
    sets: T_v and T_u.
    variance_steps: how often the variance was updated.
    checked_variance: variance_steps when the variance was last looked at.
    trained: which parameters require a gradient since the last sync; None: not known.
    rate_sums, decays: of each group since the last sync, the sum of lr / (1 - beta1^t) and the
        product of 1 - lr weight_decay.
    """

    sets: StepSets | None = None
    variance_steps: int = 0
    checked_variance: float = 0
    trained: list[bool] | None = None
    rate_sums: list[float] = field(default_factory=list)
    decays: list[float] = field(default_factory=list)


class ZeroOneAdam(LocalSteps, BoundedSteps):
    """0/1 Adam (Lu et al., ICLR 2023).

    Its local steps send nothing, and its syncs send one bit for each parameter. With this rank's
    gradient g_i, a variance v that is the same on all ranks, and T_v and T_u the steps of
    `onebit.optim.step_sets.StepSets`, step t is

        if t in T_v:  g_i <- mean_i g_i, exactly;   v <- beta2 v + (1 - beta2) g_i^2
        m_i <- beta1 m_i + (1 - beta1) g_i
        x_i <- (1 - lr weight_decay) x_i - lr m_i / (sqrt(v) + eps)
        u_i <- u_i + lr m_i
        if t in T_u:  m = C-allreduce(u_i / sum lr);   m_i <- m;   u_i <- 0
                      x_i <- prod(1 - lr weight_decay) x_sync - (sum lr) m / (sqrt(v) + eps)
                      x_sync <- x_i

    sum and product being over the steps since the last sync. While v stays, u is both the way that
    a rank has gone and, over the sum of learning rates, its mean momentum, so that one message
    averages both; while the learning rate is 0, m_i itself is sent. A step of T_v syncs too,
    without that message: its gradient is everybody's, and so is its momentum. Errors are in units
    of the momentum, as in 1-bit Adam, which this is if v is frozen and every step syncs. The
    paper's printed algorithm could not be read; this is a reconstruction, whose departures from
    what is known of the paper are documented.

    Between syncs the ranks' parameters differ: call `synchronize()`, on all ranks, before
    evaluation and before saving, before you change `requires_grad`, and before you change
    parameters, which a sync computes from those of the last sync.

    A coordinate whose v is zero takes no part until v is updated there; a warning tells if one gets
    a gradient once v is frozen. In a step without exchange each rank clips by its own norm, and
    elements of its gradient that are not finite count as zero, or all of them if it clips, uses a
    GradScaler or has groups with compress=False. Those are averaged exactly at every step.

    Args: as `DistributedAdam`, and
        variance_freeze_step: the last step that may update the variance; the last of the
            learning-rate warm-up is a good choice.
        variance_update_scaler: kappa; the distance of two updates of the variance doubles after so
            many updates. A short run needs more: before the freeze there should be several times
            1 / (1 - beta2) updates.
        local_step_scaler: the distance of two syncs doubles after so many syncs.
        local_step_clipper: H, the largest distance of two syncs. 1: every step syncs.
        variance_floor: v is at least this fraction of its tensor's mean, so that nothing is masked
            and nothing runs away; 0: mask.
        bound_steps: in a step, and in a sync for each step since the last, no coordinate moves
            further than Adam could move it, see `onebit.optim.bounded_steps`; `bounded_share` says
            how many would have. False: as in the paper.
        compressor: see `onebit.compression`; None: `Sign`.
    """

    run_state = ZeroOneRun
    compresses = True
    more_vectors = {"accumulator": "accumulator", "anchor": "synced_parameter"}  # u and x_sync

    variance_floor: float = Option()
    compressor: Any = Option()

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        variance_freeze_step: float,
        variance_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        variance_floor: float = 0.0,
        bound_steps: bool = True,
        bias_correction: bool = True,
        max_grad_norm: float | None = None,
        check_finite: bool = True,
        compressor: Any = None,
        communicator: Communicator | None = None,
    ) -> None:
        sets = StepSets(
            variance_freeze_step, variance_update_scaler, local_step_scaler, local_step_clipper
        )
        self._run.sets = sets
        self._run.options |= {option.name: getattr(sets, option.name) for option in fields(sets)}
        check_number("variance_floor, a fraction of a tensor's mean variance,", variance_floor, 0)
        check_flag("bound_steps", bound_steps)
        self.variance_floor = variance_floor
        self.bound_steps = bound_steps
        self.compressor = compressor or Sign
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            bias_correction=bias_correction,
            max_grad_norm=max_grad_norm,
            check_finite=check_finite,
            communicator=communicator,
        )

    @property
    def masked_remedy(self) -> str:  # type: ignore[override]
        """While v can still be updated a mask does not last, and nothing needs to be said."""
        if self.steps < self._run.sets.last_update:
            return ""
        return (
            "Put them in a group with compress=False, choose a later variance_freeze_step, or call "
            "restart_warmup(steps)"
        )

    def _lay_out(self, moments: dict[torch.Tensor, dict[str, torch.Tensor]]) -> None:
        super()._lay_out(moments)
        self._begin_path()
        for bucket in self._compressed:
            self._mask_and_compress(bucket)

    def _begin_path(self) -> None:
        """The ranks have just synced."""
        groups = len(self.param_groups)
        self._run.trained = None
        self._run.rate_sums, self._run.decays = [0.0] * groups, [1.0] * groups

    def _mask_and_compress(self, bucket: Bucket) -> None:
        """Where v = 0 nothing is sent. The errors stay as they are."""
        active, before = bucket.layout.real & (bucket.variance > 0), bucket.allreduce
        if before and torch.equal(active, bucket.partition.active):
            return
        self._make_allreduce(bucket, active)
        if before:
            bucket.allreduce.worker_error = before.worker_error
            bucket.allreduce.server_error = before.server_error

    # ---- a step

    def _follow_phase(self) -> None:
        """Between two syncs the same parameters must be trained."""
        run, trained = self._run, [p.requires_grad for p in self._params()]
        if run.sets.is_empty or run.trained is None:
            run.trained = trained
        elif trained != run.trained:
            raise RuntimeError(
                "requires_grad changed between two syncs, while the ranks' models differ: change "
                "it back, call synchronize() on all ranks, then change it"
            )

    def _meets_next(self) -> bool:
        return self._run.sets.syncs_at(self.steps + 1)

    def _own_factor(self) -> float:
        """Without clipping no norm is needed: a local step leaves out what is not finite itself."""
        exact = any(not bucket.compress for bucket in self._run.buckets)
        if self.max_grad_norm is not None or exact:
            return super()._own_factor()
        unscale = unscaling(self)
        return 0.0 if math.isnan(unscale) else unscale

    def _count_step(self) -> None:
        super()._count_step()
        run = self._run
        run.variance_steps += run.sets.updates_variance(self.steps)
        for i, group in enumerate(self.param_groups):
            run.rate_sums[i] += self._rate(group)
            run.decays[i] *= 1 - float(group["lr"]) * group["weight_decay"]

    def _local_update(self, bucket: Bucket, factor: float) -> None:
        sets = self._run.sets
        if sets.updates_variance(self.steps):
            self._update_all(bucket, factor)
            return
        bucket.drop_gradient()  # its memory: the kernels read the gradients where they are
        if sets.syncs_at(self.steps):
            self._average(bucket, factor)
        else:
            self._go_on(bucket, factor)

    def _update_all(self, bucket: Bucket, factor: float) -> None:
        """A step of T_v: every rank has the same gradient, and so the same momentum."""
        g = self._exact_mean(bucket, self._own_gradient(bucket, factor))
        self._update_variance(bucket, g)
        for group, span in bucket.spans:
            beta1 = group["betas"][0]
            zero_one_momentum(bucket.momentum[span], g[span], bucket.variance[span], beta1)
        self._move(bucket, self._rate_sum, self._decay)

    def _update_variance(self, bucket: Bucket, g: torch.Tensor) -> None:
        """v <- beta2 v + (1 - beta2) g^2, of the mean gradient g, and what follows from v."""
        for group, span in bucket.spans:
            zero_one_variance(bucket.variance[span], g[span], group["betas"][1])
        if self.variance_floor:
            raise_to_floor(bucket, self.variance_floor)
        self._mask_and_compress(bucket)

    def _go_on(self, bucket: Bucket, factor: float) -> None:
        """m and u, then x <- (1 - lr weight_decay) x - rate m / (sqrt(v_hat) + eps)"""
        gradients, weight = self._gradients(bucket, factor)
        is_first = self._run.sets.is_empty
        if is_first:  # the kernel keeps those that it changes
            for p, x, anchor in self._beside_anchors(bucket):
                if x is None:
                    anchor.copy_(p)
        bounded = bucket.kernels.zero_one_local(
            bucket.partition,
            bucket.trained(),
            gradients,
            bucket.momentum,
            bucket.accumulator,
            bucket.variance,
            bucket.anchor if is_first else None,
            weight,
            self.check_finite,
            bucket.per_tensor(lambda group: group["betas"][0]),
            bucket.per_tensor(self._rate),
            *self._moves(
                bucket, self._rate, lambda group: 1 - float(group["lr"]) * group["weight_decay"]
            ),
        )
        self._run.bounded.append(bounded)

    def _average(self, bucket: Bucket, factor: float | None = None) -> None:
        """m <- C-allreduce(u / sum of rates)        u <- 0
        x <- decay x_sync - (sum of rates) m / (sqrt(v_hat) + eps)

        factor: this rank's gradients times `factor` are a step before; None: there is none.
        """
        allreduce, is_empty = bucket.allreduce, self._run.sets.is_empty
        allreduce.rounds = self.steps  # so that a compressor's random draws follow from the step
        payload = allreduce.compress(self._mean_momentum(bucket, factor))
        gathered = self._run.runner.submit(allreduce.exchange, payload).result()
        allreduce.commit()
        anchor = None if is_empty else bucket.anchor
        if anchor is not None:
            bucket.accumulator.zero_()
        if not isinstance(allreduce.compressor, Sign):
            self._take_over(bucket, allreduce.decode(gathered), anchor)
            return
        for p, x, at_sync in self._beside_anchors(bucket) if anchor is not None else ():
            if x is None:
                p.copy_(at_sync)
        bounded = bucket.kernels.zero_one_sync(
            bucket.partition,
            bucket.trained(),
            bucket.variance,
            gathered,
            bucket.momentum,
            anchor,
            *self._moves(bucket, self._rate_sum, self._decay),
        )
        self._run.bounded.append(bounded)

    def _mean_momentum(self, bucket: Bucket, factor: float | None) -> Terms:
        """The way since the last sync over the sum of the rates, or m_i where that is 0."""
        gradients, weight = self._gradients(bucket, factor or 0.0)
        steps = factor is not None
        path = Path(
            bucket.momentum,
            None if self._run.sets.is_empty else bucket.accumulator,
            bucket.per_tensor(lambda group: group["betas"][0] if steps else 1.0),
            bucket.per_tensor(lambda group: 1 - group["betas"][0] if steps else 0.0),
            bucket.per_tensor(lambda group: self._rate(group) if steps else 0.0),
            bucket.per_tensor(self._rate_sum),
        )
        return Terms(gradients, [weight] * len(gradients), path=path)

    def _take_over(
        self, bucket: Bucket, momentum: torch.Tensor, anchor: torch.Tensor | None
    ) -> None:
        """`zero_one_sync` with a momentum that was decoded."""
        bucket.momentum.copy_(momentum)
        if anchor is not None:
            for p, at_sync in zip(bucket.params, bucket.layout.views(anchor)):
                p.copy_(at_sync)
        self._move(bucket, self._rate_sum, self._decay)

    def _gradients(self, bucket: Bucket, factor: float) -> tuple[list[torch.Tensor | None], float]:
        """(this rank's gradients, what to multiply them by); 0 makes zeros of anything."""
        return (bucket.gradients(), factor) if factor else ([None] * len(bucket.params), 1.0)

    def _beside_anchors(self, bucket: Bucket) -> Iterable[tuple]:
        """(parameter, the same or None if it is to be left alone, its x_sync), ..."""
        return zip(bucket.params, bucket.trained(), bucket.layout.views(bucket.anchor))

    def _moves(
        self, bucket: Bucket, rate: Callable[[Group], float], decay: Callable[[Group], float]
    ) -> tuple[list[float], list[float], list[float], list[float]]:
        """(decays, steps, epsilons, limits) of each tensor, so that it moves by
        rate m / (sqrt(v_hat) + eps), where sqrt(v_hat) = root sqrt(v).

        A step that updates v is Adam's own, and has no bound.

        Args:
            rate, decay: functions of a group.
        """

        def root(group: Group) -> float:
            return self._corrections(bucket, group)[1] ** -0.5

        rates = bucket.per_tensor(rate)
        fresh = self._run.sets.updates_variance(self.steps)
        return (
            bucket.per_tensor(decay),
            bucket.per_tensor(lambda group: rate(group) / root(group)),
            bucket.per_tensor(lambda group: group["eps"] / root(group)),
            [math.inf] * len(rates) if fresh else self._limits(bucket, rates),
        )

    def _move(
        self, bucket: Bucket, rate: Callable[[Group], float], decay: Callable[[Group], float]
    ) -> None:
        """x <- decay x - rate m / (sqrt(v_hat) + eps) with the momentum as it is, see `_moves`."""
        decays, steps, epsilons, limits = self._moves(bucket, rate, decay)
        moves = bucket.momentum.clone()
        for view, step in zip(bucket.layout.views(moves), steps):
            view *= step
        numbers = decays, epsilons, limits
        bounded = apply_moves(bucket.partition, bucket.trained(), bucket.variance, moves, *numbers)
        self._run.bounded.append(bounded)

    def _finish_step(self) -> None:
        run = self._run
        if run.sets.syncs_at(self.steps) and not run.sets.updates_variance(self.steps):
            self._check_variance()
        run.sets.took(self.steps)
        run.is_synced = run.sets.is_empty
        if run.is_synced:
            self._begin_path()

    def _check_variance(self) -> None:
        """Once after each update of v, when the first compressed momentum has come; warns once.

        Bounded steps need no warning.
        """
        run = self._run
        if self.bound_steps or run.checked_variance in (run.variance_steps, math.inf):
            return
        run.checked_variance = run.variance_steps
        eps = max(group["eps"] for group in self.param_groups)
        names = dict(zip(self._params(), self._names()))
        large: dict[str, int] = {}
        for bucket in self._compressed:
            correction = self._corrections(bucket, bucket.groups[0])[1]
            counts = large_steps(bucket, eps, correction)
            large |= {names[p]: count for p, count in zip(bucket.params, counts)}
        warning = small_variance(large)
        if warning:
            self._warn(warning)
            run.checked_variance = math.inf

    # ---- numbers of a group

    def _rate(self, group: Group) -> float:
        """lr / (1 - beta1^t), without bias correction lr."""
        correction = 1 - group["betas"][0] ** self.steps if self.bias_correction else 1.0
        return float(group["lr"]) / correction

    def _rate_sum(self, group: Group) -> float:
        return self._run.rate_sums[self._index(group)]

    def _decay(self, group: Group) -> float:
        return self._run.decays[self._index(group)]

    def _index(self, group: Group) -> int:
        return next(i for i, own in enumerate(self.param_groups) if own is group)

    def _variance_correction(self, bucket: Bucket, group: Group) -> float:
        if not bucket.compress:
            return super()._variance_correction(bucket, group)
        updates = self._run.variance_steps
        return 1 - group["betas"][1] ** updates if updates else 1.0

    # ---- between steps

    def _sync(self) -> None:
        """A sync out of turn."""
        self._run.bounded = []
        for bucket in self._compressed:
            self._average(bucket)
        self._run.sets.synced(self.steps)
        self._begin_path()
        self._run.is_synced = True

    def restart_warmup(self, steps: int) -> None:
        """Update the variance in `steps` more steps, as often as at the start.

        This is for a change of data. All ranks must call it, between the same two steps. Raises
        ValueError unless `steps` is a whole number of at least 1.
        """
        check_whole("steps", steps, 1)
        self._run.sets.restart(self.steps, steps)

    def _common_between_syncs(self, bucket: Bucket) -> list[dict[str, torch.Tensor]]:
        views = bucket.layout.views
        return [
            {"the parameter at the last sync": x, "exp_avg_sq": v}
            for x, v in zip(views(bucket.anchor), views(bucket.variance))
        ]

    # ---- checkpoints

    def _facts(self) -> dict[str, Any]:
        run = self._run
        return super()._facts() | {
            "variance_updates": run.variance_steps,
            "step_sets": run.sets.state_dict(),
            "rate_sums": run.rate_sums,
            "decays": run.decays,
        }

    def _take_facts(self, facts: dict[str, Any]) -> None:
        super()._take_facts(facts)
        run = self._run
        run.variance_steps = facts.get("variance_updates", self.steps)
        run.sets = replace(run.sets)  # as new
        if "step_sets" in facts:
            run.sets.load_state_dict(facts["step_sets"])
            run.rate_sums, run.decays = list(facts["rate_sums"]), list(facts["decays"])
