"""Names of the interface that are not built yet. Each says so when it is used; none gives wrong data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn


def _later(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"dmuon.{name} is not built yet")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = "Not built yet."
    return refuse


dedicate_params_ddp = _later("dedicate_params_ddp")
dedicate_params_ddp_tp = _later("dedicate_params_ddp_tp")
replicate = _later("replicate")
replicate_tp = _later("replicate_tp")

prepare_muon_grads = _later("prepare_muon_grads")
wait_all_reduces = _later("wait_all_reduces")
collect_forward_unshard_profile = _later("collect_forward_unshard_profile")

clip_grad_norm_ = _later("clip_grad_norm_")
register_muon_grad_clip_strategy = _later("register_muon_grad_clip_strategy")
clip_grad_norm_buckets_ = _later("clip_grad_norm_buckets_")
try_clip_optimizer_grad_norm_buckets_ = _later("try_clip_optimizer_grad_norm_buckets_")

get_optimizer_state_dict = _later("get_optimizer_state_dict")
set_optimizer_state_dict = _later("set_optimizer_state_dict")

summarize_param_groups = _later("summarize_param_groups")
summarize_comm_plan = _later("summarize_comm_plan")


@dataclass(frozen=True)
class MuonGradClipStats:
    """What ``clip_grad_norm_`` will return."""

    total_norm: Any
    max_norm: float | None
    norm_type: float
    clip_coef: Any
    clipped: Any
    param_count: int
    found_inf: Any
    strategy: str


@dataclass(frozen=True)
class GradClipBucket:
    """Gradients that ``clip_grad_norm_buckets_`` will clip by their own norm."""

    name: str
    grads: Any
    reduce: bool = True


@dataclass(frozen=True)
class GradClipBucketStats:
    name: str
    total_norm: Any
    max_norm: float
    clip_coef: Any
    clipped: Any
    param_count: int
    found_inf: Any
    fastpath: bool


@dataclass(frozen=True)
class SegmentedGradClipResult:
    total_norm: Any
    bucket_stats: tuple[GradClipBucketStats, ...]
    fastpath: bool
    fallback_reason: str | None = None
