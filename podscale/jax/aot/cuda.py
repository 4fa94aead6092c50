"""GPUs that exist as a description only, for which XLA compiles a training step on a machine without any.

The plugin of JAX for CUDA has the whole compiler. It takes the description of a chip in place of a device, and the
program is compiled down to machine code. What needs the device is missing: convolutions and matrix products are not
measured, so cuDNN and cuBLAS algorithms are the defaults, and nothing is run.
"""

from importlib.util import find_spec

import jax
from jax import Device
from jax.experimental import topologies

from podscale.errors import InputError

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""H100 SXM with 80 GB, cuDNN 9.12 and CUDA 13, as XLA describes a chip (GpuTargetConfigProto)."""


def has_cuda_plugin() -> bool:
    """Return True if JAX's plugin for CUDA is installed."""
    return find_spec("jax_plugins") is not None and any(
        find_spec(f"jax_plugins.xla_cuda{version}") is not None for version in (12, 13)
    )


def described_gpus(hosts: int, gpus_per_host: int, chip: str = H100) -> list[Device]:
    """Return the GPUs of several hosts, one process each, that can only be compiled for.

    Raises InputError if the plugin is not installed.
    """
    if not has_cuda_plugin():
        hint = "Run `pip install 'podscale[jax-cuda]'`, in an environment of its own if need be."
        raise InputError("compiling for GPUs needs JAX's plugin for CUDA, which is not installed", hint=hint)
    try:
        topology = topologies.get_topology_desc(
            "described", platform="cuda", target_config=chip, topology=f"1x{hosts}x{gpus_per_host}"
        )
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"the installed plugin cannot describe GPUs: {error}") from error
    return list(topology.devices)
