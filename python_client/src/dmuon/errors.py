"""What goes wrong, as exceptions.

From a step: after ``ValueError`` (values out of range, or other ones on another rank), ``DMuonError`` with code 9
(ranks differ in their backward passes, or a gradient is not finite and ``nonfinite="error"``), ``TimeoutError``
(the rank named did not come within the daemon's step_timeout) and ``StepAborted`` nothing has changed, and the
gradients are dropped on all ranks: run the backward again and step. After every other one the session is lost.
"""

from __future__ import annotations


class DMuonError(RuntimeError):
    """An error that the daemon or the client reported. ``code`` is its gRPC status code."""

    code: int = 2


class DaemonUnavailable(DMuonError):
    """No daemon is there, or it is going away, or the session has failed. The session is lost."""


class StepAborted(DMuonError):
    """The step died elsewhere; nothing changed here.

    Either this rank came to a step that the others had given up (they got ``TimeoutError``): run the backward again and
    step. Or a rank is gone, which the message names: then the next attempt fails at once, with this or with
    ``DaemonUnavailable``, and the session is lost.
    """


# By absl::StatusCode. Python's own exception where it has one for the same thing.
_BY_CODE: dict[int, type[Exception]] = {
    3: ValueError,  # INVALID_ARGUMENT
    4: TimeoutError,  # DEADLINE_EXCEEDED
    7: PermissionError,  # PERMISSION_DENIED
    10: StepAborted,  # ABORTED
    12: NotImplementedError,  # UNIMPLEMENTED
    14: DaemonUnavailable,  # UNAVAILABLE
}


def from_status(code: int, message: str) -> Exception:
    """The exception for a status; called by the binding."""
    error = _BY_CODE.get(code, DMuonError)(message)
    if isinstance(error, DMuonError):
        error.code = code
    return error
