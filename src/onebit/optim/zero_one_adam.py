import math
from dataclasses import replace

import torch

from onebit.compression import Sign
from onebit.kernels.torch_ops import Terms, apply_moves
from onebit.optim.adam import DistributedAdam
from onebit.optim.intervals import StepSets
from onebit.optim.local import LocalSteps
from onebit.optim.options import (
    check_compressor,
    check_number,
    check_whole,
    describe_compressor,
    option_names,
    reject_unknown,
)
from onebit.optim.small_variance import large_steps, raise_to_floor, small_variance


class ZeroOneAdam(LocalSteps, DistributedAdam):
    """0/1 Adam (Lu et al., ICLR 2023): local steps that send nothing, and syncs that send one bit for each parameter.

    With this rank's gradient g_i, a variance v that is the same on all ranks, and T_v and T_u the steps of
    `onebit.optim.intervals.StepSets`, step t is

        if t in T_v:  g_i <- mean_i g_i, exactly;   v <- beta2 v + (1 - beta2) g_i^2
        m_i <- beta1 m_i + (1 - beta1) g_i
        x_i <- (1 - lr weight_decay) x_i - lr m_i / (sqrt(v) + eps)
        u_i <- u_i + lr m_i
        if t in T_u:  m = C-allreduce(u_i / sum lr);   m_i <- m;   u_i <- 0
                      x_i <- prod(1 - lr weight_decay) x_sync - (sum lr) m / (sqrt(v) + eps);   x_sync <- x_i

    sum and product being over the steps since the last sync. While v stays, u is both the way that a rank has gone and, over the sum
    of learning rates, its mean momentum, so that one message averages both; while the learning rate is 0, m_i itself is sent. A step of T_v
    syncs too, without that message: its gradient is everybody's, and its momentum hence. Errors are in units of the momentum, as in 1-bit
    Adam, which this is if v is frozen and every step syncs. The paper's printed algorithm could not be read: the README says where this
    reconstruction departs from what is known of it.

    Between syncs the ranks' parameters differ: call `synchronize()`, on all ranks, before evaluation and before saving, before you change
    `requires_grad`, and before you change parameters, which a sync computes from those of the last sync.

    A coordinate whose v is zero takes no part until v is updated there; a warning tells if one gets a gradient once v is frozen. In a
    step without exchange each rank clips by its own norm, and a gradient that is not finite counts as zero. Groups with compress=False
    are averaged exactly at every step.

    Args: as `DistributedAdam`, and
        variance_freeze_step: the last step that may update the variance; the last of the learning-rate warm-up is a good choice.
        variance_update_scaler: kappa; the distance of two updates of the variance doubles after so many.
        local_step_scaler: the distance of two syncs doubles after so many syncs.
        local_step_clipper: H, the largest distance of two syncs. 1: every step syncs.
        variance_floor: v is at least this fraction of its tensor's mean, so that nothing is masked and nothing runs away; 0: mask.
        compressor: see `onebit.compression`; None: `Sign`.
    """

    has_errors = True
    more_vectors = {"accumulator": "accumulator", "anchor": "synced_parameter"}  # u and x_sync
    late_remedy = "Put them in a group with compress=False, choose a later variance_freeze_step, or call restart_warmup(steps)"

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        *,
        variance_freeze_step=None,
        variance_update_scaler=16,
        local_step_scaler=32678,
        local_step_clipper=16,
        variance_floor=0.0,
        bias_correction=True,
        max_grad_norm=None,
        check_finite=True,
        compressor=None,
        communicator=None,
        **unknown,
    ):
        reject_unknown(unknown, option_names(ZeroOneAdam.__init__), type(self).__name__)
        if variance_freeze_step is None:
            raise TypeError(
                "ZeroOneAdam needs variance_freeze_step=, the last step that may update the variance: usually the last step of the "
                "learning-rate warm-up; math.inf: none is the last"
            )
        self._sets = StepSets(
            variance_freeze_step, variance_update_scaler, local_step_scaler, local_step_clipper
        )
        check_number("variance_floor, a fraction of a tensor's mean variance,", variance_floor, 0)
        self.variance_floor = variance_floor
        self.compressor = check_compressor(compressor or Sign)
        self._checked_variance = 0  # _variance_steps when it was last looked at
        self._variance_steps = 0  # how often the variance was updated
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

    def _describe(self):
        return (
            f"{super()._describe()}, {self._sets}, {self._sets.state_dict()}, variance_floor={self.variance_floor}, "
            f"compressor={describe_compressor(self.compressor)}"
        )

    def _build(self, moments):
        super()._build(moments)
        self._begin_path()
        for part in self._compressed:
            self._mask_and_compress(part)

    def _begin_path(self):
        """Of each group since the last sync: the sum of lr / (1 - beta1^t) and the product of 1 - lr weight_decay."""
        self._trained = None  # which parameters are, since the last sync
        self._rate_sums, self._decays = (
            [0.0] * len(self.param_groups),
            [1.0] * len(self.param_groups),
        )

    def _mask_and_compress(self, part):
        """Where v = 0 nothing is sent. What is owed stays."""
        active, before = part.layout.real & (part.variance > 0), part.allreduce
        if before and torch.equal(active, part.partition.active):
            return
        self._make_allreduce(part, active)
        if before:
            part.allreduce.worker_error, part.allreduce.server_error = (
                before.worker_error,
                before.server_error,
            )

    # ---- a step

    def _take_step(self):
        trained = [p.requires_grad for p in self._params()]
        if self._sets.is_empty or self._trained is None:
            self._trained = trained
        elif trained != self._trained:
            raise RuntimeError(
                "requires_grad changed between two syncs, while the ranks' models differ: change it back, call synchronize() on all "
                "ranks, then change it"
            )
        return super()._take_step()

    def _meets_next(self):
        return self._sets.syncs_at(self.steps + 1)

    def _count_step(self):
        super()._count_step()
        self._variance_steps += self._sets.updates_variance(self.steps)
        for i, group in enumerate(self.param_groups):
            self._rate_sums[i] += self._rate(group)
            self._decays[i] *= 1 - float(group["lr"]) * group["weight_decay"]

    def _local_update(self, part, factor):
        g = self._own_gradient(part, factor)
        updates = self._sets.updates_variance(self.steps)
        if updates:
            self._update_variance(part, self._exact_mean(part, g))
        g.mul_(part.variance > 0)
        for group, span in part.spans:
            part.momentum[span].mul_(group["betas"][0]).add_(g[span] * (1 - group["betas"][0]))
        if updates:  # every rank has the same momentum
            self._move(part, part.momentum, self._rate_sum, self._decay)
            return
        for group, span in part.spans:
            part.accumulator[span] += part.momentum[span] * self._rate(group)
        if self._sets.syncs_at(self.steps):
            self._average(part)
        else:
            self._go_on(part)

    def _update_variance(self, part, g):
        """v <- beta2 v + (1 - beta2) g^2, of the mean gradient g."""
        for group, span in part.spans:
            part.variance[span] = (
                group["betas"][1] * part.variance[span] + (1 - group["betas"][1]) * g[span] ** 2
            )
        if self.variance_floor:
            raise_to_floor(part, self.variance_floor)
        self._mask_and_compress(part)

    def _go_on(self, part):
        """x <- (1 - lr weight_decay) x - rate m / (sqrt(v_hat) + eps)"""
        if self._sets.is_empty:
            part.anchor.copy_(part.flat(part.params))
        self._move(
            part,
            part.momentum,
            self._rate,
            lambda group: 1 - float(group["lr"]) * group["weight_decay"],
        )

    def _average(self, part):
        """m <- C-allreduce(u / sum of rates)      x <- decay x_sync - (sum of rates) m / (sqrt(v_hat) + eps)      u <- 0"""
        for group, span in part.spans:
            if self._rate_sum(group) > 0:
                part.momentum[span] = part.accumulator[span] / self._rate_sum(group)
        part.allreduce.rounds = self.steps  # so that random draws follow from the step
        payload = part.allreduce.compress(Terms(part.layout.views(part.momentum)))
        part.momentum.copy_(
            part.allreduce.decode(self._runner.submit(part.allreduce.exchange, payload).result())
        )
        part.allreduce.commit()
        if not self._sets.is_empty:
            for p, anchor in zip(part.params, part.layout.views(part.anchor)):
                p.copy_(anchor)
        self._move(part, part.momentum, self._rate_sum, self._decay)
        part.accumulator.zero_()

    def _move(self, part, direction, rate, decay):
        """x <- decay x - rate direction / (sqrt(v_hat) + eps), where sqrt(v_hat) = root sqrt(v)."""

        def root(group):
            return self._corrections(part, group)[1] ** -0.5

        moves = direction.clone()
        for group, span in part.spans:
            moves[span] *= rate(group) / root(group)
        apply_moves(
            part.partition,
            part.trained(),
            part.variance,
            moves,
            part.per_tensor(decay),
            part.per_tensor(lambda group: group["eps"] / root(group)),
        )

    def _check_variance(self):
        """Once after each update of v, when the first compressed momentum has come; warns once."""
        if self._checked_variance in (self._variance_steps, math.inf):
            return
        self._checked_variance = self._variance_steps
        eps = max(group["eps"] for group in self.param_groups)
        large = sum(
            large_steps(part, eps, self._corrections(part, part.groups[0])[1])
            for part in self._compressed
        )
        if large:
            self._warn(small_variance(large))
            self._checked_variance = math.inf

    def _finish_step(self):
        if self._sets.syncs_at(self.steps) and not self._sets.updates_variance(self.steps):
            self._check_variance()
        self._sets.took(self.steps)
        self._is_synced = self._sets.is_empty
        if self._is_synced:
            self._begin_path()

    # ---- numbers of a group

    def _rate(self, group):
        """lr / (1 - beta1^t), without bias correction lr."""
        return float(group["lr"]) / (
            1 - group["betas"][0] ** self.steps if self.bias_correction else 1.0
        )

    def _rate_sum(self, group):
        return self._rate_sums[self._index(group)]

    def _decay(self, group):
        return self._decays[self._index(group)]

    def _index(self, group):
        return next(i for i, own in enumerate(self.param_groups) if own is group)

    def _variance_correction(self, part, group):
        if not part.compress:
            return super()._variance_correction(part, group)
        return 1 - group["betas"][1] ** self._variance_steps if self._variance_steps else 1.0

    # ---- between steps

    def _sync(self):
        """A sync out of turn."""
        for part in self._compressed:
            self._average(part)
        self._sets.synced(self.steps)
        self._begin_path()
        self._is_synced = True

    def restart_warmup(self, steps):
        """Update the variance in `steps` more steps, as often as at the start: for a change of data. All ranks must call it."""
        check_whole("steps", steps, 1)
        self._sets.restart(self.steps, steps)

    def _common(self, part):
        """Between syncs: v, and the parameters of the last sync."""
        if not part.compress:
            return super()._common(part)
        views = part.layout.views
        return [
            {"parameter at the last sync": x, "exp_avg_sq": v}
            for x, v in zip(views(part.anchor), views(part.variance))
        ]

    def _warn_of_late_gradients(self, late):
        if self.steps >= self._sets.last_update:
            super()._warn_of_late_gradients(late)

    # ---- checkpoints

    def _facts(self):
        return super()._facts() | {
            "variance_updates": self._variance_steps,
            "step_sets": self._sets.state_dict(),
            "rate_sums": self._rate_sums,
            "decays": self._decays,
        }

    def _take_facts(self, facts):
        super()._take_facts(facts)
        self._variance_steps = facts.get("variance_updates", self.steps)
        self._sets = replace(self._sets)  # as new
        if "step_sets" in facts:
            self._sets.load_state_dict(facts["step_sets"])
            self._rate_sums, self._decays = list(facts["rate_sums"]), list(facts["decays"])
