"""An accelerator that others use, as a vendor's library tells it; here stand-ins, for there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from include.capacity.errors import ServerError
from include.capacity.servers import devices

GIB = 1 << 30


class NVMLError(Exception):
    """As pynvml has it."""


def nvml(*used_and_pids: tuple[int, tuple[int, ...]], broken: bool = False) -> Any:
    """A pynvml with these devices (bytes in use, pids)."""

    def init() -> None:
        if broken:
            raise NVMLError("Driver Not Loaded")

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(used_and_pids),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}{index}",
        nvmlDeviceGetName=lambda index: b"H100",
        nvmlDeviceGetMemoryInfo=lambda index: SimpleNamespace(used=used_and_pids[index][0]),
        nvmlDeviceGetComputeRunningProcesses=lambda index: [
            SimpleNamespace(pid=pid) for pid in used_and_pids[index][1]
        ],
    )


def amd(used: int, pids: tuple[int, ...]) -> Any:
    """An amdsmi with one device."""
    return SimpleNamespace(
        AmdSmiException=RuntimeError,
        AmdSmiMemoryType=SimpleNamespace(VRAM="vram"),
        amdsmi_init=lambda: None,
        amdsmi_shut_down=lambda: None,
        amdsmi_get_processor_handles=lambda: ["handle"],
        amdsmi_get_gpu_device_uuid=lambda handle: "uuid",
        amdsmi_get_gpu_asic_info=lambda handle: {"market_name": "MI325X"},
        amdsmi_get_gpu_memory_usage=lambda handle, kind: used,
        amdsmi_get_gpu_process_list=lambda handle: [{"pid": pid} for pid in pids],
    )


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch):
    """Puts stand-ins in the libraries' place; a library not given is not installed."""

    def put(**given: Any) -> None:
        for name in ("pynvml", "amdsmi"):
            monkeypatch.setitem(sys.modules, name, given.get(name))

    return put


IDLE = (700 << 20, ())
ME = os.getpid()


def test_without_library_driver_or_device_nothing_is_claimed(
    libraries, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for given in ({}, {"pynvml": nvml(broken=True)}, {"pynvml": nvml()}):
        libraries(**given)
        assert devices.devices() is None
        devices.refuse_in_use("llama", {})
    assert "llama: whether others use the accelerator is unknown" in caplog.text
    assert "pynvml does not answer: Driver Not Loaded" in caplog.text


def test_idle_devices_are_free(libraries) -> None:
    libraries(pynvml=nvml(IDLE, IDLE), amdsmi=amd(*IDLE))
    devices.refuse_in_use("llama", {})


def test_a_process_of_others_is_named(libraries) -> None:
    libraries(pynvml=nvml(IDLE, (30 * GIB, (ME,))))
    with pytest.raises(ServerError) as caught:
        devices.refuse_in_use("llama", {})
    said = str(caught.value)
    assert said.startswith("llama: accelerator device 1 (H100) is in use by others: 30.0 GiB of its memory, ")
    assert f"pid {ME} (" in said
    libraries(amdsmi=amd(GIB, (ME,)))
    with pytest.raises(ServerError, match=r"device 0 \(MI325X\) is in use by others: 1\.0 GiB"):
        devices.refuse_in_use("llama", {})


def test_memory_that_nobody_seen_holds_is_somebody_elses(libraries) -> None:
    libraries(pynvml=nvml((2 * GIB, ())))
    with pytest.raises(ServerError, match=r"2\.0 GiB of its memory, by processes that cannot be seen"):
        devices.refuse_in_use("llama", {})


@pytest.mark.parametrize(
    ("env", "refused"),
    [
        ({}, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, False),
        ({"CUDA_VISIBLE_DEVICES": "0, 1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11"}, True),
        ({"HIP_VISIBLE_DEVICES": "0"}, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, False),
    ],
)
def test_only_the_devices_that_the_server_gets_are_asked(
    libraries, env: dict[str, str], refused: bool
) -> None:
    libraries(pynvml=nvml(IDLE, (30 * GIB, (ME,))))
    if refused:
        with pytest.raises(ServerError, match="device 1"):
            devices.refuse_in_use("llama", env)
    else:
        devices.refuse_in_use("llama", env)


def test_a_server_of_ours_on_another_device_is_covered_by_its_own_lease(libraries) -> None:
    ours = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "CAPACITY_SERVER_ID": "1"},
    )
    try:
        libraries(pynvml=nvml(IDLE, (70 * GIB, (ours.pid,))))
        devices.refuse_in_use("llama", {})
        # On the very device that was asked for, it should be gone by now.
        with pytest.raises(ServerError, match="device 1"):
            devices.refuse_in_use("llama", {"CUDA_VISIBLE_DEVICES": "1"})
    finally:
        ours.communicate(b"\n")
