"""examples/train.py: an end of any kind costs only steps, and the same command goes on; several processes."""

import ctypes
import errno
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

pytest.importorskip("transformers")

import train
from small_runs import SPARSE, command, others, records, same, steps, weights
from training import checkpoint, model, parallel, report

TARGET = "--target-nnz 6 --lr 0.01 --observe-every 4".split()

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    step, deaths = train.Training.step, {}

    def interrupted(self: Any, stopping: Any) -> bool:
        complete = step(self, stopping)
        # a model that draws random numbers
        self.parameters[0].data.add_(torch.randn(()), alpha=1e-3)
        if self.done in deaths:
            request(deaths[self.done])
        return bool(complete)

    monkeypatch.setattr(train.Training, "step", interrupted)
    arguments = ["--steps", 9, "--checkpoint-every", 3, "--eval-every", 3, *SPARSE]
    assert run(*arguments, out="whole") == 0
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    deaths |= {2: signal.SIGTERM, 6: signal.SIGINT}
    assert run(*arguments) == 128 + signal.SIGTERM
    printed = capsys.readouterr().out
    assert "SIGTERM: stopping after this micro-batch; one more stops at once" in printed
    assert "stopped; saved up to step 2; the same command goes on from there" in printed
    assert steps(tmp_path / "out") == [2]
    # with any global random state
    torch.manual_seed(99)
    assert run(*arguments) == 128 + signal.SIGINT
    assert steps(tmp_path / "out") == [3, 6]
    assert run(*arguments) == 0
    assert "step-00000006" in capsys.readouterr().out
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before

    assert same(tmp_path / "out", tmp_path / "whole")
    whole = records(tmp_path / "whole")
    assert [line for line in records(tmp_path / "out") if line in whole] == whole
    stats = [(tmp_path / out / "sparsity.csv").read_text().splitlines() for out in ("out", "whole")]
    assert stats[0][-2:] == stats[1][-2:]
    # noise was drawn for the neurons dead at step 4, before the run stopped
    assert 0.3 < next(line["dead"] for line in whole if line["step"] == 6) < 0.9


def request(number: int) -> None:
    """Send this process a signal and wait until a thread has received it."""
    os.kill(os.getpid(), number)
    time.sleep(0.2)


