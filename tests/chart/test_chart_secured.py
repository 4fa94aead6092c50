"""Metrics with TLS and tokens: Prometheus, its collectors' rights and the pods of runs are configured alike."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from podscale.config import load, loads
from podscale.kubernetes.job_spec import METRICS_PORT, build_job_spec
from podscale.kubernetes.render import render_job
from podscale.runs.stage_outcomes import StageName
from tests.support import crds, helm
from tests.support.pods import pods_of

TLS = {"secret": "tls", "serverName": "runs.example"}
CA = {"secret": {"name": "tls", "key": "ca.crt"}}
OURS = {"cert": {"secret": {"name": "mine", "key": "tls.crt"}}}


@pytest.mark.parametrize(
    ("metrics", "operators", "googles", "read"),
    [
        (
            {"tls": TLS},
            {"scheme": "https", "tlsConfig": {"ca": CA, "serverName": "runs.example"}},
            {"scheme": "https", "tls": {"ca": CA, "serverName": "runs.example"}},
            ["tls"],
        ),
        (
            {"tls": {"secret": "tls", "clientSecret": "mine"}},
            {
                "scheme": "https",
                "tlsConfig": {
                    "ca": CA,
                    "serverName": "podscale-metrics",
                    **OURS,
                    "keySecret": {"name": "mine", "key": "tls.key"},
                },
            },
            {
                "scheme": "https",
                "tls": {
                    "ca": CA,
                    "serverName": "podscale-metrics",
                    **OURS,
                    "key": {"secret": {"name": "mine", "key": "tls.key"}},
                },
            },
            ["tls", "mine"],
        ),
        (
            {"tokenSecret": "token"},
            {"authorization": {"credentials": {"name": "token", "key": "token"}}},
            {"authorization": {"type": "Bearer", "credentials": {"secret": {"name": "token", "key": "token"}}}},
            ["token"],
        ),
    ],
    ids=["TLS", "mutual TLS", "token"],
)
def test_monitors_have_the_tls_and_token_of_the_values(
    metrics: dict[str, Any], operators: dict[str, Any], googles: dict[str, Any], read: list[str]
) -> None:
    objects = helm.template(None, {"metrics": metrics})
    port = {"port": "metrics", "interval": "15s"}
    monitor, google = helm.monitor(objects, "PodMonitor"), helm.monitor(objects, "PodMonitoring")
    assert monitor["spec"]["podMetricsEndpoints"] == [port | operators]
    assert google["spec"]["endpoints"] == [port | googles]
    (scrape,) = helm.monitor(objects, "PodMonitor", "podscale-pipelines")["spec"]["podMetricsEndpoints"]
    assert operators.items() <= scrape.items()
    (scrape,) = helm.monitor(objects, "PodMonitoring", "podscale-pipelines")["spec"]["endpoints"]
    assert scrape == {"port": METRICS_PORT, "interval": "15s"} | googles
    crds.validate(monitor)
    (role,) = [item for item in helm.kinds(objects, "Role") if item["metadata"]["name"] == "podscale-metrics"]
    assert [rule["resourceNames"] for rule in role["rules"]] == [read]  # by Google's collectors only


@pytest.mark.parametrize("stage", ["shard", "train", "evaluate"])
def test_pods_serve_with_the_tls_and_token_of_the_values(tmp_path: Path, stage: StageName) -> None:
    """Follow the chart's values through podscale-defaults to the files that a pod's document names."""
    metrics = {"tls": {"secret": "tls", "clientSecret": "mine"}, "tokenSecret": "token"}
    document = helm.defaults(helm.template(None, {"metrics": metrics})) | {"telemetry": {"tls_certificate": "/a/file"}}
    document["telemetry"]["tls_key"] = "/of/this/machine"
    document["run"]["id"], document["data"] = "r", {"source": "digits"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(document))
    pods = pods_of(
        render_job(build_job_spec(load(tmp_path / "run.yaml"), stage), "pytorchjob" if stage == "train" else "job")
    )
    telemetry = loads(pods.environment["PODSCALE_RUN_DOCUMENT"]).telemetry
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in pods.spec["volumes"] if "secret" in volume}
    mounted = {mount["mountPath"]: secrets.get(mount["name"]) for mount in pods.container["volumeMounts"]}

    def key(path: str | None) -> tuple[str | None, str]:
        folder, _, name = (path or "").rpartition("/")
        return mounted[folder], name

    assert [key(telemetry.tls_certificate), key(telemetry.tls_key)] == [("tls", "tls.crt"), ("tls", "tls.key")]
    assert [key(telemetry.tls_client_ca), key(telemetry.bearer_token_file)] == [("tls", "ca.crt"), ("token", "token")]


def test_without_secrets_nothing_is_mounted_and_there_is_no_role() -> None:
    objects = helm.template()
    assert "podscale-metrics" not in {item["metadata"]["name"] for item in helm.kinds(objects, "Role")}
    assert not {"metrics_tls_secret", "metrics_mutual_tls", "metrics_token_secret"} & set(
        helm.defaults(objects)["launch"]["cluster"]
    )
