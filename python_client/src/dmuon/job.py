"""Which job this is: the name of the session, the same on all ranks."""

from __future__ import annotations

import os
import uuid

import torch.distributed as dist

_opened = 0  # sessions of this process; the ranks open theirs in the same order


def restart_count() -> int:
    text = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(text) if text.isdigit() else 0


def agree_on_name(group: dist.ProcessGroup | None) -> str:
    """``DMUON_JOB``, else torchrun's run id, else a UUID: as rank 0 sees them. A job's second model gets a suffix."""
    global _opened
    name = os.environ.get("DMUON_JOB") or os.environ.get("TORCHELASTIC_RUN_ID")
    if not name or (name == "none" and not os.environ.get("DMUON_JOB")):  # torchrun --master-port says "none"
        name = str(uuid.uuid4())
    _opened += 1
    if _opened > 1:
        name = f"{name}.{_opened}"
    if group is None:
        return name
    box = [name]
    dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]
