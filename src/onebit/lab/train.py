"""Train one task with one optimizer over real ranks, and record it.

    python -m onebit.lab.train experiment=figure_04 profile=smoke optimizer=onebit_adam comm=gloo workers=3 seed=1

conf/config.yaml says what the options are; `--cfg job` prints their values. Exit code 0: the run finished, or it diverged
and is recorded as such; 1: an error.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial

import hydra
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from onebit.lab.config import CONF, wrong_override
from onebit.lab.runs.metadata import ENDED, check_folder
from onebit.lab.training.loop import train
from onebit.lab.training.run import run_from
from onebit.lab.training.workers import WorkerError, hold


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def launch(config: DictConfig) -> None:
    try:
        # Before the workers meet, since the first to go on writes into the folder.
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
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here as they are
    try:
        launch()
    except SystemExit as end:
        # 2: from argparse, which has said only that it does not know an argument.
        raise SystemExit(wrong_override(sys.argv[1:]) if end.code == 2 else end.code) from None
    except InstantiationException as error:
        raise SystemExit(f"error: {error.__cause__ or error}") from None
    except (HydraException, OmegaConfBaseException) as error:
        raise SystemExit(f"error: {wrong_override(sys.argv[1:]) or error}") from None
    except WorkerError as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print(
            "\nInterrupted; resume=true goes on from the newest checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(130)  # workers that are threads cannot be ended otherwise


if __name__ == "__main__":
    main()
