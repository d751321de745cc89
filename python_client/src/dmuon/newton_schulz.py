"""Newton-Schulz in this process, by the same C++ kernels that the daemon runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

Coefficients = Sequence[Sequence[float]]

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY = 1.05  # bf16 rounding lifts the largest singular value a little above 1

# Polar Express, arXiv:2505.16932, with the safety factor: the default.
POLAR_EXPRESS_COEFFICIENTS: list[list[float]] = [
    [a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5] for a, b, c in _POLAR_EXPRESS
]
# Y. Jiacheng.
YOU_COEFFICIENTS: list[list[float]] = [
    [4.0848, -6.8946, 2.9270],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_STEPS = 32

_ITERATION_DTYPES = ("fp32", "tf32", "bf16", "fp16")

_KERNELS = ("auto", "cublas", "symmetric", "cpu")
_ALIASES = {"quack": "symmetric", "cute_sm80": "symmetric"}
_GPU_ONLY = ("symmetric",)


class NewtonSchulz:
    """How Newton-Schulz is run: the argument ``ns_backend`` of ``dmuon.Muon``.

    Args:
        backend: "gram" (where it pays for the shape, direct for the rest) or "direct".
        kernel: "auto", or one of "cublas", "symmetric", "cpu". ``DMUON_NS_KERNEL`` counts only for "auto".
        coefficients: (a, b, c) for each step; default Polar Express.
        restart_iterations: gram: restart before these steps (0-based); default: derived.
        deterministic: iterate in fp32.
        iteration_dtype: "fp32", "bf16", and on GPUs "fp16" and "tf32" (fp32 matrices, products with TF32 factors);
            default: the backend's choice.
    """

    def __init__(
        self,
        backend: str = "gram",
        kernel: str = "auto",
        coefficients: Coefficients | None = None,
        restart_iterations: Sequence[int] | None = None,
        deterministic: bool = False,
        iteration_dtype: str | None = None,
    ) -> None:
        if backend not in ("gram", "direct"):
            raise ValueError(f"backend: expected 'gram' or 'direct', got {backend!r}")
        self.backend = backend
        self.kernel = _resolve_kernel(kernel)
        self.coefficients = _check_coefficients(coefficients)
        self.restart_iterations = None if restart_iterations is None else [int(i) for i in restart_iterations]
        self.deterministic = bool(deterministic)
        if iteration_dtype is not None and iteration_dtype not in _ITERATION_DTYPES:
            raise ValueError(
                f"iteration_dtype: expected one of {', '.join(_ITERATION_DTYPES)} or None, got {iteration_dtype!r}"
            )
        if self.deterministic and iteration_dtype not in (None, "fp32"):
            raise ValueError(f"iteration_dtype: expected None or 'fp32' with deterministic, got {iteration_dtype!r}")
        self.iteration_dtype = iteration_dtype

    def native(self, steps: int) -> Any:
        """The options as the binding takes them."""
        from dmuon import _native

        return _native.NewtonSchulzOptions(
            form=_native.NsForm.GRAM if self.backend == "gram" else _native.NsForm.DIRECT,
            steps=steps,
            coefficients=[] if self.coefficients is None else self.coefficients,
            restarts=self.restart_iterations,
            iteration_dtype=self._native_dtype(),
            deterministic=self.deterministic,
            tf32=self.iteration_dtype == "tf32",
        )

    def _native_dtype(self) -> Any:
        from dmuon import _native

        stored = {"fp32": "F32", "tf32": "F32", "bf16": "BF16", "fp16": "F16"}
        return None if self.iteration_dtype is None else getattr(_native.Dtype, stored[self.iteration_dtype])

    def local(self, G: torch.Tensor, steps: int = 5) -> torch.Tensor:
        """NS(G) in this process."""
        check_steps("steps", steps)
        return _run(G, self.native(steps))

    def __repr__(self) -> str:
        kind = "polar_express" if self.coefficients is None else "custom"
        return f"NewtonSchulz(backend={self.backend!r}, kernel={self.kernel!r}, coefficients={kind})"


def check_steps(argument: str, steps: object) -> None:
    """What ``argument`` takes, here and in ``dmuon.Muon``."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= _MAX_STEPS:
        raise ValueError(f"{argument}: expected 1 to {_MAX_STEPS}, got {steps!r}")


