"""PyTorch's CUDA tensors on the stand-in for libcudart, which has memory, streams, events, and no kernels of PyTorch's.

Every operation that would launch one is computed on the CPU, from copies that the current stream brings, and its
results are copied back on that stream. So what another stream was to bring and nobody waited for is not there.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_map

# What allocates, says how memory is seen, or is a copy or a fill of the runtime.
_OWN = {
    "empty", "empty_strided", "set_", "as_strided", "view", "_reshape_alias", "unfold", "alias", "resize_", "zero_",
    "record_stream", "is_pinned", "_pin_memory", "_local_scalar_dense", "is_set_to",
}  # fmt: skip

_library: Any = None  # keeps what was installed
_collectives: Any = None


def present() -> bool:
    """Whether this process was started with the stand-in (LD_PRELOAD)."""
    return hasattr(ctypes.CDLL(None), "fake_cuda_has_context")


def install() -> None:
    """Idempotent. REQUIRES: present()."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_all_op_names():
            space, _, rest = name.partition("::")
            base, _, overload = rest.partition(".")
            if space != "aten" or base in _OWN or base == "copy_":
                continue
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                op = getattr(getattr(torch.ops.aten, base), overload or "default")
                # Some are fused for GPUs alone.
                there = torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")
                _library.impl(rest, _by_cpu(op, op if there else decomposition_table.get(op, op)), "CUDA")
        _library.impl("copy_", _copy, "CUDA")


def _runtime_copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> None:
    """PyTorch's own. REQUIRES: two dense tensors of bytes."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    torch.ops.aten.copy_.default._op_dk(key, to, source, non_blocking)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory between the tensor's first and last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = 0 if tensor.numel() == 0 else (last + 1) * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (count,), (1,))


def _seen_as(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """`flat`, the bytes of a tensor, as that tensor."""
    like = torch.empty(0, dtype=tensor.dtype, device=flat.device)
    return like.set_(flat.untyped_storage(), 0, tensor.shape, tensor.stride())


def _down(tensor: torch.Tensor) -> torch.Tensor:
    on_device = _bytes(tensor)
    flat = torch.empty(on_device.shape, dtype=torch.uint8)
    _runtime_copy(flat, on_device)
    return _seen_as(tensor, flat)


def _up(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = tensor.detach().clone()  # dense, and nobody else's
    flat = _bytes(tensor)
    on_device = torch.empty(flat.shape, dtype=torch.uint8, device=device)
    _runtime_copy(on_device, flat)
    return _seen_as(tensor, on_device)


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if to.dtype == source.dtype and to.shape == source.shape and to.is_contiguous() and source.is_contiguous():
        _runtime_copy(_bytes(to), _bytes(source), non_blocking)
        return to
    value = _down(source) if source.is_cuda else source
    if not to.is_cuda:
        return to.copy_(value)
    result = _down(to)
    result.copy_(value)
    _runtime_copy(_bytes(to), _bytes(result))
    return to


class _Transfer:
    """The arguments of one call on the CPU, and what becomes of them."""

    def __init__(self) -> None:
        self._on_device: dict[int, torch.Tensor] = {}  # by the identity of its copy
        self._device: torch.device | None = None

    def down(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            self._device = value.device
            copy = _down(value)
            self._on_device[id(copy)] = value
            return copy
        if isinstance(value, torch.device) and value.type == "cuda":
            self._device = value
            return torch.device("cpu")
        return value

    def write_back(self, value: Any) -> None:
        if id(value) in self._on_device:
            to = self._on_device[id(value)]
            if to.shape != value.shape:
                to.resize_(value.shape)  # of an `out=` that was given empty
            _runtime_copy(_bytes(to), _bytes(value))

    def up(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or self._device is None:
            return value
        return self._on_device[id(value)] if id(value) in self._on_device else _up(value, self._device)


def _by_cpu(op: Any, on_cpu: Any) -> Any:
    arguments = op._schema.arguments
    written = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _Transfer()
        args, kwargs = tree_map(call.down, (args, kwargs))
        result = on_cpu(*args, **kwargs)
        for position, name in written:
            tree_map(call.write_back, args[position] if position < len(args) else kwargs.get(name))
        return tree_map(call.up, result)

    return kernel


def carry_collectives() -> None:
    """Lets collectives of the default group on CUDA tensors go by a group on the CPU. Collective.

    Gloo would read and write a device's memory as if it were the host's, whatever its streams have yet to do.
    """
    global _collectives
    carrier = dist.new_group(backend="gloo").boxed()
    _collectives = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in torch._C._dispatch_get_all_op_names():
            space, _, base = name.partition("::")
            if space == "c10d" and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
                op = getattr(torch.ops.c10d, base).default
                names = [a.name for a in op._schema.arguments]
                if "process_group" in names:
                    _collectives.impl(base, _carried(op, names.index("process_group"), carrier), "CUDA")


def _carried(op: Any, group: int, carrier: Any) -> Any:
    def kernel(*args: Any) -> Any:
        call = _Transfer()
        on_cpu = list(tree_map(call.down, args))
        on_cpu[group] = carrier
        result = op(*on_cpu)
        work = result[-1] if isinstance(result, tuple) else result
        dist.Work.unbox(work).wait()
        tree_map(call.write_back, on_cpu)
        return tree_map(call.up, result)

    return kernel
