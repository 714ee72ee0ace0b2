"""`python -m onebit.plan`: will a 1-bit optimizer pay on a cluster, and how much does it save?

Computed by `onebit.time_model`; torch and NumPy are enough for it.
"""

from onebit.plan.answer import Answer, Question, answers, pays_below

__all__ = ["Answer", "Question", "answers", "pays_below"]
