"""Record of a registered version: the hash that names the same exports again, and the properties of the version."""

import hashlib
import json
from collections.abc import Sequence

from podscale.config import RunConfig, data_fingerprint
from podscale.export.export_report import Export


def exports_identity(exports: Sequence[Export]) -> str:
    """Return the hash of the files' names and metadata. Two exports of a model may differ in bytes."""
    names = [[export.path.name, export.metadata.to_strings()] for export in exports]
    return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()


def version_properties(config: RunConfig, exports: Sequence[Export]) -> dict[str, str | float]:
    """Return the properties of a version: run, network, hashes of weights and data, formats, and its top-1.

    `top1` is that of the model in PyTorch on the images of the check; absent without labels.
    """
    metadata, agreement = exports[0].metadata, exports[0].agreement
    top1 = {} if agreement.reference_top1 is None else {"top1": agreement.reference_top1}
    return {
        "run": str(metadata.description["run"]),
        "model": str(metadata.description["architecture"]["name"]),
        "weights_sha256": metadata.weights_sha256,
        "data_fingerprint": data_fingerprint(config.data),
        "formats": ",".join(export.format for export in exports),
        **top1,
    }
