"""The CUDA backend through libdmuon_gpu_probe.so, and what the measurements share.

torch is imported first: it loads CUDA's libraries, and the module then takes those.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FP32, BF16, FP16 = 1, 2, 3
DTYPE_NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
CUTS = {"whole": 0, "mirror": 1, "panels": 2, "levels": 3}


class _Plan(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("dtype", ctypes.c_int),
        ("direct", ctypes.c_int),
        ("measure", ctypes.c_int),
        ("gram_cut", ctypes.c_int),
        ("gram_parts", ctypes.c_int),
        ("square_cut", ctypes.c_int),
        ("square_parts", ctypes.c_int),
        ("workspace_bytes", ctypes.c_int64),
    ]


def _cut(name: str | None) -> tuple[int, int]:
    """("panels4") -> (2, 4); None: not forced."""
    if name is None:
        return -1, 0
    kind = name.rstrip("0123456789")
    return CUTS[kind], int(name[len(kind) :] or 0)


class Backend:
    """One stream of the backend; `torch_stream` is the same stream for torch."""

    def __init__(self, folder: Path) -> None:
        self._lib = ctypes.CDLL(str(folder / "libdmuon_gpu_probe.so"))
        for name in ("probe_stream", "probe_cuda_stream", "probe_plan"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        text = ctypes.create_string_buffer(4096)
        if self._lib.probe_open(str(folder).encode(), text, len(text)) != 0:
            raise RuntimeError(text.value.decode())
        self.description = text.value.decode()
        self._stream = ctypes.c_void_p(self._lib.probe_stream())
        self.torch_stream = torch.cuda.ExternalStream(self._lib.probe_cuda_stream(self._stream))

    def synchronize(self) -> None:
        text = ctypes.create_string_buffer(4096)
        if self._lib.probe_synchronize(self._stream, text, len(text)) != 0:
            raise RuntimeError(text.value.decode())

    def plan(
        self,
        rows: int,
        cols: int,
        dtype: int = FP16,
        *,
        direct: bool = False,
        measure: bool = True,
        gram: str | None = None,
        square: str | None = None,
        prepare: bool = True,
    ) -> Plan:
        return Plan(self, rows, cols, dtype, direct, measure, gram, square, prepare)

    def mean(self, inputs: list[torch.Tensor], dtype: int, mean: torch.Tensor, square_sum: torch.Tensor) -> None:
        pointers = (ctypes.c_void_p * len(inputs))(*[t.data_ptr() for t in inputs])
        count = ctypes.c_int64(mean.numel())
        self._lib.probe_mean(self._stream, pointers, len(inputs), dtype, count, _at(mean), _at(square_sum))

    def lookahead(self, momentum: torch.Tensor, gradient: torch.Tensor, update: torch.Tensor) -> None:
        self._lib.probe_lookahead(
            self._stream, _at(momentum), _at(gradient), _at(update), ctypes.c_int64(update.numel())
        )

    def commit(
        self, m: torch.Tensor, g: torch.Tensor, w: torch.Tensor, o: torch.Tensor, square_sum: torch.Tensor
    ) -> None:
        count = ctypes.c_int64(w.numel())
        self._lib.probe_commit(self._stream, _at(m), _at(g), _at(w), _at(o), count, _at(square_sum))

    def orthogonality(self, o: torch.Tensor, square_error: torch.Tensor) -> None:
        rows, cols = (ctypes.c_int64(size) for size in o.shape)
        self._lib.probe_orthogonality(self._stream, _at(o), rows, cols, _at(square_error))

    def adamw(self, w: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, step: int) -> None:
        count = ctypes.c_int64(w.numel())
        self._lib.probe_adamw(self._stream, _at(w), _at(m), _at(v), _at(g), count, ctypes.c_int64(step))

    def publish(self, source: torch.Tensor, dtype: int, to: torch.Tensor) -> None:
        self._lib.probe_publish(self._stream, _at(source), dtype, _at(to), ctypes.c_int64(source.numel()))


class Plan:
    """A Newton-Schulz plan with its workspace."""

    def __init__(
        self,
        backend: Backend,
        rows: int,
        cols: int,
        dtype: int,
        direct: bool,
        measure: bool,
        gram: str | None,
        square: str | None,
        prepare: bool,
    ) -> None:
        self._backend = backend
        lib = backend._lib
        spec = _Plan(rows, cols, dtype, int(direct), int(measure), *_cut(gram), *_cut(square), 0)
        text = ctypes.create_string_buffer(1 << 16)
        handle = lib.probe_plan(ctypes.byref(spec), text, len(text))
        if not handle:
            raise RuntimeError(text.value.decode())
        self._handle = ctypes.c_void_p(handle)
        self.info: dict[str, Any] = json.loads(text.value.decode())
        self.workspace = torch.empty(spec.workspace_bytes, dtype=torch.uint8, device="cuda")
        self._prepare = prepare
        self._prepared: set[tuple[int, int]] = set()

    def prepare(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Records what `run` on these two will do; writes `out`."""
        torch.cuda.synchronize()
        text = ctypes.create_string_buffer(4096)
        if self._backend._lib.probe_prepare(
            self._handle, _at(source), _at(out), _at(self.workspace), text, len(text)
        ):
            raise RuntimeError(text.value.decode())
        self._prepared.add((source.data_ptr(), out.data_ptr()))

    def run(self, source: torch.Tensor, out: torch.Tensor) -> None:
        if self._prepare and (source.data_ptr(), out.data_ptr()) not in self._prepared:
            self.prepare(source, out)
        self._backend._lib.probe_run(
            self._backend._stream, self._handle, _at(source), _at(out), _at(self.workspace)
        )

    def close(self) -> None:
        self._backend._lib.probe_free_plan(self._handle)


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def median_ms(stream: torch.cuda.Stream, run: Callable[[], None], rounds: int = 10, repeats: int = 1) -> float:
    """Median over `rounds` of the device's time for one run, `repeats` of them between two events."""
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(repeats):
                run()
            stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / repeats)
    return statistics.median(times)


