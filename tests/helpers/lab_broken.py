"""A task that fails on one worker; chosen by `_target_`."""

from onebit.lab.tasks.bert import BertPretraining


class BrokenOnRank1(BertPretraining):
    def batch(self, seed, step, rank, *rest):
        if rank == 1 and step == 3:
            raise KeyError("broken data")
        return super().batch(seed, step, rank, *rest)
