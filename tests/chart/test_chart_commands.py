"""Commands in the chart's pods: the upload hook's command runs here against a stand-in for KFP."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support import helm
from tests.support.kfp_api import kfp_api


def container(objects: list[dict[str, Any]], job: str) -> dict[str, Any]:
    (job_object,) = [item for item in helm.kinds(objects, "Job") if item["metadata"]["name"].startswith(job)]
    (only,) = job_object["spec"]["template"]["spec"]["containers"]
    return dict(only)


def podscale(arguments: list[str], mounted: Path) -> subprocess.CompletedProcess[str]:
    """Run the command of a pod, with `mounted` in place of the pod's /etc/podscale."""
    assert arguments[0] == "podscale"
    command = [argument.replace("/etc/podscale", str(mounted)) for argument in arguments[1:]]
    return subprocess.run([sys.executable, "-m", "podscale", *command], capture_output=True, text=True, check=False)


def test_the_hook_uploads_the_pipeline_of_the_namespace(tmp_path: Path) -> None:
    with kfp_api() as api:
        values = {"pipeline": {"upload": True, "host": api.url, "name": "ours"}, "images": {"train": "mine:7"}}
        rendered = helm.template(None, values)
        (tmp_path / "defaults.yaml").write_text(yaml.safe_dump(helm.defaults(rendered)), encoding="utf-8")
        pod = container(rendered, "podscale-upload")
        done = podscale([*pod["command"], *pod["args"]], tmp_path)
        assert done.returncode == 0, done.stderr
        assert [pipeline["name"] for pipeline in api.store.pipelines.values()] == ["ours"]
        (package,) = api.store.packages
        assert "mine:7" in yaml.safe_dump_all(package)
        assert "podscale-workspace" in yaml.safe_dump_all(package)


def test_a_hook_that_cannot_upload_fails_with_a_message(tmp_path: Path) -> None:
    rendered = helm.template(None, {"pipeline": {"upload": True, "host": "http://127.0.0.1:9"}})
    (tmp_path / "defaults.yaml").write_text(yaml.safe_dump(helm.defaults(rendered)), encoding="utf-8")
    pod = container(rendered, "podscale-upload")
    done = podscale([*pod["command"], *pod["args"]], tmp_path)
    assert done.returncode == 1, "exit code 2 would stop the Job's retries, but KFP may still be starting"
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_direct_run_asks_for_the_cluster(tmp_path: Path) -> None:
    """Without a cluster: the options exist, the document is read, and the error is readable."""
    rendered = helm.template(None, {"directRun": {"enabled": True, "document": {"run": {"id": "digits"}}}})
    (document,) = [item["data"]["run.yaml"] for item in helm.kinds(rendered, "ConfigMap") if "run.yaml" in item["data"]]
    (tmp_path / "run.yaml").write_text(document, encoding="utf-8")
    done = podscale([*container(rendered, "podscale-run")["command"], "--context=none-of-this-name"], tmp_path)
    assert done.returncode == 2
    assert "KUBECONFIG" in done.stderr or "none-of-this-name" in done.stderr
    assert "Traceback" not in done.stderr
