"""The few one-pass functions that compression consists of. `torch_ops` defines them: readable, on any device."""
