"""Queries to the CUDA driver through cuda-python that torch does not offer, cheap enough for every call.

Nothing happens at import. Without cuda-python or a driver every query raises RuntimeError and names the missing one;
``describe`` reports it instead.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# The compute capability with a family of kernels of its own: H100, H200.
SM_90 = (9, 0)
# Architecture whose code a GPU runs, by the major number of its compute capability.
ARCHITECTURES = {8: "sm_80", 9: "sm_90a", 10: "sm_100", 12: "sm_120"}
SUPPORTED = " or ".join(", ".join(f"{major}.x" for major in ARCHITECTURES).rsplit(", ", 1))


@dataclass(frozen=True)
class Device:
    """One GPU: ``capability`` is (major, minor), ``memory`` in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    memory: int


@dataclass(frozen=True)
class Driver:
    """The driver's CUDA version as (major, minor) and its devices; ``problem`` says why there are none."""

    version: tuple[int, int] | None
    devices: tuple[Device, ...]
    problem: str | None = None


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(f"cuda.bindings is not usable ({error}): `pip install cuda-bindings`") from error
    return driver


def _call(name: str, *arguments: Any) -> Any:
    """Call a driver function and return its result; raise RuntimeError with the driver's status."""
    driver = _bindings()
    try:
        status, *result = getattr(driver, name)(*arguments)
    except RuntimeError as error:
        # cuda-python raises this itself if libcuda.so.1 is missing
        raise RuntimeError(f"no CUDA driver: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {status.name}")
    return result[0] if result else None


@functools.cache
def _initialised() -> None:
    _call("cuInit", 0)


@functools.cache
def _handle(index: int) -> Any:
    _initialised()
    return _call("cuDeviceGet", index)


def _attribute(index: int, name: str) -> int:
    attribute = getattr(_bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(_call("cuDeviceGetAttribute", attribute, _handle(index)))


@functools.cache
def name(index: int) -> str:
    """The model of device ``index``, as in "NVIDIA H200"."""
    return str(_call("cuDeviceGetName", 128, _handle(index)).split(b"\0")[0].decode())


@functools.cache
def sm_count(index: int) -> int:
    return _attribute(index, "MULTIPROCESSOR_COUNT")


@functools.cache
def capability(index: int) -> tuple[int, int]:
    return _attribute(index, "COMPUTE_CAPABILITY_MAJOR"), _attribute(index, "COMPUTE_CAPABILITY_MINOR")


# A kernel without instructions, and shared memory of which a multiprocessor has room for one CTA.
_EMPTY = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\n\0"
_WHOLE_MEMORY = 200 << 10


@functools.cache
def clusters(index: int, ctas: int) -> int:
    """Clusters of so many CTAs, each with a multiprocessor of its own, that device ``index`` runs at a time."""
    driver = _bindings()
    with relaxed_capture():
        context = _call("cuDevicePrimaryCtxRetain", _handle(index))
        _call("cuCtxPushCurrent", context)
        try:
            module = _call("cuModuleLoadData", _EMPTY)
            kernel = _call("cuModuleGetFunction", module, b"empty")
            attributes = driver.CUfunction_attribute
            most = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call("cuFuncSetAttribute", kernel, most, _WHOLE_MEMORY)
            # for clusters of 16
            larger = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _call("cuFuncSetAttribute", kernel, larger, 1)
            dimension = driver.CUlaunchAttribute()
            dimension.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            shape = dimension.value.clusterDim
            shape.x, shape.y, shape.z = ctas, 1, 1
            launch = driver.CUlaunchConfig()
            launch.gridDimX, launch.gridDimY, launch.gridDimZ = ctas, 1, 1
            launch.blockDimX, launch.blockDimY, launch.blockDimZ = 32, 1, 1
            launch.sharedMemBytes, launch.attrs, launch.numAttrs = _WHOLE_MEMORY, [dimension], 1
            found = int(_call("cuOccupancyMaxActiveClusters", kernel, launch))
            _call("cuModuleUnload", module)
        finally:
            _call("cuCtxPopCurrent")
            _call("cuDevicePrimaryCtxRelease", _handle(index))
    return max(found, 1)


def architecture(index: int) -> str | None:
    """The architecture of kernels that device ``index`` runs; None if there are none for it."""
    return ARCHITECTURES.get(capability(index)[0])


@functools.cache
def driver_version() -> tuple[int, int]:
    version = int(_call("cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10


def is_capturing(stream: int) -> bool:
    """Whether a CUDA graph is being captured on the stream with this handle (``torch.cuda.Stream.cuda_stream``)."""
    driver = _bindings()
    status, state = driver.cuStreamIsCapturing(driver.CUstream(stream))
    # the legacy stream cannot be queried while another stream captures in global mode
    if status == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        return True
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuStreamIsCapturing failed: {status.name}")
    return bool(state != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread query events, allocate and load kernels while another captures a CUDA graph.

    A capture in mode "global", torch's default, forbids that to all threads and fails if one does it.
    """
    _initialised()
    relaxed = _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", before)


def describe() -> Driver:
    """The driver and every visible device; never raises."""
    version = None
    try:
        version = driver_version()
        _initialised()
        devices = tuple(
            Device(i, name(i), capability(i), sm_count(i), int(_call("cuDeviceTotalMem", _handle(i))))
            for i in range(_call("cuDeviceGetCount"))
        )
    except RuntimeError as error:
        return Driver(version, (), str(error))
    return Driver(version, devices, None if devices else "no CUDA device is visible")
