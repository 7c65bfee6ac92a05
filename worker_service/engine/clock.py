"""What a GPU takes for a part of its work, measured there: nobody waits for it."""

import torch


class Clock:
    """Runs from now until `stop`, as the device comes to these points."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun = self._ended = self._mark()

    def stop(self) -> None:
        self._ended = self._mark()

    def seconds(self) -> float:
        """Waits for the end, if the device has not come there yet."""
        self._ended.synchronize()
        return float(self._begun.elapsed_time(self._ended)) / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
