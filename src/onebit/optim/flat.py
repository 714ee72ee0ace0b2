import torch

from onebit import kernels
from onebit.kernels.torch_ops import block_sums, group_sums
from onebit.layout import Layout


def buckets(groups, cap):
    """Cut the parameters of `groups` into buckets, each [(group, its parameters), ...], the last parameters first.

    Backward makes the gradients of the last parameters first, so that bucket 0 is the first whose gradients are complete. A bucket
    holds at most `cap` bytes, or one parameter that is larger; None: everything in one bucket.
    """
    found, used = [], 0
    for group in reversed(groups):
        for p in reversed(group["params"]):
            if not found or (cap is not None and used + p.nbytes > cap):
                found.append([])
                used = 0
            bucket = found[-1]
            if not bucket or bucket[0][0] is not group:
                bucket.insert(0, (group, []))
            bucket[0][1].insert(0, p)
            used += p.nbytes
    return found


class FlatState:
    """Parameters that travel together, and their optimizer state as flat vectors in one layout.

    Args:
        bucket: [(group, parameters), ...], see `buckets`.
        ranks: W.
        compress: whether the groups ask for compression.
        vectors: what is kept for each element: attribute here -> its name in `optimizer.state`.
        numbers: what is kept for each tensor: its name here and in `optimizer.state` -> the value at the start.

    Attributes:
        momentum, and the others of `vectors`: float [layout.size]; float64 if a parameter is, else float32. May be assigned.
            While the momentum is packed, it is decoded anew at every access.
        those of `numbers`: float64 [tensors], on the CPU.
        packed: the momentum as the payload uint8 [W, row_bytes] that it came in; None: it is stored as it is.
        allreduce: the `CompressedAllreduce` that holds the compression errors; None: there are none.
        partition: one scale per tensor, with the allreduce's mask; without errors all but padding is active.
        spans: for each group (group, slice of the vectors).
        wire_dtype: the dtype that all gradients share, else that of the vectors.
    """

    def __init__(self, bucket, ranks, compress, vectors, numbers):
        self.compress = compress
        self.vectors = vectors
        self.numbers = numbers
        self.params = [p for _, params in bucket for p in params]
        self.groups = [group for group, params in bucket for _ in params]
        self.device = self.params[0].device
        self.kernels = kernels.for_device(self.device.type)
        self.layout = Layout([p.shape for p in self.params], ranks, self.device)
        self.dtypes = [p.dtype for p in self.params]
        self.dtype = torch.float64 if torch.float64 in self.dtypes else torch.float32
        self.wire_dtype = self.dtypes[0] if len(set(self.dtypes)) == 1 else self.dtype
        for attribute in vectors:
            setattr(self, attribute, self._zeros())
        for name, value in numbers.items():
            setattr(self, name, torch.full((len(self.params),), value, dtype=torch.float64))
        self.drop_errors()
        self._gradient = None
        self.spans, first = [], 0
        for group, params in bucket:
            self.spans.append((group, self.layout.span(first, first + len(params))))
            first += len(params)

    def _zeros(self):
        return torch.zeros(self.layout.size, dtype=self.dtype, device=self.device)

    def hold_errors(self, allreduce, partition=None):
        """`partition`: one scale per tensor; None: the allreduce's own is that."""
        self.allreduce, self.partition = allreduce, partition or allreduce.partition

    def drop_errors(self):
        self.allreduce, self.partition = None, self.layout.worker_partition()

    @property
    def momentum(self):
        return self._momentum if self.packed is None else self.allreduce.decode(self.packed)

    @momentum.setter
    def momentum(self, value):
        self._momentum, self.packed = value, None

    def pack_momentum(self, payload):
        """From now on the momentum is what `payload` says; neither it nor a flat gradient is stored."""
        self.packed = payload
        self._momentum = self._gradient = None

    def per_tensor(self, value):
        """value(group) for each parameter."""
        values = {id(group): value(group) for group, _ in self.spans}
        return [values[id(group)] for group in self.groups]

    def trained(self):
        """Each parameter, or None if it is frozen."""
        return [p if p.requires_grad else None for p in self.params]

    def flat(self, tensors, out=None):
        """The tensors as a flat vector, a new one or `out`; one that is None counts as zero."""
        return self._laid_out(tensors, self._zeros() if out is None else out)

    def gradients(self):
        """This rank's gradient of each parameter, or None."""
        return [p.grad for p in self.params]

    def flat_gradient(self):
        """This rank's gradients as a flat vector, kept for the next call; a gradient that is None counts as zero."""
        if self._gradient is None:
            self._gradient = self._zeros()
        return self._laid_out(self.gradients(), self._gradient)

    def drop_gradient(self):
        """Make the flat gradient anew next time, since something was written into its padding, which must be 0."""
        self._gradient = None

    def _laid_out(self, tensors, vector):
        for tensor, view in zip(tensors, self.layout.views(vector)):
            if tensor is None:
                view.zero_()
            else:
                view.copy_(tensor)
        return vector

    def tensor_sums(self, x, square=False):
        """The sum of each tensor inside x [layout.size], or of its squares; last the tail's, which is 0. float64 [tensors + 1]."""
        return group_sums(self.partition, block_sums(self.partition, x, square))

    def errors(self):
        """(worker error [layout.size], server error [layout.chunk])."""
        if self.allreduce:
            return self.allreduce.worker_error, self.allreduce.server_error
        return self._zeros(), torch.zeros(self.layout.chunk, dtype=self.dtype, device=self.device)

    def stored(self):
        """For each parameter what of its state is stored as it is: views into the vectors."""
        return self._by_parameter(
            {
                name: getattr(self, attribute)
                for attribute, name in self.vectors.items()
                if attribute != "momentum" or self.packed is None
            }
        )

    def everything(self, errors):
        """For each parameter its whole state, what is not stored being computed; `errors`: with the compression errors.

        The server error belongs to a chunk, not to a parameter: it stands with the first parameter, on every rank alike.
        """
        vectors = {name: getattr(self, attribute) for attribute, name in self.vectors.items()}
        if not errors:
            return self._by_parameter(vectors)
        vectors["worker_error"], server_error = self.errors()
        entries = self._by_parameter(vectors)
        entries[0]["server_error"] = server_error
        return entries

    def computed(self, name, i):
        """The entry `name` of parameter i, which is not stored; KeyError if it has none."""
        if name == self.vectors.get("momentum") and self.packed is not None:
            return self.layout.views(self.momentum)[i]
        if name == "worker_error" and self.allreduce:
            return self.layout.views(self.allreduce.worker_error)[i]
        if name == "server_error" and self.allreduce and i == 0:
            return self.allreduce.server_error
        raise KeyError(name)

    def _by_parameter(self, vectors):
        views = {name: self.layout.views(vector) for name, vector in vectors.items()}
        views |= {
            name: [number.view(()) for number in getattr(self, name).split(1)]
            for name in self.numbers
        }
        return [{name: views[name][i] for name in views} for i in range(len(self.params))]
