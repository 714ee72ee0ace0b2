from onebit.optim.options import describe_compressor


class CompressedSteps:
    """Every step is compressed, from the first one: a mixin that goes before a `SteppingOptimizer`, which sets `compressor` first of all."""

    has_errors = True

    def _describe(self):
        return f"{super()._describe()}, compressor={describe_compressor(self.compressor)}"

    def _build(self, moments):
        super()._build(moments)
        for part in self._compressed:
            self._make_allreduce(part)
