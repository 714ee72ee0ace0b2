"""Processes of a gloo group that run one function after the other."""

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from unittest import mock

import torch
import torch.distributed as dist

import onebit.comm
from helpers.outcomes import has_failed, outcome, results


class GlooRanks:
    """`size` processes, forked from one that has imported what all of them need."""

    def __init__(self, size, collective_timeout):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "onebit", "numba"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, size, self.folder.name, collective_timeout)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            # The fork server finds the modules to import by PYTHONPATH only.
            with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
                process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, size, fn, args, timeout):
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((fn, args)))
        return results(self._outcomes(time.monotonic() + timeout), size, timeout)

    def _outcomes(self, deadline):
        """{rank: outcome}, until all have answered, one has failed, or the time is over."""
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        found, failed = {}, False
        while waiting and not failed and time.monotonic() < deadline:
            for pipe in connection.wait(list(waiting), deadline - time.monotonic()):
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv_bytes()
                except (EOFError, ConnectionError):
                    failed = True  # the process has ended without an answer
                else:
                    failed = failed or has_failed(found[rank])
        return found

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(pipe, rank, size, folder, collective_timeout):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=collective_timeout),
    )
    # A rank that has nothing to do must not leave while another one is still connecting.
    dist.barrier()
    while True:
        try:
            fn, args = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the tests have ended
            return
        call = partial(fn, onebit.comm.TorchDistributed(), *args)
        pipe.send_bytes(outcome(rank, call))
