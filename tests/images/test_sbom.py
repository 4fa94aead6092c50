"""images/sbom.py: the packages of an image as SPDX."""

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "images" / "sbom.py"
STATUS = """Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u13

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1
"""
CRATES = """version = 4

[[package]]
name = "memchr"
version = "2.8.3"
source = "registry+https://example.org/index"
checksum = "00"

[[package]]
name = "podscale-native"
version = "0.1.0"
"""


def make(tmp_path: Path) -> dict[str, object]:
    site = tmp_path / "venv/lib/python3.11/site-packages"
    for name, version, extra in (
        ("Typing_Extensions", "4.16.0", "License-Expression: PSF-2.0"),
        ("odd", "1.0+local", "License: see the file LICENSE for everything"),
    ):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{extra}\n")
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "Cargo.lock").write_text(CRATES)
    command = [
        sys.executable,
        PROGRAM,
        "--name",
        "podscale-base",
        "--dpkg-status",
        tmp_path / "status",
        "--crates",
        tmp_path / "Cargo.lock",
        tmp_path / "venv",
    ]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "315532800"}
    document: dict[str, object] = json.loads(subprocess.check_output(command, env=environment))
    return document


def test_every_package_is_listed_with_its_address(tmp_path):
    document = make(tmp_path)
    assert document["spdxVersion"] == "SPDX-2.3"
    assert document["creationInfo"]["created"] == "1980-01-01T00:00:00Z"
    listed = {
        package["name"]: (
            package["versionInfo"],
            package["licenseDeclared"],
            package["externalRefs"][0]["referenceLocator"],
        )
        for package in document["packages"]
        if package["SPDXID"] != "SPDXRef-Image"
    }
    assert listed == {
        "libc6": ("2.36-9+deb12u13", "NOASSERTION", "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64"),
        "typing-extensions": ("4.16.0", "PSF-2.0", "pkg:pypi/typing-extensions@4.16.0"),
        "memchr": ("2.8.3", "NOASSERTION", "pkg:cargo/memchr@2.8.3"),
        "odd": ("1.0+local", "NOASSERTION", "pkg:pypi/odd@1.0%2Blocal"),
    }


def test_every_relationship_has_both_ends(tmp_path):
    document = make(tmp_path)
    names = {"SPDXRef-DOCUMENT", *(package["SPDXID"] for package in document["packages"])}
    assert len(names) == len(document["packages"]) + 1
    ends = {end for r in document["relationships"] for end in (r["spdxElementId"], r["relatedSpdxElement"])}
    assert ends == names


def test_the_same_packages_give_the_same_bytes(tmp_path):
    assert make(tmp_path) == make(tmp_path)
