"""A worker of stage 1 as a KFP component: one part of a shard set."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def pack(data: str, workspace: str, index: int, of: int) -> None:
    """Packs every of-th shard, counted from `index`; the shard component completes the set afterwards.

    Args:
        data: The `data` section of the run document as JSON, as the shard component gets it.
        workspace: Directory under which datasets/<fingerprint> is made.
        index: Number of this worker, from 0.
        of: Number of workers.
    """
    from podscale.components import steps

    steps.pack(data, workspace, index, of)