def signalled(
    monkeypatch: Any, when: Callable[[int, Any], bool], *, times: int = 1, noise: float = 0.0
) -> Callable[[], int]:
    """Send signals in micro-batches of which ``when`` says so, and count those of training.

    noise: of a model that draws random numbers.
    """
    forward, read = train.Training.forward, 0

    def interrupted(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        nonlocal read, times
        read += self.model.training
        if times and when(read, self):
            times -= 1
            request(signal.SIGTERM)
        loss: torch.Tensor = forward(self, inputs, targets)
        return loss * (1 + noise * torch.rand(())) if noise else loss

    monkeypatch.setattr(train.Training, "forward", interrupted)
    return lambda: read


@pytest.mark.parametrize("begun", [0, 4])
def test_a_step_that_is_stopped_has_changed_nothing(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any, begun: int
) -> None:
    """Each step has four micro-batches; step 4 looks for dead neurons, and a target has steered four."""
    last = 4 * begun + 3
    read = signalled(monkeypatch, lambda read, run: run.model.training and read == last, noise=0.1)
    arguments = ["--steps", 8, "--checkpoint-every", 8, *(TARGET if begun else SPARSE)]
    assert run(*arguments, "--log-every", 3) == 128 + signal.SIGTERM
    assert read() == last
    assert steps(tmp_path / "out") == ([begun] if begun else [])
    said = f"saved up to step {begun}" if begun else "no step was complete"
    assert f"stopped; {said}; the same command goes on" in capsys.readouterr().out
    stopped = records(tmp_path / "out")
    assert [line["step"] for line in stopped] == ([3, begun] if begun else [])

    assert run(*arguments, "--log-every", 1, out="whole") == 0
    assert run(*arguments, "--log-every", 1) == 0
    assert same(tmp_path / "out", tmp_path / "whole")
    expected = records(tmp_path / "whole")
    assert [line for line in records(tmp_path / "out") if line["step"] > begun] == expected[begun:]
    # only of complete steps
    for line in stopped[1:]:
        since = expected[3:begun]
        assert line["loss"] == pytest.approx(sum(each["loss"] for each in since) / len(since), rel=1e-5)
        for name in ("dead", "lr", "gradient"):
            assert line[name] == since[-1][name], name


def test_evaluation_is_stopped_and_made_up_for(run: Callable[..., int], tmp_path: Path, monkeypatch: Any) -> None:
    arguments = ["--steps", 6, "--eval-every", 2, "--eval-sequences", 8, "--log-every", 3]
    assert run(*arguments, out="whole") == 0
    signalled(monkeypatch, lambda _, run: not run.model.training and run.done == 4)
    assert run(*arguments) == 128 + signal.SIGTERM
    assert steps(tmp_path / "out") == [4]
    assert [line["step"] for line in records(tmp_path / "out") if "held_out_ce" in line] == [2]
    assert run(*arguments) == 0
    assert records(tmp_path / "out") == records(tmp_path / "whole")


@pytest.mark.nightly
def test_finished_runs_are_extended(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    arguments = ["--checkpoint-every", 10, "--log-every", 1, "--lr", 0.01, "--tokens-per-step", 64]
    assert run("--steps", 40, *arguments) == 0
    first = {line["step"]: line for line in records(tmp_path / "out") if "lr" in line}
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    capsys.readouterr()
    assert run("--steps", 60, *arguments) == 0
    printed = capsys.readouterr().out
    assert "extended from 40 to 60 steps: those after 40, where the learning rate was to end, have --min-lr 0.001" in (
        printed
    )
    lines = {line["step"]: line for line in records(tmp_path / "out") if "lr" in line}
    assert list(lines) == list(range(1, 61))
    assert {step: lines[step] for step in first} == first
    assert [lines[step]["lr"] for step in range(41, 61)] == pytest.approx([0.001] * 20)
    assert not same(tmp_path / "out", tmp_path / "other")
    # in two parts, or after a stop, the result is the same
    assert run("--steps", 50, *arguments, out="other") == 0
    assert run("--steps", 60, *arguments, out="other") == 0
    shutil.rmtree(tmp_path / "other" / "checkpoints" / "step-00000060")
    assert run("--steps", 60, *arguments, out="other") == 0
    assert same(tmp_path / "out", tmp_path / "other")


WRITERS = {
    "tokens": (Path, "open", "train.bin", False),
    "tensors": (checkpoint.dcp, "save", "", True),
    "metrics": (report.Metrics, "write", "", True),
    "model": (model, "export", "", True),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_full_disk_is_one_sentence(
    run: Callable[..., int], text: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, what: str
) -> None:
    where, name, file, kept = WRITERS[what]
    arguments = ["--steps", 4, "--checkpoint-every", 2, "--cache", tmp_path / "cache"]
    if kept:
        assert run(*arguments[:2], "--steps", 2, *arguments[2:]) == 0
    original, full = getattr(where, name), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*given: Any, **more: Any) -> Any:
        if file and not any(str(each).endswith(file) for each in given):
            return original(*given, **more)
        if what == "model":
            raise ValueError(f"IoError(Os {{ code: 28, message: {os.strerror(errno.ENOSPC)!r} }})")
        try:
            try:
                raise full
            except OSError:
                raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904
        except RuntimeError as error:
            if what == "tensors":
                raise CheckpointException("save", {0: (error, None)}) from None  # type: ignore[dict-item]
            raise

    with monkeypatch.context() as patch:
        patch.setattr(where, name, refuse)
        capsys.readouterr()
        assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"train.py: error: no space is left on the disk of {tmp_path}")
    assert "MB free)" in line
    last = tmp_path / "out" / "checkpoints" / f"step-0000000{4 if what == 'model' else 2}"
    assert (f"{last}, {tmp_path / 'out' / 'final'}; make room, and the same command goes on" in line) == kept
    assert ("kept: nothing; make room, and the same command begins again" in line) != kept
    # no partial file takes space
    assert not list(tmp_path.rglob("*.tmp"))
    assert not list(tmp_path.rglob(".*partial*"))
    assert run(*arguments) == 0
    assert steps(tmp_path / "out") == [2, 4]


def test_damaged_checkpoints_are_not_read(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert run("--steps", 8, "--checkpoint-every", 1, "--keep", 8) == 0
    out = tmp_path / "out"
    saved = {step: out / "checkpoints" / f"step-{step:08d}" for step in range(1, 9)}
    assert steps(out) == list(saved)
    # cut short, missing, without a manifest, with half a manifest, under the name of an unfinished one
    (part,) = saved[8].glob("*.distcp")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    (saved[7] / "random-0.pt").unlink()
    (saved[6] / "manifest.json").unlink()
    (saved[5] / "manifest.json").write_text('{"step": 5, "fi')
    saved[4].rename(saved[4].with_suffix(".tmp"))
    assert steps(out) == [1, 2, 3]
    final = weights(out)
    assert run("--steps", 8, "--checkpoint-every", 1, "--resume", saved[8], out="other") == 2
    assert run("--steps", 8, "--checkpoint-every", 1, "--keep", 8) == 0
    assert steps(out) == list(range(1, 9))
    assert all(torch.equal(final[name], value) for name, value in weights(out).items())
    # other bytes of the same number
    part.write_bytes(whole[:9000] + bytes(64) + whole[9064:])
    assert run("--steps", 8, "--checkpoint-every", 1, "--keep", 8) == 2
    assert f"{saved[8]} is damaged: expected other bytes in {part.name}; remove it" in capsys.readouterr().err


def test_resume_says_what_differs(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert run("--steps", 2) == 0
    capsys.readouterr()
    assert run("--steps", 1, "--lr", 0.5) == 2
    message = capsys.readouterr().err
    assert "steps (2 there, 1 here), lr (0.001 there, 0.5 here), min_lr" in message
    assert "; repeat its options, of which --steps alone may grow" in message
    assert "hidden" not in message
    assert run("--steps", 4, "--lr", 0.5) == 2
    assert "differs in lr (0.001 there, 0.5 here), min_lr" in capsys.readouterr().err
    # of another text
    other = tmp_path / "text"
    other.mkdir()
    for i in range(9):
        (other / f"{i}.txt").write_text(f"another {i} " * 50)
    assert run("--steps", 2, "--text", other) == 2
    assert "differs in text (" in capsys.readouterr().err
    # place, speed and order may change
    assert run("--steps", 2, "--ffn", "dense", "--micro-batch", 4, "--log-every", 1) == 0


def test_runs_are_not_mixed(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    with checkpoint.alone(tmp_path / "out", parallel.World(0, 1, "", torch.device("cpu"))):
        assert run("--steps", 1) == 2
        assert "expected a folder of this run alone" in capsys.readouterr().err
    assert run("--steps", 4, "--checkpoint-every", 1, "--keep", 9) == 0
    earlier = tmp_path / "out" / "checkpoints" / "step-00000002"
    for resume in ("never", earlier):
        assert run("--steps", 4, "--resume", resume) == 2
        assert "step-00000003, " in capsys.readouterr().err
    # from there into another folder
    assert run("--steps", 4, "--resume", earlier, out="other") == 0
    assert same(tmp_path / "out", tmp_path / "other")


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_lost_ends_the_run_before_it_is_saved(
    run: Callable[..., int], tmp_path: Path, monkeypatch: Any, capsys: Any, what: str
) -> None:
    clip = parallel.clip

    def lost(parameters: list[Any], limit: float) -> torch.Tensor:
        if steps(tmp_path / "out") == [1]:
            parameters[0].grad[0, 0] = float("nan")
        return clip(parameters, limit)

    options = ["--lr", 1e38, "--warmup", 0, "--log-every", 100, "--checkpoint-every", 2]
    if what == "gradient":
        options = ["--checkpoint-every", 1]
        monkeypatch.setattr(parallel, "clip", lost)
    assert run("--steps", 4, *options) == 2
    assert f"the {what} became nan by step 2" in capsys.readouterr().err
    assert steps(tmp_path / "out") == ([1] if what == "gradient" else [])


def train_as_rank(rank: int, port: int, command: list[str], stop: bool) -> None:
    """Train as one rank of two; ``stop``: the second one gets SIGTERM in the first micro-batch of the second step."""
    torch.set_num_threads(1)
    forward = train.Training.forward

    def stopped(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        if self.done == 1 and rank == 1 and self.model.training:
            request(signal.SIGTERM)
        return forward(self, inputs, targets)

    if stop:
        setattr(train.Training, "forward", stopped)  # noqa: B010
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    sys.exit(train.main(command))


def two_ranks(command: list[str], stop: bool = False) -> list[int | None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return others(train_as_rank, (0, port, command, stop), (1, port, command, stop))


@pytest.mark.nightly
def test_two_ranks_are_as_one(run: Callable[..., int], text: Path, cache: Path, tmp_path: Path) -> None:
    def two(mode: str, *more: object, stop: bool = False) -> list[int | None]:
        return two_ranks(command(text, cache, tmp_path / mode, "--parallel", mode, *arguments, *more), stop)

    arguments = ["--steps", 4, "--checkpoint-every", 2, "--keep", 9, "--log-every", 1]
    assert run(*arguments, out="one") == 0
    start, one = tmp_path / "one" / "checkpoints" / "step-00000002", weights(tmp_path / "one")
    for mode in ("ddp", "fsdp"):
        # both give up the step between the same micro-batches
        assert two(mode, stop=True) == [128 + signal.SIGTERM] * 2
        assert steps(tmp_path / mode) == [1]
        assert [line["step"] for line in records(tmp_path / mode)] == [1]
    assert two("ddp") == [0, 0]
    shutil.rmtree(tmp_path / "fsdp")
    # from what one process saved
    assert two("fsdp", "--resume", start) == [0, 0]
    assert two("tp", "--resume", start) == [0, 0]
    for mode in ("ddp", "fsdp", "tp"):
        for name, weight in weights(tmp_path / mode).items():
            # sums in another order: 4e-8 when this was written, and a step changes 1e-2
            assert (weight - one[name]).norm() < 1e-6 * one[name].norm(), (mode, name)
        lines = records(tmp_path / mode)
        for line, expected in zip(lines, records(tmp_path / "one")[-len(lines) :]):
            assert line == pytest.approx(expected, rel=1e-5)
        # and back, with what two saved
        saved = tmp_path / mode / "checkpoints" / "step-00000004"
        assert run(*arguments, "--resume", saved, out=f"{mode}-back") == 0
        assert same(tmp_path / mode, tmp_path / f"{mode}-back")


def train_and_signal(command: list[str], delays: tuple[float, ...]) -> None:
    """Train with a micro-batch that takes a minute; send it signals after these delays in seconds."""
    torch.set_num_threads(1)

    def slow(self: Any, inputs: Any, targets: Any) -> torch.Tensor:
        def send() -> None:
            for delay in delays:
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGTERM)

        if self.done < 1:
            return forward(self, inputs, targets)
        threading.Thread(target=send, daemon=True).start()
        # like a long call into C++, it keeps Python's handlers from running; other threads get the signals
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        ctypes.CDLL(None).usleep(60_000_000)
        raise AssertionError("unreachable")

    forward = train.Training.forward
    setattr(train.Training, "forward", slow)  # noqa: B010
    train.Stop.SAME = 0.5
    os.dup2(os.open(f"{command[command.index('--out') + 1]}.log", os.O_WRONLY | os.O_CREAT), 1)
    sys.exit(train.main(command))


def test_a_second_signal_stops_at_once(text: Path, cache: Path, tmp_path: Path) -> None:
    """It stops any computation; a signal that a launcher sends twice is one request."""
    began = time.monotonic()
    arguments = command(text, cache, tmp_path / "out", "--steps", 4, "--checkpoint-every", 1)
    assert others(train_and_signal, (arguments, (0.5, 0.1, 1.0))) == [128 + signal.SIGTERM]
    assert time.monotonic() - began < 50
    log = (tmp_path / "out.log").read_text()
    assert log.count("SIGTERM: stopping after this micro-batch") == 1
    assert log.count("SIGTERM: stopped at once") == 1
    assert steps(tmp_path / "out") == [1]
