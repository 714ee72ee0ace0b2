"""Every algorithm in plain NumPy float64, in the letters of the papers. Read this package first.

    n workers, d parameters        every array has all workers on its leading axis
    x [d]         parameters       g [n, d]       local gradients
    m [d]         momentum         v [d]          variance
    gamma         learning rate    eta            Adam's epsilon
    delta [n, d]  worker errors    delta_bar [d]  server error
    C             a compressor, see `one_bit`

Each algorithm is a generator over the steps t = 1, 2, ...: it asks `gradient(t, x)` for g, takes
one step and yields its `State`. `gamma(t)` is the learning rate of step t. Every hyper-parameter is
a scalar, or an array [d] if it differs between the optimizer's parameter groups. `groups` are the
slices of x whose elements share one scale, the groups of `onebit.layout.Partition`: a pair (worker
groups, server groups).

`core` holds the algorithms of the three papers, `baselines` everything that they are compared with,
`common` what both need.
"""

from onebit.reference.baselines import (
    double_squeeze,
    ef_momentum_sgd,
    lazy_variance_adam,
    local_sgd,
    naive_one_bit_adam,
    preconditioned_momentum_sgd,
    quantize,
    quantized_variance_adam,
    sgd,
    top_k,
)
from onebit.reference.common import State, compressed_average, identity, one_bit, sign
from onebit.reference.core import (
    LambState,
    LocalState,
    OneBitLambState,
    adam,
    lamb,
    one_bit_adam,
    one_bit_lamb,
    zero_one_adam,
)

__all__ = [
    "LambState",
    "LocalState",
    "OneBitLambState",
    "State",
    "adam",
    "compressed_average",
    "double_squeeze",
    "ef_momentum_sgd",
    "identity",
    "lamb",
    "lazy_variance_adam",
    "local_sgd",
    "naive_one_bit_adam",
    "one_bit",
    "one_bit_adam",
    "one_bit_lamb",
    "preconditioned_momentum_sgd",
    "quantize",
    "quantized_variance_adam",
    "sgd",
    "sign",
    "top_k",
    "zero_one_adam",
]
