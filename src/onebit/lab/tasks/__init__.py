"""What is trained: model, data and loss, chosen in the config by `_target_`.

A task has three methods; the training loop (`onebit.lab.train`) asks for nothing else:

    model()                                       a new torch module; its weights follow from torch's random state
    batch(seed, step, rank, micro, size, length)  a dict of tensors on the CPU: a pure function of its arguments
    loss(model, batch)                            a scalar tensor, the mean over the batch

and `description()`, a few facts for run.json. Making a task loads nothing: data comes with the first batch.
"""
