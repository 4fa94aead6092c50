"""Stage 1 as a KFP component: images to a shard set."""

from kfp import dsl

from podscale.components import IMAGE


@dsl.component(base_image=IMAGE, install_kfp_package=False)
def shard(data: str, workspace: str, shard_set: dsl.Output[dsl.Dataset]) -> None:
    """Makes the shard set of a data section, or finds it complete.

    Args:
        data: The `data` section of the run document as JSON, and nothing else of it, so that the cached result is
            still valid when, say, the learning rate changes.
        workspace: Directory under which datasets/<fingerprint> is made.
        shard_set: The manifest: a small JSON file with location, counts and hashes. The shards stay where they are.
    """
    from podscale.components import steps

    steps.shard(data, workspace, shard_set)
