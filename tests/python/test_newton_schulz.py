"""Newton-Schulz in process, against the exact polynomial in float64."""

import dmuon
import numpy as np
import pytest
import torch

from support import reference


@pytest.mark.parametrize("shape", [(32, 32), (24, 96), (96, 24), (1, 7), (7, 1), (129, 65)])
@pytest.mark.parametrize("function", [dmuon.gram_newton_schulz, dmuon.direct_newton_schulz])
def test_fp32_is_within_the_contract(function, shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = g.clone()
    out = function(g, deterministic=True)
    assert reference.relative(out, reference.newton_schulz(g.numpy())) <= 1e-5
    assert torch.equal(g, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_shape_and_strides(dtype):
    g = torch.randn(3, 20, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = dmuon.newton_schulz(g)
    assert out.dtype == dtype and out.shape == g.shape
    for one, matrix in zip(out, g, strict=True):
        assert reference.relative(one.float(), reference.newton_schulz(matrix.float().numpy())) <= 2e-2
    assert torch.equal(dmuon.newton_schulz(g.transpose(1, 2).contiguous().transpose(1, 2)), out)
    wide = torch.zeros(6, 40, 60, dtype=dtype)
    wide[::2, ::2, ::2] = g
    assert torch.equal(dmuon.newton_schulz(wide[::2, ::2, ::2]), out)
    same = g[:1].expand(3, 20, 30)  # stride 0
    assert torch.equal(dmuon.newton_schulz(same), dmuon.newton_schulz(same.contiguous()))


def test_steps_coefficients_and_scale():
    g = torch.randn(16, 40, generator=torch.Generator().manual_seed(2))
    you = dmuon.gram_newton_schulz(g, coefficients=dmuon.YOU_COEFFICIENTS, deterministic=True)
    assert reference.relative(you, reference.newton_schulz(g.numpy(), coefficients=dmuon.YOU_COEFFICIENTS)) <= 1e-4
    three = dmuon.direct_newton_schulz(g, steps=3, deterministic=True)
    assert reference.relative(three, reference.newton_schulz(g.numpy(), steps=3)) <= 1e-5
    assert reference.relative(dmuon.newton_schulz(g * 1e-30), dmuon.newton_schulz(g)) <= 1e-2
    assert not dmuon.newton_schulz(torch.zeros(3, 4)).any()
    assert np.allclose(dmuon.POLAR_EXPRESS_COEFFICIENTS, reference.POLAR_EXPRESS, rtol=1e-15)


def test_what_it_refuses():
    with pytest.raises(ValueError, match="matrix"):
        dmuon.newton_schulz(torch.zeros(3))
    with pytest.raises(ValueError, match="singular value"):
        dmuon.newton_schulz(torch.randn(4, 4), coefficients=[(5.0, -1.0, 4.0)] * 5)
    with pytest.raises(NotImplementedError, match="eps"):
        dmuon.newton_schulz(torch.randn(4, 4), eps=1e-3)
    with pytest.raises(ValueError, match="rows"):
        dmuon.NewtonSchulz(coefficients=[(1.0, 2.0)])
    with pytest.raises(ValueError, match="expected one of"):
        dmuon.NewtonSchulz(kernel="magic")
    with pytest.raises(RuntimeError, match="needs a GPU; available here: auto, cublas, cpu"):
        dmuon.NewtonSchulz(kernel="quack")
    with pytest.raises(NotImplementedError, match="compile"):
        dmuon.NewtonSchulz(kernel="compile")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("function", [dmuon.newton_schulz, dmuon.gram_newton_schulz, dmuon.direct_newton_schulz])
def test_a_dtype_that_it_cannot_compute_in_is_named_with_those_it_can(function, dtype):
    accepted = "torch.float32, torch.bfloat16, torch.float16, torch.float64"
    with pytest.raises(TypeError, match=f"{accepted}, got {dtype}"):
        function(torch.ones(4, 4, dtype=dtype))


def test_the_iteration_dtype_is_one_that_there_is():
    for name in ("fp32", "tf32", "bf16", "fp16", None):
        assert dmuon.NewtonSchulz(iteration_dtype=name).iteration_dtype == name
    with pytest.raises(ValueError, match="iteration_dtype: expected one of fp32, tf32, bf16, fp16 or None, got 'fp8'"):
        dmuon.NewtonSchulz(iteration_dtype="fp8")
    with pytest.raises(ValueError, match="expected None or 'fp32' with deterministic, got 'tf32'"):
        dmuon.NewtonSchulz(deterministic=True, iteration_dtype="tf32")


def test_the_published_sets_are_the_same_on_both_sides():
    g = torch.randn(64, 200, generator=torch.Generator().manual_seed(5))
    for steps in range(1, 6):  # cut short a published set peaks above 1.5, which a custom one may not
        given = dmuon.NewtonSchulz("gram", coefficients=dmuon.POLAR_EXPRESS_COEFFICIENTS).local(g, steps)
        assert (given - dmuon.NewtonSchulz("gram").local(g, steps)).abs().max() < 1e-6


def test_an_iteration_dtype_is_what_runs():
    g = torch.randn(96, 256, generator=torch.Generator().manual_seed(3))
    fp32 = dmuon.NewtonSchulz(iteration_dtype="fp32").local(g)
    assert torch.equal(fp32, dmuon.NewtonSchulz(deterministic=True).local(g))
    bf16 = dmuon.NewtonSchulz(iteration_dtype="bf16").local(g)
    assert 0 < (bf16 - fp32).norm() / fp32.norm() < 2e-2
    for name in ("tf32", "fp16"):
        with pytest.raises(NotImplementedError, match=f"{name} is not built on the cpu backend"):
            dmuon.NewtonSchulz(iteration_dtype=name).local(g)


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match=r"torch\.Tensor, got ndarray"):
        dmuon.newton_schulz(np.ones((4, 4)))


@pytest.mark.parametrize("steps", [0, 33, 99, -1, True, 5.0])
def test_steps_have_the_range_of_the_optimizer(steps):
    with pytest.raises(ValueError, match=f"steps: expected 1 to 32, got {steps}"):
        dmuon.newton_schulz(torch.eye(4), steps=steps)


def test_the_environment_counts_only_for_auto(monkeypatch):
    monkeypatch.setenv("DMUON_NS_KERNEL", "cpu")
    assert dmuon.NewtonSchulz().kernel == "cpu"
    monkeypatch.setenv("DMUON_NS_KERNEL", "magic")
    with pytest.raises(ValueError):
        dmuon.NewtonSchulz()
    assert dmuon.NewtonSchulz(kernel="cpu").kernel == "cpu"


def test_it_says_what_it_runs_on():
    assert dmuon.get_ns_backend().startswith("Gram NS · kernel=cpu (")
    assert dmuon.get_backend_status()["auto_choice"] == "cpu"
    assert repr(dmuon.NewtonSchulz()) == "NewtonSchulz(backend='gram', kernel='auto', coefficients=polar_express)"