def _resolve_kernel(kernel: str) -> str:
    name = kernel
    if kernel == "auto":
        name = os.environ.get("DMUON_NS_KERNEL") or "auto"
    if name == "compile":
        raise NotImplementedError("the Newton-Schulz kernel 'compile' is not built")
    name = _ALIASES.get(name, name)
    if name not in _KERNELS:
        raise ValueError(f"kernel: expected one of {', '.join((*_KERNELS, *_ALIASES))}, got {kernel!r}")
    if name in _GPU_ONLY:
        raise RuntimeError(f"the Newton-Schulz kernel '{kernel}' needs a GPU; available here: auto, cublas, cpu")
    return name


def _check_coefficients(coefficients: Coefficients | None) -> list[tuple[float, float, float]] | None:
    if coefficients is None:
        return None
    rows = [tuple(float(c) for c in row) for row in coefficients]
    if not rows or any(len(row) != 3 for row in rows):
        raise ValueError("coefficients: expected one or more rows (a, b, c)")
    return [(a, b, c) for a, b, c in rows]


def _run(G: torch.Tensor, options: Any) -> torch.Tensor:
    from dmuon import _native

    if not isinstance(G, torch.Tensor):
        raise TypeError(f"Newton-Schulz needs a torch.Tensor, got {type(G).__name__}")
    if G.dtype not in _DTYPES:
        accepted = ", ".join(str(d) for d in _DTYPES)
        raise TypeError(f"Newton-Schulz needs one of {accepted}, got {G.dtype}")
    if G.ndim < 2:
        raise ValueError(f"Newton-Schulz needs a matrix, got shape {tuple(G.shape)}")
    if G.numel() == 0:
        return G.clone()
    if G.device.type != "cpu":
        raise NotImplementedError(f"Newton-Schulz in process on {G.device} is not built yet")
    matrices = G.detach().to(torch.float32).contiguous().reshape(-1, *G.shape[-2:])
    out = torch.empty_like(matrices)
    _native.newton_schulz(matrices, out, options, torch.get_num_threads())
    return out.reshape(G.shape).to(G.dtype)


def _check_eps(eps: float) -> None:
    if eps != 1e-7:
        raise NotImplementedError("an eps other than 1e-7: the kernels normalise by the largest magnitude first")


def gram_newton_schulz(
    G: torch.Tensor,
    steps: int = 5,
    eps: float = 1e-7,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """The approximate polar factor of a matrix (or of each matrix of a batch) by the gram form where it pays.

    fp32, bf16, fp16 or fp64 in, the same dtype and shape out; ``G`` keeps its values. ``steps``: 1 to 32.
    """
    _check_eps(eps)
    return NewtonSchulz("gram", "auto", coefficients, restart_iterations, deterministic).local(G, steps)


def direct_newton_schulz(
    G: torch.Tensor,
    steps: int = 5,
    eps: float = 1e-7,
    coefficients: Coefficients | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """The same by the direct form."""
    _check_eps(eps)
    return NewtonSchulz("direct", "auto", coefficients, None, deterministic).local(G, steps)


def newton_schulz(
    G: torch.Tensor,
    steps: int = 5,
    eps: float = 1e-7,
    coefficients: Coefficients | None = None,
    restart_iterations: Sequence[int] | None = None,
) -> torch.Tensor:
    """``gram_newton_schulz`` under its short name."""
    return gram_newton_schulz(G, steps, eps, coefficients, restart_iterations)


def get_ns_backend() -> str:
    """What Newton-Schulz runs on here, e.g. "Gram NS · kernel=cpu (avx512_bf16, 2 threads)"."""
    from dmuon import _native

    name, _, detail = _native.backend_description(torch.get_num_threads()).partition(": ")
    detail = detail.partition(";")[0]  # then why there is no GPU
    return f"Gram NS · kernel={name} ({detail})"


def get_backend_status() -> dict[str, Any]:
    """What kernels there are, and which one "auto" takes."""
    from dmuon import _native

    return {
        "sm_version": 0,
        "auto_choice": "cpu",
        "quack_available": False,
        "cute_sm80_available": False,
        "cublas_always_available": False,
        "cpu": _native.backend_description(torch.get_num_threads()),
    }
