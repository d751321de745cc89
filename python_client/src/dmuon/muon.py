"""``dmuon.Muon``: the optimizer that a training script holds."""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon import device, shard_adamw
from dmuon.adoption import adopt, find_tensors, native_dtype
from dmuon.context import DedicatedCommContext, require_ctx
from dmuon.newton_schulz import NewtonSchulz, check_steps

_log = logging.getLogger("dmuon")

# torch.optim.Muon's name for ours.
_ADJUST_LR = {
    "match_rms_adamw": "MATCH_RMS_ADAMW",
    "original": "ORIGINAL",
    "spectral": "SPECTRAL",
    "none": "NONE",
}
_NONFINITE = {"skip": "SKIP", "error": "ERROR", "apply": "APPLY"}


class Muon(torch.optim.Optimizer):
    """Muon for the dedicated parameters, in the daemon; AdamW for the rest, here on the FSDP2 shards.

    Group 0 holds the dedicated parameters on the route ``muon``; group 1 those of FSDP2 and the dedicated ones on the
    route ``adamw``. Schedulers edit the groups as usual.

    Args:
        model: the model that was given to ``dedicate_params``, after ``fully_shard``.
        lr, momentum, weight_decay, nesterov, ns_steps: of Muon. The update is scaled by ``adjust_lr``.
        adamw_lr, adamw_betas, adamw_weight_decay, adamw_eps: of AdamW.
        ns_backend: "gram", "direct" or a ``NewtonSchulz``.
        replicate_async: True: ``step`` returns before the new weights are published, and the next forward waits for
            them boundary by boundary. False: ``step`` waits. The bits are the same.
        record_step_profile: keep what ``consume_last_step_profile`` returns.
        adjust_lr: "match_rms_adamw" (0.2 sqrt(max(out, in))), "original" (sqrt(max(1, out/in))), "spectral"
            (sqrt(out/in)) or "none".
        nonfinite: what a step does when a gradient of any rank is not finite: "skip" it everywhere, "error", "apply".

    Gradients of dedicated parameters go to the daemon, so ``p.grad`` stays None for them and
    ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`` sees and clips the FSDP2 part alone.

    The other arguments tune a Muon that runs inside the trainer and are without effect here.
    """

    # GradScaler hands its scale over instead of calling step() or not, rank by rank.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adamw_lr: float = 1e-3,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_weight_decay: float = 0.01,
        adamw_eps: float = 1e-8,
        param_groups: list[dict[str, Any]] | None = None,
        ns_backend: str | NewtonSchulz = "gram",
        nesterov: bool = True,
        replicate_async: bool = True,
        record_step_profile: bool = False,
        group_prepare_ahead: bool = True,
        tp_distributed_gram: bool = False,
        tp_distributed_gram_policy: str = "beneficial",
        tp_distributed_gram_max_factor_to_scatter_ratio: float = 0.5,
        post_step_prefetch_groups: int = 0,
        post_step_prefetch_sharded_adamw: bool = False,
        sharded_adamw_unshard_separate_stream: bool = False,
        forward_prefetch_depth: int = 1,
        first_step_progress_log: bool = True,
        first_step_progress_log_limit: int = 8,
        *,
        adjust_lr: str = "match_rms_adamw",
        nonfinite: str = "skip",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"dmuon.Muon takes the model, not its parameters: dmuon.Muon(model, lr=...), got {type(model).__name__}"
            )
        model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        _check_hyper("lr", lr, momentum=momentum, weight_decay=weight_decay)
        _check_hyper("adamw_lr", adamw_lr, weight_decay=adamw_weight_decay, betas=adamw_betas, eps=adamw_eps)
        check_steps("ns_steps", ns_steps)
        ns = _newton_schulz(ns_backend)
        if adjust_lr not in _ADJUST_LR:
            raise ValueError(f"adjust_lr: expected one of {', '.join(_ADJUST_LR)}, got {adjust_lr!r}")
        if nonfinite not in _NONFINITE:
            raise ValueError(f"nonfinite: expected one of {', '.join(_NONFINITE)}, got {nonfinite!r}")
        if param_groups is not None:
            raise NotImplementedError("dmuon.Muon(param_groups=...) is not built yet")
        if tp_distributed_gram:
            raise NotImplementedError("dmuon.Muon(tp_distributed_gram=True): tensor parallelism is not built yet")

        ctx = require_ctx(model)
        if ctx.adopted:
            raise RuntimeError("this model already has a dmuon.Muon: its session is configured once")
        if ctx.session is not None:
            find_tensors(ctx)
        dedicated = {id(p.tensor) for p in ctx.params}
        _check_coverage(model, dedicated)

        self._ctx = ctx
        self._ns, self._ns_steps = ns, ns_steps
        self._nesterov, self._adjust_lr, self._nonfinite = nesterov, adjust_lr, nonfinite
        self._replicate_async = replicate_async
        self._record_step_profile = record_step_profile
        self._log_first_step = first_step_progress_log
        self._steps = 0
        self._last_step_skipped = False
        self._shards = [p for p in model.parameters() if p.requires_grad and id(p) not in dedicated]
        on_route = {
            route: [p.tensor for p in ctx.params if p.route == route and p.tensor.requires_grad]
            for route in ("muon", "adamw")
        }
        groups: list[dict[str, Any]] = [
            {"params": on_route["muon"], "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
             "use_muon": True, "group_name": "default/muon"},
            {"params": on_route["adamw"] + self._shards, "lr": adamw_lr, "betas": tuple(adamw_betas),
             "eps": adamw_eps, "weight_decay": adamw_weight_decay,
             "use_muon": False, "group_name": "default/adamw"},
        ]
        for group in groups:
            group["semantic_group_name"], group["subgroup_type"] = group["group_name"].split("/")
        self._built = False
        super().__init__(groups, {})
        self.defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        self._built = True
        if ctx.session is not None:
            self._configure(ctx)
            adopt(ctx)

    def _configure(self, ctx: DedicatedCommContext) -> None:
        from dmuon import _native

        # The daemon's groups are ours, in the same order; one without dedicated parameters is left out there.
        routes = [r for r in ("muon", "adamw") if any(p.route == r for p in ctx.params)]
        self._daemon_groups = [{"muon": 0, "adamw": 1}[r] for r in routes]
        options = _native.OptimizerOptions(
            groups=[
                _native.Group(self.param_groups[i]["group_name"], getattr(_native.Route, r.upper()))
                for i, r in zip(self._daemon_groups, routes, strict=True)
            ],
            parameters=[
                _native.ParameterConfig(
                    native_dtype(p.param_dtype, p.param_name),
                    native_dtype(p.grad_dtype, p.param_name),
                    routes.index(p.route),
                )
                for p in ctx.params
            ],
            newton_schulz=self._ns.native(self._ns_steps),
            nesterov=self._nesterov,
            adjust_lr=getattr(_native.AdjustLr, _ADJUST_LR[self._adjust_lr]),
            nonfinite=getattr(_native.Nonfinite, _NONFINITE[self._nonfinite]),
        )
        with device.for_arenas(ctx):
            ctx.session.configure(options)

    @torch._dynamo.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Collective. Returns after all ranks agreed on it; the weights follow by themselves."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_grad_scaler()
        if self._ctx.session is None:
            shard_adamw.step(self._shards, self.param_groups[1], self.state)
            return loss
        started = self._begin_first_step()
        applied = self._daemon_step()
        if applied:
            shard_adamw.step(self._shards, self.param_groups[1], self.state)
        self._last_step_skipped = not applied
        if not self._replicate_async:
            self._ctx.weights.wait()
        self._end_first_step(started)
        return loss

    def _daemon_step(self) -> bool:
        """Whether the step was applied, and not skipped on all ranks."""
        ctx = self._ctx
        ctx.arena_check.look()
        ctx.gradients.flush()
        found_inf = self._nonfinite != "apply" and shard_adamw.any_nonfinite(self._shards)
        for number, index in enumerate(self._daemon_groups):
            group = self.param_groups[index]
            beta1, beta2 = group.get("betas", (0.0, 0.0))
            ctx.session.set_hyper(
                number,
                lr=float(group["lr"]),
                weight_decay=float(group["weight_decay"]),
                momentum=float(group.get("momentum", 0.0)),
                beta1=float(beta1),
                beta2=float(beta2),
                eps=float(group.get("eps", 0.0)),
            )
        ctx.weights.before_step()
        generation = ctx.session.generation
        try:
            result = ctx.session.step(found_inf=found_inf)
        finally:
            if ctx.session.generation != generation:
                ctx.gradients.begin_generation()
        ctx.weights.after_step()
        ctx.arena_check.accept()
        self._steps += 1
        return result.applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of dedicated parameters in either mode, also those that the daemon already has."""
        super().zero_grad(set_to_none)
        if self._ctx.gradients is not None:
            self._ctx.gradients.drop()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_built", False):
            raise NotImplementedError(
                "dmuon.Muon has no add_param_group: the daemon made state and memory for the parameters when the "
                "session was opened. Select them in dedicate_params, or leave them to fully_shard, before dmuon.Muon"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("the state of dmuon.Muon (momentum lives in the daemon) cannot be saved yet")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise NotImplementedError("the state of dmuon.Muon (momentum lives in the daemon) cannot be loaded yet")

    def clip_grad_norm_(self, max_norm: float | None, **options: Any) -> Any:
        raise NotImplementedError("dmuon.Muon.clip_grad_norm_ is not built yet")

    @property
    def last_muon_grad_clip_stats(self) -> None:
        """None: nothing was clipped since the last zero_grad."""
        return None

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step was skipped on all ranks because a gradient was not finite."""
        return self._last_step_skipped

    def consume_last_step_profile(self) -> dict[str, Any]:
        """What the last step cost in the daemon (the slowest slot), in ms; {} before any step."""
        if self._steps == 0:
            return {}
        if not self._record_step_profile:
            return {"enabled": False}
        self._ctx.weights.wait()
        profile = self._ctx.session.last_profile()
        result: dict[str, Any] = {"enabled": True, "step": profile.step, "ns_matrix_count": profile.newton_schulz_calls}
        for phase in ("wait", "reduce", "verdict", "update", "publish", "total"):
            result[f"{phase}_ms"] = getattr(profile, phase) * 1e3
        return {**result, "forms": profile.forms, "kernel": profile.kernel}

    def _refuse_grad_scaler(self) -> None:
        if getattr(self, "found_inf", None) is None:
            return
        scale = getattr(self, "grad_scale", None)
        if scale is None or float(scale) != 1.0:
            raise NotImplementedError(
                "GradScaler with dmuon.Muon is not built yet: gradients are with the daemon before they can be "
                "unscaled. bfloat16 needs no scaling"
            )

    def _begin_first_step(self) -> float:
        if self._steps == 0 and self._log_first_step and self._ctx.rank == 0:
            count = sum(p.route == "muon" for p in self._ctx.params)
            _log.info(
                "[DMuon][rank=%d/%d] first optimizer step started; muon_params=%d, adamw_params=%d, ns_backend=%s, "
                "replicate_async=%s",
                self._ctx.rank, self._ctx.world_size, count, len(self._ctx.params) - count, self._ns.backend,
                self._replicate_async,
            )
        return time.monotonic()

    def _end_first_step(self, started: float) -> None:
        if self._steps == 1 and self._log_first_step and self._ctx.rank == 0:
            _log.info(
                "[DMuon][rank=%d/%d] first optimizer step finished in %.3fs",
                self._ctx.rank, self._ctx.world_size, time.monotonic() - started,
            )