@dataclass
class Results:
    """Written after every entry, so that a part that runs out of time leaves what it has.

    An entry with "within": False, or with an "error", makes the part fail; one with "skipped" makes it incomplete.
    """

    path: Path
    data: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    def put(self, key: str, value: Any) -> None:
        self.data[key] = value
        self.data["seconds"] = round(time.monotonic() - self.started, 1)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.data, indent=1))
        temporary.rename(self.path)
        print(f"[{self.data['seconds']:6.1f} s] {key}: {json.dumps(value)[:600]}", flush=True)

    def attempt(self, key: str, make: Callable[[], Any], seconds: float = 5) -> None:
        """One entry's failure is that entry's result. `seconds`: what it may take; skipped when less is left."""
        if time.time() + seconds > float(os.environ.get("DEADLINE", "inf")):
            self.skip(key, "no time left")
            return
        try:
            self.put(key, make())
        except Exception as error:  # a measurement script: say it and go on
            self.put(key, {"error": f"{type(error).__name__}: {error}"[:500]})

    def skip(self, key: str, why: str) -> None:
        self.put(key, {"skipped": why[:500]})

    def code(self) -> int:
        """The part's exit code."""
        entries = [entry for entry in self.data.values() if isinstance(entry, dict)]
        if any(isinstance(entry.get("error"), str) or entry.get("within") is False for entry in entries):
            return 1
        return 4 if any("skipped" in entry for entry in entries) else 0


def open_part() -> tuple[Backend, Results]:
    """Arguments of every part: the folder of the libraries and the file for the results."""
    folder, output = Path(sys.argv[1]), Path(sys.argv[2])
    results = Results(output)
    backend = Backend(folder)
    results.put("backend", backend.description)
    results.put("torch", torch.__version__)
    results.put("libraries", sorted({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()
                                     if "libcublasLt" in line or "libcudart" in line}))
    return backend, results
