"""Run a function in several processes, one rank each: over gloo on the CPU, or over NCCL with a GPU each."""

import faulthandler
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# imported once, in the process that the ranks are forked from
PRELOAD = [
    *(
        "pytest",
        "torch._dynamo",
        "torch.distributed.tensor.parallel",
        "torch.distributed.fsdp",
        *("torch.distributed.checkpoint.state_dict", "numpy", "tokenizers"),
    ),
    *("twell.nn", "twell.nn.distributed", "twell.integrations.transformers", "twell.recipe", "twell.testing"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2", "qwen3")),
    *("transformers.trainer", "accelerate"),
]
# limit for a rank that waits for another: longer than any test here
PATIENCE_S = 60.0


Run = Callable[..., list[Any]]


def full(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def in_turn(device: torch.device, *functions: Callable[[torch.device], None]) -> None:
    """Run functions of a rank one after the other: ranks take longer to start than most of them."""
    for function in functions:
        function(device)


def forks() -> Any:
    """Return the context of processes that fork from one that has done the slow imports and has no threads."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def run(world: int, function: Callable[..., Any], *arguments: Any, folder: Path, backend: str = "gloo") -> list[Any]:
    """Return the results of ``function(device, *arguments)`` on ``world`` ranks of one process group.

    ``function`` and ``arguments`` are pickled, ``folder`` is empty. Raises AssertionError with the traceback of the
    first rank that fails, dies or takes too long, and ends the others.
    """
    context = forks()
    processes: list[Any] = []
    results: dict[int, Any] = {}
    store = folder / f"store-{time.monotonic_ns()}"
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        log = store.with_name(f"{store.name}-{rank}.txt")
        task = (rank, world, backend, str(store), log, sender, function, arguments)
        process = context.Process(target=_rank, args=task, daemon=True)
        process.start()
        sender.close()
        processes.append((process, receiver, log))
    try:
        deadline = time.monotonic() + PATIENCE_S
        waiting = {receiver: rank for rank, (_, receiver, _) in enumerate(processes)}
        failures: dict[int, str] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in () if failures else waiting.values():
                    failures[rank] = f"no end in {PATIENCE_S:.0f} s\n{processes[rank][2].read_text(errors='replace')}"
                break
            for receiver in ready:
                rank = waiting.pop(receiver)
                try:
                    ok, value = receiver.recv()
                except EOFError:
                    process, _, log = processes[rank]
                    process.join(10)
                    ok, value = False, f"died: exit code {process.exitcode}\n{log.read_text(errors='replace')}"
                (results if ok else failures)[rank] = value
            if failures:
                # one failure causes others, and its report need not come first
                deadline = min(deadline, time.monotonic() + 1)
        told = "\n".join(f"rank {rank} of {world} failed: {failures[rank]}" for rank in sorted(failures))
        assert not failures, told
        return [results[rank] for rank in range(world)]
    finally:
        for process, receiver, _ in processes:
            # a finished process exits by itself; after an error elsewhere it may wait forever
            process.join(10 if len(results) == world else 0)
            process.kill()
            process.join()
            receiver.close()


def _rank(
    rank: int,
    world: int,
    backend: str,
    store: str,
    log: Path,
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    with log.open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
        faulthandler.enable(stderr)
        # where it waits for others that do not come
        faulthandler.dump_traceback_later(PATIENCE_S - 5, file=stderr)
        try:
            torch.set_num_threads(1)
            # a collection visits no object of the process that this one was forked from
            gc.freeze()
            device = torch.device("cpu")
            if backend == "nccl":
                device = torch.device("cuda", rank)
                torch.cuda.set_device(device)
            else:
                # FSDP and tensor parallelism take GPUs where they see some
                os.environ["CUDA_VISIBLE_DEVICES"] = ""
            timeout = timedelta(seconds=PATIENCE_S)
            # gloo is for messages between hosts
            backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else backend
            dist.init_process_group(backends, f"file://{store}", rank=rank, world_size=world, timeout=timeout)
            message = True, function(device, *arguments)
            # no rank leaves while another still needs it
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            message = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        sender.send(message)
        if not message[0]:
            # threads of a broken process group may hang at exit
            os._exit(1)
