"""Where the arenas are: in the host's memory, or on this process's GPU when the daemon computes on GPUs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dmuon.context import DedicatedCommContext


def for_arenas(ctx: DedicatedCommContext) -> AbstractContextManager[Any]:
    """Makes the parameters' device the current one, where the client allocates. ValueError: they are elsewhere."""
    on_gpu = ctx.session.arenas_on_device
    first = ctx.params[0]
    for p in ctx.params:
        if p.tensor.device.type != ("cuda" if on_gpu else "cpu"):
            where = "on GPUs: move the model to one before Muon(...)" if on_gpu else "on the CPU: leave the model there"
            other = "cpu" if on_gpu else "cuda"
            raise ValueError(
                f"parameter '{p.param_name}' is on {p.tensor.device}, and the daemon computes {where}, or use a daemon "
                f"with backend '{other}'"
            )
        if p.tensor.device != first.tensor.device:
            raise ValueError(
                f"parameters '{first.param_name}' and '{p.param_name}' are on {first.tensor.device} and "
                f"{p.tensor.device}: expected one device a rank"
            )
    return torch.cuda.device(first.tensor.device) if on_gpu else nullcontext()


def current(session: Any) -> AbstractContextManager[Any]:
    """Makes the arenas' device the current one. Else the client would, and could only go back by making a context on
    the device that was current: hundreds of MB there, for each rank that never selected its own."""
    return nullcontext() if session.device is None else torch.cuda.device(session.device)


def stream_aside(session: Any) -> torch.cuda.Stream | None:
    """A stream of the arenas' device on which nothing runs; None in the host's memory."""
    return None if session.device is None else torch.cuda.Stream(session.device)


def refuse_capture(session: Any) -> None:
    """RuntimeError: a CUDA graph is being recorded, which would be replayed without the hooks and their waits."""
    if session.device is not None and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph is being captured around dedicated parameters: the hooks of dmuon wait for the daemon on the "
            "host, and a replayed graph would not. Capture inside a boundary, or not at all"
        )


class Streams:
    """The streams of the arenas' device that worked on a place of an arena since it was last handed over.

    In the host's memory there are none, and everything here does nothing.
    """

    def __init__(self, session: Any, aside: torch.cuda.Stream | None = None) -> None:
        self._session = session
        self._aside = aside
        self._seen: dict[int, torch.cuda.Stream] = {}
        self._ends: list[torch.cuda.Event] = []

    def here(self, *used: torch.Tensor) -> None:
        """What is on the current stream works on it; and on the tensors `used`, which may be freed before it has."""
        if self._session.device is None:
            return
        stream = torch.cuda.current_stream(self._session.device)
        self._seen[stream.cuda_stream] = stream
        self._ends.clear()
        for tensor in used:
            tensor.record_stream(stream)

    def end(self) -> None:
        """What they have got until now is the last, unless there is another `here`. REQUIRES: an aside."""
        if not self._ends:
            self._ends = [stream.record_event() for stream in self._seen.values()]

    def join(self) -> int | None:
        """A stream behind all of them: behind their ends, or else the current one, behind what they have got until now.

        They are forgotten.
        """
        if self._session.device is None:
            return None
        stream = torch.cuda.current_stream(self._session.device)
        if self._ends and self._aside is not None:
            stream = self._aside
            for event in self._ends:
                stream.wait_event(event)
        else:
            for other in self._seen.values():
                if other != stream:
                    stream.wait_stream(other)
        self._seen.clear()
        self._ends.clear()
        return int(stream.cuda_stream)

    def synchronize(self) -> None:
        """Waits for them, and for the current one."""
        if self._session.device is not None:
            self.join()
            torch.cuda.current_stream(self._session.device).synchronize()
