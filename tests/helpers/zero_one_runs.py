"""Step sets of 0/1 Adam and the optimizer's state after each step."""

from helpers.reference_runs import STEPS

EVERY_STEP = {
    "variance_freeze_step": STEPS,
    "variance_update_scaler": STEPS,
    "local_step_clipper": 1,
}
DOUBLING = {
    "variance_freeze_step": 20,
    "variance_update_scaler": 3,
    "local_step_scaler": 6,
    "local_step_clipper": 4,
}
