"""The line that names the machine of a measurement."""

import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import twell
from twell.runtime import fingerprint, packaged


def _output(*command: str) -> str | None:
    """First line of a command's output, None if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def _commit() -> str | None:
    """Short commit of the checkout this module is in, with "+" if files differ from it."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not (root / "python" / "twell").is_dir():
        return None
    commit = _output("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain")
    return f"{commit}+" if commit and changed else commit


def _under_load(device: torch.device, *command: str) -> str | None:
    """``_output`` while the device multiplies matrices: clocks at rest say nothing."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(_output, *command)
        while not asked.done():
            for _ in range(8):
                a @ a
            torch.cuda.synchronize(device)
        return asked.result()


def _gpu(device: torch.device) -> list[str]:
    properties = torch.cuda.get_device_properties(device)
    parts = [f"{properties.name} ({properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB)"]
    uuid = str(getattr(properties, "uuid", ""))
    which = f"--id=GPU-{uuid}" if uuid else f"--id={device.index or 0}"
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.max.memory,power.limit,driver_version"
    queried = _under_load(device, "nvidia-smi", which, query, "--format=csv,noheader,nounits")
    fields = [field.strip() for field in (queried or "").split(",")]
    if len(fields) == 5:
        now, most, memory, power, driver = fields
        parts += [f"SM {now} MHz now, {most} most, memory {memory} MHz, {power} W", f"driver {driver}"]
    return parts


def machine_line(device: torch.device | str | None = None) -> str:
    """The line to print beside a measurement: processor, clocks under load, driver, torch, CuTe DSL, twell and commit.

    ``device`` is the one that ran; by default the current CUDA device, or the CPU if there is none.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda":
        parts = _gpu(chosen)
    else:
        parts = [f"CPU {platform.machine()}, {torch.get_num_threads()} threads"]
    parts += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    manifest = packaged.read_manifest(packaged.FOLDER)
    dsl = packaged.version(fingerprint.DSL) if manifest is None else manifest.dsl_version
    parts += [f"CuTe DSL {dsl}", f"twell {twell.__version__}"]
    if manifest is not None:
        parts.append(f"kernels {manifest.source_hash[:12]}")
    if (commit := _commit()) is not None:
        parts.append(f"commit {commit}")
    return "; ".join(parts)
