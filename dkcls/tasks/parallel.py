"""Many runs, several at once, each in a process of one thread. What is finished is skipped, what was stopped goes on."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from tqdm import tqdm

from dkcls.config import register, to_config
from dkcls.data.loader import end_with_parent
from dkcls.engine.errors import UserError
from dkcls.tasks import train

ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def train_all(
    jobs: Sequence[Sequence[str]],
    configs: Path,
    processes: int,
    then: Callable[[Path, float | None], None] | None = None,
) -> None:
    """Trains each job, the overrides of a config with a name among them.

    Args:
        configs: the folder with train.yaml.
        processes: how many at once; 0: one per core.
        then: called in the same process with the folder of a finished run, and the CPU seconds that training took, or None if
            part of it was done before.
    """
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)  # for the processes that are started here
    try:
        with ProcessPoolExecutor(
            processes or os.cpu_count(), get_context("spawn"), end_with_parent
        ) as pool:
            futures = [pool.submit(_train, job, configs, then) for job in jobs]
            try:
                for future in tqdm(
                    as_completed(futures), "runs", len(futures), unit="run", smoothing=0
                ):
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _train(
    job: Sequence[str], configs: Path, then: Callable[[Path, float | None], None] | None
) -> None:
    logging.getLogger("dkcls.engine").addFilter(lambda record: record.levelno > logging.INFO)
    torch.set_num_threads(1)
    register()
    with initialize_config_dir(str(configs.resolve()), version_base="1.3"):
        config = to_config(compose("train", list(job)))
    folder = Path(config.out) / config.name
    is_new, started = not folder.exists(), time.process_time()
    try:
        train(config)
        if then is not None:
            then(folder, time.process_time() - started if is_new else None)
    except UserError as error:
        raise UserError(f"{config.name}: {error}") from error
