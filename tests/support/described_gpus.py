"""GPUs that exist as a description only, for which XLA compiles a training step on a machine without any.

The plugin of JAX for CUDA has the whole compiler. It takes the description of a chip in place of a device, and the
program is compiled down to machine code. What needs the device is missing: convolutions and matrix products are not
measured, so cuDNN and cuBLAS algorithms are the defaults, and nothing is run.
"""

from jax import Device
from jax.experimental import topologies

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


def described_gpus(hosts: int, gpus_per_host: int) -> list[Device]:
    """Return the H100s of several hosts, one process each, that can only be compiled for; needs JAX's CUDA plugin."""
    topology = topologies.get_topology_desc(
        "described", platform="cuda", target_config=H100, topology=f"1x{hosts}x{gpus_per_host}"
    )
    return list(topology.devices)
