#!/usr/bin/env python3
"""Print the Debian and Python packages and the crates of an image as SPDX 2.3 JSON, with versions and package URLs.

usage: sbom.py --name IMAGE --dpkg-status FILE [--crates Cargo.lock] ENVIRONMENT...

Reads only Debian's package database, the metadata of Python environments and the lock file of an extension in Rust, so
the same packages give the same bytes.
https://spdx.github.io/spdx-spec/v2.3, https://github.com/package-url/purl-spec
"""

import argparse
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from email.parser import Parser
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

SPDX_LICENSE = re.compile(r"[A-Za-z0-9.+-]+( (AND|OR|WITH) [A-Za-z0-9.+-]+)*")


class Package(NamedTuple):
    """Installed package; `license` is an SPDX expression, or "" if it has none."""

    name: str
    version: str
    purl: str
    license: str = ""


def debian_packages(status: str, distribution: str = "debian") -> Iterator[Package]:
    """Yield the installed packages of a dpkg status file."""
    for paragraph in status.split("\n\n"):
        fields = Parser().parsestr(paragraph)
        if "installed" in fields.get("Status", "").split():
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/{distribution}/{name}@{quote(version)}?arch={fields['Architecture']}"
            yield Package(name, version, purl)


def python_packages(environment: Path) -> Iterator[Package]:
    """Yield the distributions of a virtual environment, which may be under another root."""
    for site in sorted(environment.glob("lib/python3.*/site-packages")):
        for dist in distributions(path=[str(site)]):
            name = re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower()
            yield Package(name, dist.version, f"pkg:pypi/{name}@{quote(dist.version)}", _license(dist))


def crates(lock: str) -> Iterator[Package]:
    """Yield the crates of a Cargo.lock that come from a registry, with those that are only needed for the build."""
    for crate in tomllib.loads(lock)["package"]:
        if "source" in crate:
            name, version = crate["name"], crate["version"]
            yield Package(name, version, f"pkg:cargo/{name}@{quote(version)}")


def _license(dist: Distribution) -> str:
    """Return PEP 639's expression, or the older free text if it is an identifier."""
    fields = [name for name in ("License-Expression", "License") if name in dist.metadata]
    text = next((dist.metadata[name] for name in fields if dist.metadata[name]), "")
    return text if SPDX_LICENSE.fullmatch(text) and text.upper() != "UNKNOWN" else ""


def document(name: str, packages: Iterable[Package], created: datetime) -> dict[str, Any]:
    """Return the SPDX document of an image."""
    entries = [_entry(number, package) for number, package in enumerate(sorted(set(packages)), start=1)]
    digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
    image = {
        "SPDXID": "SPDXRef-Image",
        "name": name,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "primaryPackagePurpose": "CONTAINER",
    }
    contained = [_relationship("SPDXRef-Image", "CONTAINS", entry["SPDXID"]) for entry in entries]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": name,
        "documentNamespace": f"https://podscale.dev/sbom/{name}/{digest}",
        "creationInfo": {"created": created.strftime("%Y-%m-%dT%H:%M:%SZ"), "creators": ["Tool: podscale-sbom"]},
        "packages": [image, *entries],
        "relationships": [_relationship("SPDXRef-DOCUMENT", "DESCRIBES", "SPDXRef-Image"), *contained],
    }


def _entry(number: int, package: Package) -> dict[str, Any]:
    return {
        "SPDXID": f"SPDXRef-Package-{number}",
        "name": package.name,
        "versionInfo": package.version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseDeclared": package.license or "NOASSERTION",
        "externalRefs": [
            {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl", "referenceLocator": package.purl}
        ],
    }


def _relationship(source: str, kind: str, target: str) -> dict[str, str]:
    return {"spdxElementId": source, "relationshipType": kind, "relatedSpdxElement": target}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--name", required=True)
    parser.add_argument("--dpkg-status", type=Path, required=True)
    parser.add_argument("--crates", type=Path)
    parser.add_argument("environments", type=Path, nargs="+")
    options = parser.parse_args()
    packages = [*debian_packages(options.dpkg_status.read_text(encoding="utf-8"))]
    for environment in options.environments:
        packages += python_packages(environment)
    if options.crates is not None:
        packages += crates(options.crates.read_text(encoding="utf-8"))
    created = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), UTC)
    print(json.dumps(document(options.name, packages, created), indent=1))


if __name__ == "__main__":
    main()
