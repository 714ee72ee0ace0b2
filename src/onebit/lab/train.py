"""Train one task with one optimizer over several workers, and record the run.

    python -m onebit.lab.train experiment=figure_04 profile=smoke optimizer=onebit_adam workers=3

conf/config.yaml documents the options; `--cfg job` prints their values. The exit code is 0 if the
run finished, or diverged and is recorded as such; 1 if there was an error; 130 after Ctrl-C.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial

import hydra
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from onebit.lab.config import CONF, with_total_steps, wrong_override
from onebit.lab.runs.compare import check_folder
from onebit.lab.runs.metadata import ENDED
from onebit.lab.training.loop import train
from onebit.lab.training.run import run_from
from onebit.lab.training.workers import WorkerError, hold


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def launch(config: DictConfig) -> None:
    """Check the configuration and the run's folder, fetch the data, then start the workers."""
    try:
        config = with_total_steps(config)
        # Every process looks before the workers meet, since after that one writes into the folder.
        status = check_folder(config)
        if status in ENDED and config.resume:
            print(f"{config.output} holds a run that has {status}: nothing to do.", file=sys.stderr)
            return
        run = run_from(config)
        run.task.prepare()
        held = hold(run.folder) if run.comm.leads else nullcontext()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    with held:
        run.comm.run(partial(train, run))


def main() -> None:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors here instead of printing them
    try:
        launch()
    except SystemExit as end:
        # Exit code 2 is argparse's, which has only said that it does not know an argument.
        raise SystemExit(wrong_override(sys.argv[1:]) if end.code == 2 else end.code) from None
    except InstantiationException as error:
        raise SystemExit(f"error: {error.__cause__ or error}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(f"error: {wrong_override(sys.argv[1:]) or error}") from None
    except WorkerError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print(
            "\nInterrupted. With resume=true the run continues from its newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(130)  # nothing else ends workers that are threads


if __name__ == "__main__":
    main()
