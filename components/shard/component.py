"""KFP component of stage 1: pack images into a shard set."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def shard(data: str, workspace: str, shard_set: dsl.Output[dsl.Dataset]) -> None:
    """Build the shard set of a data section, or reuse a complete one.

    Args:
        data: The `data` section of the run document as JSON. Without the other sections, the cached result remains
            valid when, for example, the learning rate changes.
        workspace: Directory in which datasets/<fingerprint> is created.
        shard_set: The manifest, a small JSON file with location, counts and hashes. The shards remain in the workspace.
    """
    from podscale.components import steps

    steps.shard(data, workspace, shard_set)
