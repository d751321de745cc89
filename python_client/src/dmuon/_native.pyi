"""The binding over client/dmuon/client.h; what each call means is written there. Every wait releases the GIL."""

import enum
from collections.abc import Sequence
from typing import Any

import torch

class Route(enum.Enum):
    MUON = 1
    ADAMW = 2
    SHARDED_ADAMW = 3

class Dtype(enum.Enum):
    F32 = 1
    BF16 = 2
    F16 = 3

class AdjustLr(enum.Enum):
    MATCH_RMS_ADAMW = 1
    ORIGINAL = 2
    SPECTRAL = 3
    NONE = 4

class Nonfinite(enum.Enum):
    SKIP = 1
    ERROR = 2
    APPLY = 3

class NsForm(enum.Enum):
    GRAM = 1
    DIRECT = 2

class StateKind(enum.Enum):
    WEIGHT = 1
    MOMENTUM = 2
    EXP_AVG = 3
    EXP_AVG_SQ = 4
    STEP = 5

class Mesh:
    def __init__(self, replicate: int = 1, shard: int = 1, tp: int = 1) -> None: ...

class Boundary:
    def __init__(self, name: str, exclusive_window: bool = False) -> None: ...

class Block:
    def __init__(self, row_begin: int, row_end: int) -> None: ...

class Parameter:
    def __init__(
        self, name: str, shape: Sequence[int], route: Route, boundary: int, blocks: Sequence[Block] = ...
    ) -> None: ...

class OpenOptions:
    def __init__(
        self,
        job: str,
        rank: int,
        mesh: Mesh,
        reshard_after_forward: bool,
        boundaries: Sequence[Boundary],
        parameters: Sequence[Parameter],
        formation_timeout: float = 0.0,
        restart_count: int = 0,
        coordinator: str = "",
    ) -> None: ...

class PlacementEntry:
    @property
    def owner(self) -> int: ...
    @property
    def cost(self) -> float: ...

class Placement:
    @property
    def parameters(self) -> list[PlacementEntry]: ...
    @property
    def loads(self) -> list[float]: ...
    @property
    def imbalance(self) -> float: ...
    @property
    def lower_bound(self) -> float: ...

class Group:
    def __init__(self, name: str, route: Route) -> None: ...

class ParameterConfig:
    def __init__(self, param_dtype: Dtype, grad_dtype: Dtype, group: int) -> None: ...

class NewtonSchulzOptions:
    def __init__(
        self,
        form: NsForm,
        steps: int,
        coefficients: Sequence[tuple[float, float, float]] = ...,
        restarts: Sequence[int] | None = None,
        iteration_dtype: Dtype | None = None,
        deterministic: bool = False,
        tf32: bool = False,
    ) -> None: ...

class OptimizerOptions:
    def __init__(
        self,
        groups: Sequence[Group],
        parameters: Sequence[ParameterConfig],
        newton_schulz: NewtonSchulzOptions,
        nesterov: bool,
        adjust_lr: AdjustLr,
        nonfinite: Nonfinite,
    ) -> None: ...

class StepResult:
    @property
    def step(self) -> int: ...
    @property
    def applied(self) -> bool: ...
    @property
    def total_norm(self) -> float: ...
    @property
    def clip_coefficient(self) -> float: ...

class StepProfile:
    @property
    def step(self) -> int: ...
    @property
    def wait(self) -> float: ...
    @property
    def reduce(self) -> float: ...
    @property
    def verdict(self) -> float: ...
    @property
    def update(self) -> float: ...
    @property
    def publish(self) -> float: ...
    @property
    def total(self) -> float: ...
    @property
    def newton_schulz_calls(self) -> int: ...
    @property
    def forms(self) -> str: ...
    @property
    def kernel(self) -> str: ...

class Session:
    @property
    def placement(self) -> Placement: ...
    @property
    def step_id(self) -> int: ...
    @property
    def generation(self) -> int: ...
    def configure(self, options: OptimizerOptions) -> None: ...
    def start(self) -> None: ...
    @property
    def arenas_on_device(self) -> bool: ...
    @property
    def device(self) -> int | None: ...
    def grad(self, parameter: int, bytes: int) -> Any: ...  # for torch.utils.dlpack.from_dlpack, uint8
    def weight(self, parameter: int, bytes: int) -> Any: ...  # likewise
    def window(self, boundary: int) -> int: ...
    def wait_weights(self, boundary: int) -> None: ...
    def wait_all_weights(self) -> None: ...
    def materialize(self, boundary: int) -> None: ...
    def release(self, boundary: int, stream: int | None = None) -> None: ...
    def wait_grad_writable(self, boundary: int) -> None: ...
    def ready(self, boundary: int, present: Sequence[int], stream: int | None = None) -> None: ...
    def end_backward(self) -> None: ...
    def discard(self) -> None: ...
    def set_hyper(
        self,
        group: int,
        lr: float,
        weight_decay: float,
        momentum: float = 0.0,
        beta1: float = 0.0,
        beta2: float = 0.0,
        eps: float = 0.0,
    ) -> None: ...
    def step(self, found_inf: bool = False, max_norm: float = 0.0) -> StepResult: ...
    def read_state(self, parameter: str, kind: StateKind) -> Any: ...  # for torch.utils.dlpack.from_dlpack, uint8
    def write_state(self, parameter: str, kind: StateKind, data: torch.Tensor) -> None: ...  # uint8, one dimension
    def last_profile(self) -> StepProfile: ...
    def close(self) -> None: ...

class Connection:
    @staticmethod
    def open(endpoint: str, timeout: float = 5.0) -> Connection: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def daemon_version(self) -> str: ...
    @property
    def grpc_calls(self) -> int: ...
    def open_session(self, options: OpenOptions) -> Session: ...

def default_endpoint() -> str | None: ...
def newton_schulz(matrices: torch.Tensor, out: torch.Tensor, options: NewtonSchulzOptions, threads: int) -> str: ...
def validate_newton_schulz(options: NewtonSchulzOptions) -> None: ...
def backend_description(threads: int) -> str: ...
