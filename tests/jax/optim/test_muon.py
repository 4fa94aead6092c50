"""Muon follows its float64 oracle and the PyTorch engine, on one device, and on eight that share the matrices."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from podscale.config.optimizer import MuonSection
from podscale.jax.flat_buffers import ParamLayout
from podscale.jax.mesh import DEVICES, arrange_devices
from podscale.jax.optim import HyperParams, Muon, OptState, ParamShard, ReplicaAxes
from podscale.pytorch import optim as torch_optim
from podscale.pytorch.optim.base import ReplicaGroup
from podscale.training.param_layout import ParamOptions
from tests.jax.optim.test_second_order import EXACT, map_host, near, torch_in_float64
from tests.support.flat_share import FlatArrays
from tests.support.muon_oracle import muon_oracle
from tests.support.optimizer_oracles import Values
from tests.unit.pytorch.optim.test_muon import ADAPTS, DECAYS, MATRICES, SHAPES, draw, steps

LAYOUT = ParamLayout(SHAPES, bucket_elements=600)


def in_jax(section: MuonSection, nesterov: bool, *, devices: int, exact: bool) -> Values:
    """Return the weights after all steps; gradients of a masked step are NaN."""
    mesh = arrange_devices(jax.devices()[:devices], np.arange(devices).reshape(1, 1, devices))
    optimizer = Muon(section, nesterov, ReplicaAxes(DEVICES, devices) if devices > 1 else ReplicaAxes())
    options = {name: ParamOptions(DECAYS[name], ADAPTS[name]) for name in SHAPES}

    def body(weights: Any, pushes: Any, rows: Any, finites: Any) -> Any:
        shard = ParamShard(LAYOUT, options)

        def step(carry: Any, given: Any) -> Any:
            row, push, finite = given
            push = tuple(jnp.where(finite, bucket, jnp.nan) for bucket in push)
            hyper = HyperParams(*row, loss=jnp.array(2.0), step=jnp.array(0))
            result = optimizer.step(shard, carry[0], push, carry[1], hyper, finite)
            return (result.weights, result.opt_state), result.finite

        momentum = jax.tree.map(jnp.zeros_like, weights)
        carry, applied = jax.lax.scan(step, (weights, OptState({"momentum": momentum}, {})), (rows, pushes, finites))
        return carry[0], applied

    if devices > 1:
        whole = PartitionSpec()
        body = jax.shard_map(body, mesh=mesh, in_specs=(whole,) * 4, out_specs=(whole, whole), check_vma=False)
    pushes = tuple(map(np.stack, zip(*[LAYOUT.pack_on_host(step.gradients) for step in steps()], strict=True)))
    table = np.array([[step.rate, step.momentum, step.decay] for step in steps()])
    finite = [step.finite for step in steps()]
    with jax.enable_x64(True) if exact else nullcontext():
        dtype = np.float64 if exact else np.float32
        given = jax.tree.map(lambda array: jnp.asarray(array, dtype), (LAYOUT.pack_on_host(draw(0)), pushes, table))
        weights, applied = jax.jit(body)(*given, jnp.asarray(finite))
        assert np.asarray(applied).tolist() == finite
        return {name: np.asarray(array) for name, array in LAYOUT.unpack(map_host(weights)).items()}


def in_torch(section: MuonSection, nesterov: bool) -> Values:
    with torch_in_float64():
        arrays = FlatArrays(draw(0), DECAYS, ADAPTS)
        rule = torch_optim.Muon(arrays.share(), section, ReplicaGroup(), nesterov=nesterov)
        for step in steps():
            given = step.gradients if step.finite else {name: 0 * g for name, g in step.gradients.items()}
            row = torch_optim.HyperParams(*torch.tensor([step.rate, step.momentum, step.decay, 2.0]).unbind())
            arrays.step(rule, given, row, finite=step.finite)
        return arrays.take(arrays.weights)


@pytest.mark.parametrize("options", [{}, {"scale": "rms", "other_rate": 0.3, "iterations": 3}])
def test_muon_follows_its_oracle_and_the_other_engine(options: dict[str, Any]) -> None:
    section, nesterov = MuonSection(**options), bool(options)
    want = muon_oracle(draw(0), steps(), DECAYS, MATRICES, nesterov=nesterov, **options)
    found = in_jax(section, nesterov, devices=8, exact=True)
    near(found, want, EXACT, draw(0))
    near(found, in_torch(section, nesterov), EXACT, draw(0))
    for devices in (1, 8):
        near(in_jax(section, nesterov, devices=devices, exact=False), want, 1e-4, draw(0))


def test_matrices_may_be_orthogonalised_in_bf16() -> None:
    want = muon_oracle(draw(0), steps(), DECAYS, MATRICES)
    found = in_jax(MuonSection(precision="bf16"), nesterov=False, devices=1, exact=False)
    assert found["wide"].dtype == np.float32
    near(found, want, 0.1, draw(0))
    with pytest.raises(AssertionError):
        near(found, want, 1e-4, draw(0))