def _newton_schulz(ns_backend: Any) -> NewtonSchulz:
    if isinstance(ns_backend, NewtonSchulz):
        return ns_backend
    if not isinstance(ns_backend, str):
        raise TypeError(
            f"ns_backend: expected 'gram', 'direct' or a dmuon.NewtonSchulz, got {type(ns_backend).__name__}"
        )
    return NewtonSchulz(backend=ns_backend)


def _check_hyper(
    lr_name: str,
    lr: float,
    *,
    weight_decay: float,
    momentum: float = 0.0,
    betas: tuple[float, float] = (0.0, 0.0),
    eps: float = 0.0,
) -> None:
    for name, value in ((lr_name, lr), ("weight decay", weight_decay), ("momentum", momentum), ("adamw_eps", eps)):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name}: expected a number, got {value!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: expected a number >= 0, got {value}")
    if momentum >= 1:
        raise ValueError(f"momentum: expected 0 <= momentum < 1, got {momentum}")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(isinstance(b, numbers.Real) for b in betas):
        raise TypeError(f"adamw_betas: expected two numbers, got {betas!r}")
    if not all(0 <= b < 1 for b in betas):
        raise ValueError(f"adamw_betas: expected two numbers in [0, 1), got {betas}")


def _check_coverage(model: nn.Module, dedicated: set[int]) -> None:
    left = [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in dedicated and not isinstance(p, DTensor)
    ]
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        raise RuntimeError(
            f"nobody averages the gradients of {', '.join(left[:8])}{more}: these parameters are neither dedicated nor "
            "under fully_shard. Call fully_shard(model, mesh=mesh) after dedicate_params"
        )
