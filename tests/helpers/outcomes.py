"""What a call on a rank ended in, and how the outcomes of all ranks become results or an error."""

import pickle
import time
import traceback


def outcome(rank, call):
    """Whether the call has failed, in one byte, then (time, result, error), pickled."""
    result, error = None, None
    try:
        result = call()
    except BaseException as caught:
        error = caught
        error.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
    return bytes([error is not None]) + pickle.dumps((time.monotonic(), result, error))


def has_failed(answer):
    return answer[0] == 1


def results(answers, size, timeout, output=""):
    """The results in the order of the ranks. `answers`: {rank: outcome} of those that came."""
    found = {rank: pickle.loads(answers[rank][1:]) for rank in sorted(answers)}
    errors = [(when, error) for when, _, error in found.values() if error is not None]
    if errors:
        raise min(errors, key=lambda entry: entry[0])[1]
    late = sorted(set(range(size)) - found.keys())
    if late:
        raise TimeoutError(f"ranks {late} of {size} gave no answer within {timeout} s\n{output}")
    return [result for _, result, _ in found.values()]
