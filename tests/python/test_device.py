"""Where tensors are and where the daemon computes: what is refused, without a GPU; test_cuda.py has the rest."""

from types import SimpleNamespace

import pytest
import torch
from dmuon import device


def ctx(arenas_on_device, *tensors):
    params = [SimpleNamespace(param_name=f"p{i}", tensor=t) for i, t in enumerate(tensors)]
    return SimpleNamespace(session=SimpleNamespace(arenas_on_device=arenas_on_device, device=None), params=params)


def test_parameters_on_the_cpu_are_refused_by_a_daemon_that_computes_on_gpus():
    with pytest.raises(ValueError, match="parameter 'p0' is on cpu, and the daemon computes on GPUs: move the model"):
        device.for_arenas(ctx(True, torch.zeros(2)))


def test_parameters_elsewhere_are_refused_by_a_daemon_that_computes_on_the_cpu():
    with pytest.raises(ValueError, match="parameter 'p1' is on meta, and the daemon computes on the CPU"):
        device.for_arenas(ctx(False, torch.zeros(2), torch.zeros(2, device="meta")))


def test_parameters_on_the_cpu_need_no_device_and_no_stream():
    with device.for_arenas(ctx(False, torch.zeros(2), torch.zeros(3))):
        pass
    session = SimpleNamespace(device=None)
    with device.current(session):
        device.refuse_capture(session)
    streams = device.Streams(session)
    streams.here(torch.zeros(2))
    streams.synchronize()
    assert streams.join() is None
