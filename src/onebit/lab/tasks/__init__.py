"""What is trained: model, data and loss, chosen in the config by `_target_`.

A task has these methods; the training loop (`onebit.lab.train`) asks for nothing else:

    model()                                       a new torch module; its weights follow from torch's random state
    batch(seed, step, rank, micro, size, length)  a dict of tensors on the CPU: a pure function of its arguments
    loss(model, batch)                            a scalar tensor, the mean over the batch
    prepare()                                     fetch and cache the data; RuntimeError, with the remedy, if it is not to be had
    description()                                 a few facts for run.json

Making a task loads nothing, so that a configuration can be looked at where its data is not.
"""
