"""A CUDA device that is none: tensors say that they are there, and their numbers lie on the CPU. No test lives here.

Operations that mix devices raise, as they would on a GPU; every wait for the device, every copy and every operation is
counted. So a machine without a GPU can tell whether the engine's path for one is right, though not how fast it is.
"""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
_CUDA, _META = 1, 14  # in torch's list of kinds of devices
# They take indices that lie on the CPU, and copy them.
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# The size of what they return depends on numbers on the device.
_SIZED_BY_NUMBERS = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}
_COPIES = {aten._to_copy.default, aten.copy_.default}


class OnDevice(torch.Tensor):
    """`inner` has the numbers."""

    inner: torch.Tensor
    device_: "Device"
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: "Device") -> "OnDevice":
        sizes = inner.shape, inner.stride(), inner.storage_offset()
        with torch.inference_mode(False):  # torch makes views only of tensors that are no inference tensors
            self: OnDevice = torch.Tensor._make_wrapper_subclass(cls, *sizes, dtype=inner.dtype, device=CUDA)
        self.inner, self.device_ = inner, device
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside the mode")

    def tolist(self) -> Any:
        self.device_.counts["waits"] += 1
        return self.inner.tolist()

    def record_stream(self, _: object) -> None: ...

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a CUDA tensor to numpy")

    def data_ptr(self) -> int:
        raise AssertionError("a native kernel was given memory of the device")


class Device(TorchDispatchMode):
    """Within it there is a CUDA device. `counts`: operations, waits, and copies to the device and from it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func._can_decompose():  # under inference_mode these come whole
            with self:
                return func.decompose(*args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        there = [x for x in tensors if isinstance(x, OnDevice)]
        kwargs.pop("pin_memory", None)
        to = kwargs.pop("device", None)
        if to is not None and torch.device(to).type != "cuda":
            kwargs["device"] = to
        goes_there = torch.device(to).type == "cuda" if to is not None else bool(there)
        if func in _COPIES:
            return self._copy(func, args, kwargs, goes_there)
        if there:
            self._check(func, args, tensors)
        if func is aten._local_scalar_dense.default and there:
            self.counts["waits"] += 1
        known = {id(x.inner): x for x in there}
        if func is aten.mm.dtype:  # only GPUs have it
            result = _inner(args[0]).to(args[2]) @ _inner(args[1]).to(args[2])
        elif func is aten.histc.default:  # only GPUs have it for integers
            result = func(_inner(args[0]).float(), *args[1:], **kwargs).to(args[0].dtype)
        else:
            result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        if not goes_there:
            return result
        self.counts["operations"] += 1

        def there_too(x: Any) -> Any:
            return x if not _plain(x) else known[id(x)] if id(x) in known else OnDevice(x, self)

        return tree_map(there_too, result)

    def _copy(self, func: Any, args: Any, kwargs: Any, goes_there: bool) -> Any:
        if func is aten.copy_.default:
            to, source = args[0], args[1]
            unawaited = bool(args[2:] and args[2]) or kwargs.get("non_blocking")  # to the host: into pinned memory
            self._count(isinstance(source, OnDevice), isinstance(to, OnDevice), not unawaited)
            func(_inner(to), _inner(source))
            return to
        source = isinstance(args[0], OnDevice)
        self._count(source, goes_there, source or not kwargs.get("non_blocking"))
        if "device" in kwargs or goes_there:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("non_blocking", None)
        result = func(_inner(args[0]), **kwargs)
        return OnDevice(result, self) if goes_there else result

    def _count(self, source: bool, target: bool, waits: bool) -> None:
        """A copy to the device waits, too, unless told not to: it goes the way of all that was launched before."""
        self.counts["operations"] += source or target
        if source != target:
            self.counts["to host" if source else "to device"] += 1
            self.counts["waits"] += waits

    def _check(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        here = [x for x in tensors if _plain(x) and x.dim() > 0]
        if here and not (func in _INDEXING and isinstance(args[0], OnDevice) and isinstance(args[-1], OnDevice | list)):
            raise RuntimeError(f"{func}: expected all tensors on the same device, but found cuda:0 and cpu")
        self.counts["to device"] += len(here)
        self.counts["waits"] += len(here)
        masks = func in _INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1])
        if func in _SIZED_BY_NUMBERS or masks:
            self.counts["waits"] += 1


@contextmanager
def _no_guard() -> Iterator[None]:
    """Torch without CUDA has nothing that switches between CUDA devices. The one for `meta` does nothing: it serves."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


def _plain(x: object) -> bool:
    return isinstance(x, torch.Tensor) and not isinstance(x, OnDevice)


def _inner(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


@contextmanager
def pretended() -> Iterator[Device]:
    """Within, torch says that there is a CUDA device, and `torch.cuda` answers what the engine and its checks ask. Name
    it with its number, as CUDA is."""
    device = Device()

    def wait(*_: object) -> None:
        device.counts["waits"] += 1

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self, stream: object) -> None:
            self.before, self.at = device.counts["waits"], perf_counter()

        def synchronize(self) -> None:
            """Counts as a wait unless something was waited for since the event was recorded: that came later."""
            device.counts["waits"] += device.counts["waits"] == self.before

        def elapsed_time(self, later: "Event") -> float:
            return 1e3 * (later.at - self.at)

    class Stream:
        """Work on it is done at once."""

        def __init__(self, *_: object) -> None: ...

        def wait_stream(self, other: object) -> None: ...

        def synchronize(self) -> None: ...

        def record_event(self) -> Event:
            event = Event()
            event.record(self)
            return event

    answers = {
        "Event": Event,
        "Stream": Stream,
        "stream": lambda _: nullcontext(),
        "current_stream": Stream,
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "synchronize": wait,
        "set_sync_debug_mode": lambda *_: None,
        "mem_get_info": lambda *_: (8 << 30, 8 << 30),
        "get_device_name": lambda *_: "none",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=1),
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "empty_cache": lambda: None,
    }
    with ExitStack() as stack:
        stack.enter_context(_no_guard())
        # As for torch's own fake tensors: lists become tensors on the CPU first.
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        # A module that moves there gets new parameters: the old ones cannot hold such tensors.
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, False)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(device)
        yield device
