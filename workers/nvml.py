"""What the NVIDIA driver says of every GPU, through NVML: no CUDA context, so no memory taken."""

import importlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from models.errors import ConfigurationError

_MIB_SHIFT = 20


class Nvml:
    """An open connection to the driver. Use it as a context manager; belongs to one thread."""

    def __init__(self, library: Any | None = None) -> None:
        """Connect.

        Args:
            library: the module ``pynvml``, or what stands for it in a test.

        Raises:
            ConfigurationError: the package is not installed, or there is no driver.
        """
        self._library = _load() if library is None else library
        try:
            self._library.nvmlInit()
        except self._library.NVMLError as error:
            raise ConfigurationError(
                f"no NVIDIA driver answers here ({error}); GPUs are sampled on the machine that "
                "has them, and in a container that was given them"
            ) from error

    def __enter__(self) -> "Nvml":
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Disconnect."""
        self._library.nvmlShutdown()

    def look(self) -> list[dict[str, Any]]:
        """One row a GPU: ``index`` and ``uuid``, percents of use, memory in MiB.

        A value that this GPU does not tell is None (a slice of one tells no utilization).

        Raises:
            ConnectionError: the driver answers nothing any more.
        """
        nvml = self._library
        try:
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
            ]
        except nvml.NVMLError as error:
            raise ConnectionError(f"NVML: {error}") from error
        return [self._device(index, handle) for index, handle in enumerate(handles)]

    def _device(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._library
        use = self._told(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        # Version 2 counts what the driver keeps for itself apart, as nvidia-smi does.
        memory = self._told(lambda: nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2))
        return {
            "index": index,
            "uuid": self._told(lambda: nvml.nvmlDeviceGetUUID(handle)),
            "utilization.gpu": None if use is None else int(use.gpu),
            "utilization.memory": None if use is None else int(use.memory),
            "memory.used": None if memory is None else int(memory.used) >> _MIB_SHIFT,
            "memory.total": None if memory is None else int(memory.total) >> _MIB_SHIFT,
        }

    def _told(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._library.NVMLError:
            return None


def _load() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise ConfigurationError(
            "the package nvidia-ml-py is not installed here; install the extra perdure[train]"
        ) from error
