"""Check what `make release` has put into dist/: kernels of its GPUs, what launches them, and files of git alone.

Exit status 1 with one line per fault.
"""

import argparse
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# what the sources leave out of git, and what their builder adds
LEFT_OUT, ADDED = (".ci/",), {"PKG-INFO"}
# what launches kernels
HOST = "twell/_lib/libtwell_host.so"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="the wheel and the sources")
    faults: list[str] = []
    tracked = _git("ls-files").split()
    if changed := _git("status", "--porcelain").strip():
        faults.append(f"the checkout must be as committed, got\n{changed}")
    for path in parser.parse_args().files:
        faults += of_wheel(path) if path.suffix == ".whl" else of_sources(path, tracked)
    print("\n".join(faults) or "every kernel, and no file beyond those of git")
    return int(bool(faults))


def of_wheel(path: Path) -> list[str]:
    from cute_kernels import catalog, fingerprint

    faults = []
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        manifests = [json.loads(wheel.read(name)) for name in names if PurePosixPath(name).name == "manifest.json"]
    if HOST not in names:
        faults.append(f"{path.name} must have {HOST}, without which launches take longer")
    found = {manifest["arch"]: manifest for manifest in manifests}
    for arch in sorted({fingerprint.ARCH, *found}):
        wanted = {spec.symbol for spec in catalog.of_architecture(arch)}
        manifest = found.get(arch, {"symbols": [], "source_hash": fingerprint.source_hash()})
        if missing := wanted - set(manifest["symbols"]):
            faults.append(f"{path.name} must have {len(wanted)} kernels for {arch}, got {len(wanted) - len(missing)}")
        if manifest["source_hash"] != fingerprint.source_hash():
            faults.append(f"{path.name} has kernels of other sources for {arch}")
    return faults


def of_sources(path: Path, tracked: list[str]) -> list[str]:
    """Files of the sources that git has not, or the other way round."""
    with tarfile.open(path) as sources:
        names = {str(PurePosixPath(*PurePosixPath(each.name).parts[1:])) for each in sources if each.isfile()}
    wanted = {name for name in tracked if not name.startswith(LEFT_OUT)} | ADDED
    differences = [f"{path.name} must not have {name}" for name in sorted(names - wanted)]
    return differences + [f"{path.name} must have {name}" for name in sorted(wanted - names)]


def _git(*arguments: str) -> str:
    return subprocess.check_output(["git", *arguments], cwd=ROOT, text=True)


if __name__ == "__main__":
    sys.exit(main())
