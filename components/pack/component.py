"""KFP component of a stage 1 worker: pack one part of a shard set."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pack(data: str, workspace: str, index: int, of: int) -> None:
    """Pack every of-th shard from `index` on; the shard component completes the set afterwards.

    Args:
        data: The `data` section of the run document as JSON, the same as for the shard component.
        workspace: Directory in which datasets/<fingerprint> is created.
        index: Number of this worker, from 0.
        of: Number of workers.
    """
    from podscale.components import steps

    steps.pack(data, workspace, index, of)
