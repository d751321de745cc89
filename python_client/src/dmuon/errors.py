"""What goes wrong, as exceptions."""

from __future__ import annotations


class DMuonError(RuntimeError):
    """An error that the daemon or the client reported. ``code`` is its gRPC status code."""

    code: int = 2


class DaemonUnavailable(DMuonError):
    """No daemon answers, or it is going away. The session is lost."""


class StepAborted(DMuonError):
    """The step died elsewhere (another rank, another daemon); nothing changed here."""


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
