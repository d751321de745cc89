"""Muon for PyTorch FSDP2, run by the dmuond daemon.

    dmuon.dedicate_params(model, mesh, predicate=lambda n, p: "proj" in n and p.ndim == 2)
    ...fully_shard(model, mesh=mesh)
    optimizer = dmuon.Muon(model, lr=0.02, adamw_lr=1e-3)

Importing it patches ``fully_shard`` to skip dedicated parameters, and does nothing else: no thread, no socket.
"""

from dmuon.accumulation import (
    broadcast_all_updates,
    broadcast_all_updates_async,
    no_sync,
    wait_all_post_step_broadcasts,
    wait_all_replicate_broadcasts,
)
from dmuon.context import DedicatedCommContext, get_comm_ctx
from dmuon.dedicate import dedicate_params, get_dedicated_params, get_owned_params
from dmuon.errors import DaemonUnavailable, DMuonError, StepAborted
from dmuon.fsdp_patch import install_patch
from dmuon.later import (
    GradClipBucket,
    GradClipBucketStats,
    MuonGradClipStats,
    SegmentedGradClipResult,
    clip_grad_norm_,
    clip_grad_norm_buckets_,
    collect_forward_unshard_profile,
    dedicate_params_ddp,
    dedicate_params_ddp_tp,
    get_optimizer_state_dict,
    prepare_muon_grads,
    register_muon_grad_clip_strategy,
    replicate,
    replicate_tp,
    set_optimizer_state_dict,
    summarize_comm_plan,
    summarize_param_groups,
    try_clip_optimizer_grad_norm_buckets_,
    wait_all_reduces,
)
from dmuon.muon import Muon
from dmuon.newton_schulz import (
    POLAR_EXPRESS_COEFFICIENTS,
    YOU_COEFFICIENTS,
    NewtonSchulz,
    direct_newton_schulz,
    get_backend_status,
    get_ns_backend,
    gram_newton_schulz,
    newton_schulz,
)
from dmuon.policy import DMuonParamPolicy
from dmuon.state_dict import get_model_state_dict, set_model_state_dict

__version__ = "0.1.0"

__all__ = [
    "POLAR_EXPRESS_COEFFICIENTS",
    "YOU_COEFFICIENTS",
    "DMuonError",
    "DMuonParamPolicy",
    "DaemonUnavailable",
    "DedicatedCommContext",
    "GradClipBucket",
    "GradClipBucketStats",
    "Muon",
    "MuonGradClipStats",
    "NewtonSchulz",
    "SegmentedGradClipResult",
    "StepAborted",
    "broadcast_all_updates",
    "broadcast_all_updates_async",
    "clip_grad_norm_",
    "clip_grad_norm_buckets_",
    "collect_forward_unshard_profile",
    "dedicate_params",
    "dedicate_params_ddp",
    "dedicate_params_ddp_tp",
    "direct_newton_schulz",
    "get_backend_status",
    "get_comm_ctx",
    "get_dedicated_params",
    "get_model_state_dict",
    "get_ns_backend",
    "get_optimizer_state_dict",
    "get_owned_params",
    "gram_newton_schulz",
    "install_patch",
    "newton_schulz",
    "no_sync",
    "prepare_muon_grads",
    "register_muon_grad_clip_strategy",
    "replicate",
    "replicate_tp",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "summarize_comm_plan",
    "summarize_param_groups",
    "try_clip_optimizer_grad_norm_buckets_",
    "wait_all_post_step_broadcasts",
    "wait_all_reduces",
    "wait_all_replicate_broadcasts",
]

install_patch()
