"""Identity of a compiled kernel: hash of these sources and versions of the compiler. Pure Python."""

import hashlib
from importlib import metadata
from pathlib import Path

ARCH = "sm_90a"

# The distribution of the DSL that every installation has: with or without the compiler, for any toolkit.
DSL, TVM_FFI = "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"


def source_hash() -> str:
    """SHA-256 over the names and bytes of every Python file of this package."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name, content = path.relative_to(root).as_posix().encode(), path.read_bytes()
        # lengths keep two different trees from giving the same bytes
        digest.update(b"%d %d " % (len(name), len(content)) + name + content)
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of the distributions that determine the code and its binding."""
    return {name: metadata.version(name) for name in (DSL, TVM_FFI)}
