"""Is somebody else using the accelerator? Asked of the vendor's library before a server is started.

Each library is a module with a probe that lists its devices: memory in use, and the processes that use
them. A device is in use if a process that carries no mark of ours is on it, or if more of its memory is
taken than an idle device's driver takes. Which devices: those that ``CUDA_VISIBLE_DEVICES`` (or AMD's
``HIP_VISIBLE_DEVICES``, ``ROCR_VISIBLE_DEVICES``) names for the server; without it all of this machine's,
except those on which another server of ours runs, which another accelerator's lease covers. Where no
library, no driver or no device answers, the use is unknown, and said to be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import psutil

from include.capacity.errors import ServerError
from include.capacity.servers.stack import VISIBLE, visible
from include.capacity.servers.state import MARK, named

log = logging.getLogger(__name__)

IDLE_BYTES = 1 << 30
"""An idle device's driver and firmware take a few hundred MiB."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator as its vendor's library tells it."""

    index: int
    uuid: str
    name: str
    used_bytes: int | None
    pids: tuple[int, ...]
    """Processes that use it, as far as this machine (container) can tell."""

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.index} ({self.name})"


def _nvidia(nvml: Any) -> list[Device]:
    """Devices by nvidia-ml-py (``pynvml``)."""
    nvml.nvmlInit()
    try:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                Device(
                    index=index,
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    used_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
                    pids=tuple(item.pid for item in nvml.nvmlDeviceGetComputeRunningProcesses(handle)),
                )
            )
        return found
    finally:
        nvml.nvmlShutdown()


def _amd(smi: Any) -> list[Device]:
    """Devices by ROCm's ``amdsmi``."""
    smi.amdsmi_init()
    try:
        found = []
        for index, handle in enumerate(smi.amdsmi_get_processor_handles()):
            found.append(
                Device(
                    index=index,
                    uuid=str(smi.amdsmi_get_gpu_device_uuid(handle)),
                    name=str(smi.amdsmi_get_gpu_asic_info(handle).get("market_name", "AMD")),
                    used_bytes=int(smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM)),
                    pids=tuple(int(item["pid"]) for item in smi.amdsmi_get_gpu_process_list(handle)),
                )
            )
        return found
    finally:
        smi.amdsmi_shut_down()


LIBRARIES: dict[str, tuple[Callable[[Any], list[Device]], str]] = {
    "pynvml": (_nvidia, "NVMLError"),
    "amdsmi": (_amd, "AmdSmiException"),
}
"""Module -> (its probe, the base of its exceptions). Another vendor is another line."""


def devices() -> list[Device] | None:
    """This machine's accelerators; None if no library, driver or device answers."""
    found: list[Device] = []
    for module, (probe, errors) in LIBRARIES.items():
        try:
            library = import_module(module)
        except (ImportError, OSError, KeyError):  # amdsmi raises the latter two where there is no ROCm
            continue
        try:
            found += probe(library)
        except getattr(library, errors) as error:
            log.info("%s does not answer: %s", module, error)
    return found or None


def refuse_in_use(model_key: str, env: Mapping[str, str]) -> None:
    """ServerError if somebody else uses an accelerator that a server with this environment would get."""
    known = devices()
    if known is None:
        log.info("%s: whether others use the accelerator is unknown: no library can tell", model_key)
        return
    chosen = visible(env)
    for device in known:
        if chosen is not None and str(device.index) not in chosen and device.uuid not in chosen:
            continue
        if chosen is None and any(_ours(pid) for pid in device.pids):
            continue
        others = [named(pid) for pid in device.pids if not _ours(pid)]
        taken = device.used_bytes is not None and device.used_bytes > IDLE_BYTES
        if others or taken:
            used = "unknown" if device.used_bytes is None else f"{device.used_bytes / 2**30:.1f} GiB"
            raise ServerError(
                f"{model_key}: accelerator device {device.label} is in use by others: {used} of its memory, "
                f"{', '.join(others) or 'by processes that cannot be seen from here'}; nothing was started. "
                f"End that, or name the server's own devices in server.env ({VISIBLE[0]})"
            )


def _ours(pid: int) -> bool:
    try:
        return MARK in psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return False


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
