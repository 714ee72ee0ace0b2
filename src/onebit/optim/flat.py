import torch

from ..layout import Layout

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names for m and v in `optimizer.state`


class FlatState:
    """The parameters that travel together, and their optimizer state as flat vectors in one layout.

    Args:
        groups: parameter groups; each holds a consecutive span of the vectors.
        ranks: W.
        errors: whether there are error buffers.

    Attributes:
        gradient, momentum, variance: float [layout.size]; float64 if a parameter is, else float32.
        worker_error: float [layout.size], server_error: float [layout.chunk]; None without errors.
        spans: for each group (group, slice of the vectors).
        tensors: for each group (group, [(parameter, its momentum, its variance), ...]), views into the vectors.
        wire_dtype: the dtype that all gradients share, else that of the vectors.
    """

    def __init__(self, groups, ranks, errors):
        self.params = [p for group in groups for p in group["params"]]
        device = self.params[0].device
        self.layout = Layout([p.shape for p in self.params], ranks, device)
        dtypes = {p.dtype for p in self.params}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.wire_dtype = dtypes.pop() if len(dtypes) == 1 else dtype
        zeros = lambda size: torch.zeros(size, dtype=dtype, device=device)  # noqa: E731
        self.gradient, self.momentum, self.variance = (zeros(self.layout.size) for _ in range(3))
        self.worker_error = zeros(self.layout.size) if errors else None
        self.server_error = zeros(self.layout.chunk) if errors else None
        self._gradient_views = self.layout.views(self.gradient)
        self._cut_into(groups)

    def _cut_into(self, groups):
        self.spans, self.tensors = [], []
        triples = list(zip(self.params, self.layout.views(self.momentum), self.layout.views(self.variance)))
        first = 0
        for group in groups:
            last = first + len(group["params"])
            self.spans.append((group, self.layout.span(first, last)))
            self.tensors.append((group, triples[first:last]))
            first = last

    def collect_gradients(self):
        """Copy this rank's gradients into `self.gradient` and return it; a gradient that is None counts as zero."""
        for p, view in zip(self.params, self._gradient_views):
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(p.grad)
        return self.gradient

    def state(self):
        """For each parameter its entries in `optimizer.state`, views into the vectors.

        The server error belongs to a chunk, not to a parameter: it stands with the first parameter, on every rank alike.
        """
        vectors = dict(zip(MOMENTS, (self.momentum, self.variance)))
        if self.worker_error is not None:
            vectors["worker_error"] = self.worker_error
        views = {name: self.layout.views(vector) for name, vector in vectors.items()}
        entries = [{name: views[name][i] for name in views} for i in range(len(self.params))]
        if self.server_error is not None:
            entries[0]["server_error"] = self.server_error
        return entries
