"""What a parameter is while its weights are not in memory (``reshard_after_forward=True``).

It keeps its true shape, and raises, naming itself, when something reads it. Never left on a shared window: whoever
reads it there would get another boundary's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Properties that say nothing about the values. Their getters arrive as `property.__get__`.
_METADATA = (
    "data", "grad", "grad_dtype", "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "layout",
    "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized",
    "is_nested", "is_mkldnn", "is_xpu", "is_mps", "is_xla", "is_ort", "is_mtia", "is_maia", "is_ipu", "is_vulkan",
    "is_inference", "name", "names", "output_nr", "retains_grad", "_version", "_base", "_cdata", "_grad", "_grad_fn",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_has_symbolic_sizes_strides", "_python_dispatch",
)  # fmt: skip
_METHODS = (
    "detach", "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_inference", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "data_ptr", "get_device",
    "untyped_storage", "has_names", "is_shared", "__hash__", "__len__", "__format__", "is_same_size",
)  # fmt: skip


def _allowed() -> set[Any]:
    functions: set[Any] = {torch.autograd.grad, torch.autograd.backward}
    for name in _METADATA:
        attribute = getattr(torch.Tensor, name, None)
        for method in ("__get__", "__set__", "__delete__"):
            if attribute is not None and hasattr(attribute, method):
                functions.add(getattr(attribute, method))
    for name in _METHODS:
        if hasattr(torch.Tensor, name):
            functions.add(getattr(torch.Tensor, name))
    functions |= {torch.is_floating_point, torch.is_complex, torch.numel}
    return functions


_ALLOWED = _allowed()


class ReleasedParameter(nn.Parameter):
    """The class of a parameter while it is released; ``dmuon.windows`` sets and unsets it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _ALLOWED:
            raise RuntimeError(_message(func, args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReleasedParameter({_name(self)}, {tuple(self.shape)}, {self.dtype})"


def _find(value: Any) -> ReleasedParameter | None:
    if isinstance(value, ReleasedParameter):
        return value
    if isinstance(value, list | tuple):
        return next((found for item in value if (found := _find(item)) is not None), None)
    return None


def _name(parameter: ReleasedParameter | None) -> str:
    entry = parameter.__dict__.get("_dmuon_param") if parameter is not None else None
    return f"'{entry.param_name}' (boundary '{entry.boundary.name}')" if entry is not None else "of a dmuon model"


def _message(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> str:
    return (
        f"parameter {_name(_find([*args, *kwargs.values()]))} is not in memory: with reshard_after_forward=True its "
        f"weights are here only while its boundary runs, and {getattr(func, '__name__', func)}() reads them outside. "
        "Read it inside the forward of its boundary or through state_dict(), or dedicate it with "
        "reshard_after_forward=False"
    )
