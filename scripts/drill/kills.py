"""Processes that are killed, asked to stop, or hang."""

import os
import signal
import time
from functools import partial
from pathlib import Path

from .lab import (
    SHORT,
    STEPS_PER_EPOCH,
    Lab,
    Process,
    Row,
    differences,
    finish,
    run_of,
    sentence,
    start,
    start_imported,
    state_of,
    step_of,
    until,
    wait_for_step,
)

TWICE = ("schedule.epochs=2", "log.to=[]")
SAVES = (  # where a process dies in a save
    "best:file", "best:link", "1:file", "2:hash", "3:prune", "2:link",
    "1:hash", "2:file", "1:link", "3:file", "1:prune", "3:hash",
)  # fmt: skip


def kill(lab: Lab) -> Row:
    """Kill the process of a run of one rank with SIGKILL, again and again.

    When a run ends before the kills do, another begins.
    """
    row = Row(
        "kill -9 of the process, at random moments of its life and within saves and evaluations"
    )
    overrides = SHORT if lab.short else ("schedule.epochs=20",)
    expected, runs = lab.expected(*overrides), 0
    while row.tried < lab.many(100, 3):
        folder = lab.folder / f"kill{runs}"
        process = _start_to_kill(lab, row.tried, folder, *overrides)
        if process.alive() or process.code == -signal.SIGKILL:
            process.kill()
            row.check([])
        elif process.code:
            row.check([f"ended with {process.code}: {process.said()[-1000:]}"])
        else:
            runs += 1
            row.fail(differences(folder, expected))
    row.fail(finish(folder, expected, *overrides))
    return row


def _start_to_kill(lab: Lab, number: int, folder: Path, *overrides: str) -> Process:
    """Return a process at the moment when it is to be killed, or that was killed in a save."""
    workers, fault = f"data.workers={lab.random.choice((0, 0, 2))}", ""
    if number % 3 == 1:
        fault = f"save:{SAVES[number // 3 % len(SAVES)]}:{lab.random.random():.3f}"
    begin = start if number % 10 == 9 and not lab.short else start_imported
    process = begin(folder, *overrides, workers, fault=fault)
    if fault:
        process.wait()
    elif number % 10 == 8:
        time.sleep(3 * lab.random.random())  # while it starts
    else:
        _wait_for_steps(lab, folder, process, lab.random.randint(1, 4))
    return process


def _wait_for_steps(lab: Lab, folder: Path, process: Process, steps: int) -> None:
    """Wait until the process has done so many steps, and a moment more.

    More often than not, wait only until it evaluates.
    """
    first, pause = step_of(folder), 0.1 * lab.random.random()
    in_evaluation = lab.random.random() < 0.7

    def reached() -> bool:
        step = step_of(folder)
        return step != first and (
            step - first >= steps or (in_evaluation and step % STEPS_PER_EPOCH == 0)
        )

    if in_evaluation and first and first % STEPS_PER_EPOCH == 0:
        until(lambda: "resuming from" in process.said(), process)
        pause *= 5
    else:
        until(reached, process)
    time.sleep(pause)


def kill_rank(lab: Lab) -> Row:
    """Kill one of two ranks with SIGKILL; torchrun restarts both. A run takes up to ten kills."""
    row = Row("kill -9 of one of two ranks under torchrun --max-restarts")
    runs = 0
    length = SHORT if lab.short else TWICE
    while row.tried < lab.many(20, 1):
        folder, killed = lab.folder / f"run{runs}", 0
        process = start(folder, *length, f"data.workers={runs % 2}", ranks=2, restarts=10)
        while killed < lab.many(10, 1) and _both_train(lab, folder, process):
            os.kill(lab.random.choice(process.ranks()), signal.SIGKILL)
            killed += 1
            _wait_for_words(process, "resuming from", killed)
            row.check([])
        if process.wait():
            row.fail([f"torchrun ended with {process.code}: {process.said()[-1500:]}"])
        else:
            row.fail(differences(folder, lab.expected(*length, ranks=2)))
        runs += 1
    return row


def _both_train(lab: Lab, folder: Path, process: Process) -> bool:
    """Wait until two ranks have done another step, and a moment longer. False if torchrun ended."""
    before = step_of(folder)
    until(lambda: step_of(folder) not in (0, before) and len(process.ranks()) == 2, process)
    time.sleep(0.5 * lab.random.random())
    return process.alive()


def _wait_for_words(process: Process, words: str, times: int) -> None:
    until(lambda: process.said().count(words) >= times, process)


def _wait_for_end(process: Process, rank: int) -> None:
    until(lambda: rank not in process.ranks())


