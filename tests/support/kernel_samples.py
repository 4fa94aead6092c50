"""One case of each family of Triton kernels against float64, or PIL: the errors, as JSON.

`TRITON_INTERPRET=1 python -m tests.support.kernel_samples`. The oracles with all cases are slow tests.
"""

import json

import torch
from torch import distributed as dist

from tests.support import crop_kernel_oracle, fused_norm_oracle, gemm_oracle


def main() -> None:
    gemm_oracle.prepare_interpreter()
    crop_kernel_oracle.use_few_programs()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(
        json.dumps(
            {
                "batch norm": max(fused_norm_oracle.errors_of("sum", (2, 8, 4, 6), torch.float32).values()),
                "convolution": max(gemm_oracle.errors_of("activated", gemm_oracle.SHAPES[0], torch.float32).values()),
                "crops": max(crop_kernel_oracle.differences("bilinear", cases=["one axis"]).values()),
            }
        )
    )


if __name__ == "__main__":
    main()