def signals(lab: Lab) -> Row:
    """Stop runs of one rank and of two by signals: they save, exit with their code and resume."""
    row = Row("SIGTERM, SIGINT once and twice; to the process, to its group, to torchrun")
    asks = [(1, "SIGINT", True), (1, "SIGTERM", False)]
    asks += (
        []
        if lab.short
        else [(1, "SIGTERM", True), (1, "SIGINT twice", False), (1, "SIGINT twice", True)]
    )
    asks += [] if lab.short else [(2, "SIGTERM", False), (2, "SIGINT", True), (2, "SIGTERM", True)]
    length = SHORT if lab.short else TWICE
    for number, (ranks, what, to_group) in enumerate(asks):
        folder = lab.folder / f"ranks{ranks}"
        begin = start_imported if lab.short else partial(start, ranks=ranks)
        process = begin(folder, *length, f"data.workers={2 - number % 2 * 2}")
        wait_for_step(folder, process, step_of(folder) + 1)
        time.sleep(0.2 * lab.random.random())
        send = os.killpg if to_group else os.kill
        send(process.pid, signal.Signals[what.split()[0]])
        if "twice" in what:
            time.sleep(0.05)
            send(process.pid, signal.SIGINT)
        code, said = process.wait(), process.said()
        row.check(
            _stopped(folder, code, said, what, ranks),
            f"{what} to {ranks} ranks{', group' if to_group else ''}",
        )
    for ranks in {ranks for ranks, _, _ in asks}:
        row.fail(
            finish(
                lab.folder / f"ranks{ranks}",
                lab.expected(*length, ranks=ranks),
                *length,
                ranks=ranks,
            )
        )
    return row


def _stopped(folder: Path, code: int, said: str, what: str, ranks: int) -> list[str]:
    """Return what is wrong with how the run stopped.

    The exit code is checked for one rank only: torchrun has its own, whatever its ranks end with.
    """
    problems = []
    saved, done = state_of(folder)["step"], step_of(folder)
    if "twice" not in what:
        if f"stopped by {what}" not in said:
            problems.append(f"does not say so: {said[-1000:]}")
        if saved != done:
            problems.append(f"saved step {saved}, not {done}, the last that it did")
    # The process may have ended before the second signal.
    expected = {130, 75} if "twice" in what else {75}
    if ranks == 1 and code not in expected:
        problems.append(f"exit code {code}: {said[-1000:]}")
    if ranks == 1 and "Traceback" in said:
        problems.append(f"a traceback: {said[-1000:]}")
    return problems


def hang(lab: Lab) -> Row:
    """Stop a rank with SIGSTOP: the other names it and ends, and torchrun restarts both."""
    timeout, length = lab.many(20, 8), SHORT if lab.short else TWICE
    row = Row(f"a rank hangs (SIGSTOP), train.timeout={timeout}")
    ranks, folder = [1, 0, 1][: lab.many(3, 1)], lab.folder / "run"
    process = start(folder, *length, f"train.timeout={timeout}", ranks=2, restarts=len(ranks))
    for rank in ranks:
        if not _both_train(lab, folder, process):
            break
        pid, other = process.ranks()[rank], process.ranks()[1 - rank]
        os.kill(pid, signal.SIGSTOP)
        stopped = time.monotonic()
        _wait_for_words(process, "not been heard of", row.tried + 1)
        seconds = time.monotonic() - stopped
        named = (
            process.said().rpartition("not been heard of")[0].endswith(f"error: rank {rank} has ")
        )
        problems = [] if named else [f"does not name rank {rank}: {process.said()[-1000:]}"]
        row.check(
            problems + ([f"found after {seconds:.1f} s"] if seconds > timeout else []),
            f"rank {rank}",
        )
        if lab.short:
            _wait_for_end(process, other)  # by itself
            os.kill(pid, signal.SIGKILL)  # as torchrun does after half a minute
        until(lambda: len(process.ranks()) < 2, process)
    if process.wait():
        row.fail([f"torchrun ended with {process.code}: {process.said()[-1500:]}"])
    else:
        row.fail(differences(folder, lab.expected(*length, ranks=2)))
    return row


def two_at_once(lab: Lab) -> Row:
    """Start a second process in a run's directory, and two that start together in another's."""
    row = Row("a second process in the same run directory", outcome="refused")
    folder = lab.folder / "held"
    length = ("schedule.epochs=20", "log.to=[]")
    first = start_imported(folder, *length)
    until(lambda: (run_of(folder) / ".lock").exists(), first)
    for _ in range(lab.many(5, 1)):
        time.sleep(lab.random.random())
        second = start_imported(folder, *length)
        problems = sentence(second, 1, f"in use by process {first.pid}")
        row.check(
            problems + ([] if first.alive() else [f"the first has ended: {first.said()[-1000:]}"])
        )
    first.kill()
    for number in range(lab.many(5, 0)):
        folder = lab.folder / f"race{number}"
        codes = sorted(
            process.wait() for process in [start_imported(folder, *SHORT) for _ in range(2)]
        )
        row.check(
            ([] if codes == [0, 1] else [f"a race ended with {codes}"])
            + differences(folder, lab.expected(*SHORT))
        )
    return row
