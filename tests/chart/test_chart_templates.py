"""Objects of the chart: valid, restricted and protected by policies; invalid values give a readable error."""

import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from podscale.config import RunConfig, load
from podscale.kubernetes import cluster_doctor
from podscale.kubernetes.render.job import JOB_CONTAINER
from podscale.pipelines.presets import CHART_CLAIM, CHART_WORKSPACE
from tests.support import crds, helm
from tests.support.helm import EVERYTHING, GOOGLE, KUEUE, OPERATOR, PROFILES
from tests.support.rendering import rendered

BUILT_IN = {
    *("v1", "apps/v1", "batch/v1"),
    *("networking.k8s.io/v1", "rbac.authorization.k8s.io/v1", "scheduling.k8s.io/v1"),
}
VARIANTS: dict[str, tuple[Path | None, dict[str, Any]]] = {
    "default": (None, {}),
    "everything": (None, EVERYTHING),
    "bucket": (None, {"workspace": {"kind": "bucket", "bucket": "my-runs"}}),
    "existing": (None, {"workspace": {"kind": "existing", "name": "theirs"}}),
    "pools": (helm.CHART / "ci" / "gpu-h100.yaml", helm.pools_of_the_gke_page()),
    "nothing": (None, {"workspace": {"kind": "none"}, "networkPolicy": {"enabled": False}, "rbac": {"create": False}}),
    **{path.stem: (path, {}) for path in PROFILES},
}


@pytest.fixture(params=VARIANTS, scope="module")
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    profile, values = VARIANTS[request.param]
    return helm.template(profile, values)


@pytest.mark.parametrize("profile", [None, *PROFILES], ids=lambda path: path.stem if path else "default")
def test_lint(profile: Path | None) -> None:
    chosen = ("-f", profile) if profile is not None else ()
    done = helm.run("lint", "--strict", "--kube-version", helm.KUBERNETES, helm.CHART, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr


def test_built_in_objects_are_valid(objects: list[dict[str, Any]]) -> None:
    for item in objects:
        if item["apiVersion"] in BUILT_IN:
            kubernetes_validate.validate(item, "1.33", strict=True)


def test_custom_objects_are_valid(objects: list[dict[str, Any]]) -> None:
    """Validate against the definitions of Kueue and the Prometheus operator; Google's are not in a Go module."""
    for item in objects:
        if item["apiVersion"] not in BUILT_IN | {GOOGLE}:
            crds.validate(item)


def test_objects_are_labelled_and_in_the_namespace(objects: list[dict[str, Any]]) -> None:
    cluster_wide = {"PersistentVolume", "PriorityClass", "ResourceFlavor", "ClusterQueue"}
    cluster_wide |= {"AdmissionCheck", "ProvisioningRequestConfig"}
    for item in objects:
        labels = item["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "podscale"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert item["metadata"].get("namespace") == (None if item["kind"] in cluster_wide else "podscale")


def test_pods_are_restricted(objects: list[dict[str, Any]]) -> None:
    """Pod Security "restricted", a read-only root, limits, and no token except the launcher's."""
    for spec in helm.pod_specs(objects):
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] == 65532
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(
            {"emptyDir", "configMap", "persistentVolumeClaim", "projected"} & set(volume)
            for volume in spec.get("volumes", ())
        )
        assert spec["automountServiceAccountToken"] is (spec["serviceAccountName"] == "podscale-launcher")
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["limits"])


def test_defaults_are_part_of_a_run_document(objects: list[dict[str, Any]], tmp_path: Path) -> None:
    document = tmp_path / "run.yaml"
    document.write_text(yaml.safe_dump(helm.defaults(objects)), encoding="utf-8")
    config: RunConfig = load(document)
    assert config.launch.cluster.namespace == "podscale"
    assert config.launch.cluster.service_account == "podscale-trainer"


def test_defaults_name_the_objects_of_the_chart() -> None:
    defaults = helm.defaults(helm.template(None, EVERYTHING | {"defaults": {"launch": {"hardware": "nvidia-l4"}}}))
    assert defaults["run"] == {"workspace": CHART_WORKSPACE}
    assert defaults["launch"]["image"] == "registry.example/podscale/podscale-base:0.2.0"
    assert defaults["launch"]["hardware"] == "nvidia-l4"
    assert defaults["launch"]["cluster"] == {
        "namespace": "podscale",
        "service_account": "podscale-trainer",
        "workspace_claim": CHART_CLAIM,
        "image_pull_policy": "IfNotPresent",
        "image_pull_secrets": ["registry"],
        "queue": "podscale",
        "priority_class": "podscale-urgent",
        "metrics_tls_secret": "metrics-tls",
        "metrics_mutual_tls": True,
        "metrics_token_secret": "metrics-token",
    }


def test_the_users_defaults_override_those_of_the_chart() -> None:
    values = {"defaults": {"launch": {"image": "mine:1", "cluster": {"queue": "theirs"}}}}
    defaults = helm.defaults(helm.template(None, EVERYTHING | values))
    assert defaults["launch"]["image"] == "mine:1"
    assert defaults["launch"]["cluster"]["queue"] == "theirs"


def test_monitors_are_made_only_if_the_cluster_has_their_api() -> None:
    def monitors(provider: str, *apis: str) -> set[str]:
        made = helm.template(None, {"metrics": {"provider": provider}}, apis=apis)
        return {item["kind"] for item in made if item["apiVersion"].startswith("monitoring.")}

    assert monitors("auto") == set()
    assert monitors("auto", OPERATOR) == {"PodMonitor", "PrometheusRule"}
    assert monitors("auto", GOOGLE) == {"PodMonitoring", "Rules"}
    assert monitors("none", OPERATOR, GOOGLE) == set()
    assert monitors("gmp") == {"PodMonitoring", "Rules"}


def test_googles_objects_have_only_documented_fields() -> None:
    made = helm.template(apis=[GOOGLE])
    monitoring = helm.monitor(made, "PodMonitoring")
    assert set(monitoring["spec"]) == {"selector", "endpoints", "targetLabels"}
    assert monitoring["spec"]["targetLabels"] == {"fromPod": [{"from": "podscale.dev/run", "to": "podscale_dev_run"}]}
    assert monitoring["spec"]["endpoints"] == [{"port": "metrics", "interval": "15s"}]
    (rules,) = helm.kinds(made, "Rules")
    assert set(rules["spec"]) == {"groups"}


def test_releases_in_two_namespaces_share_no_name() -> None:
    """Names of cluster-scoped objects contain the release's namespace."""
    values = EVERYTHING | {"workspace": {"kind": "bucket", "bucket": "my-runs"}}
    first, second = (helm.template(None, values, namespace=name) for name in ("one", "two"))
    without = [{(item["kind"], item["metadata"]["name"]) for item in made if "namespace" not in item["metadata"]}
               for made in (first, second)]  # fmt: skip
    assert len(without[0]) == 4
    assert not without[0] & without[1]


@pytest.mark.parametrize("pipelines", [False, True])
def test_only_pods_of_kfp_mount_their_token_automatically(pipelines: bool) -> None:
    """KFP's pods cannot request a token, but its launcher and Argo's container need one."""
    made = helm.template(None, {"rbac": {"pipelinePods": pipelines}})
    mounted = {
        item["metadata"]["name"]: item["automountServiceAccountToken"] for item in helm.kinds(made, "ServiceAccount")
    }
    assert mounted == {"podscale-launcher": pipelines, "podscale-trainer": False, "podscale-uploader": False}


def test_workload_identity() -> None:
    google = "podscale-trainer@my-project.iam.gserviceaccount.com"
    made = helm.template(None, {"serviceAccounts": {"trainer": {"googleServiceAccount": google}}})
    annotations = {
        item["metadata"]["name"]: item["metadata"].get("annotations") for item in helm.kinds(made, "ServiceAccount")
    }
    assert annotations == {
        "podscale-trainer": {"iam.gke.io/gcp-service-account": google},
        "podscale-launcher": None,
        "podscale-uploader": None,
    }


def granted(role: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Return the (group, resource, object name, verb) tuples of a Role."""
    return {
        (group, resource, only, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for only in rule.get("resourceNames", [""])
        for verb in rule["verbs"]
    }


def test_the_launchers_role_has_exactly_the_needed_rights() -> None:
    """The Role has exactly the rights in the table of `podscale doctor --cluster` and the code."""
    (role,) = helm.kinds(helm.template(), "Role")
    assert granted(role) == {
        (rule.group, rule.resource, rule.only_names, verb)
        for rule in cluster_doctor.PERMISSION_RULES
        for verb in rule.verbs
    }


def test_only_launchers_are_bound_to_the_role() -> None:
    made = helm.template(None, {"rbac": {"pipelineRunner": {"serviceAccount": "pipeline-runner"}}})
    (binding,) = helm.kinds(made, "RoleBinding")
    assert [(subject["name"], subject["namespace"]) for subject in binding["subjects"]] == [
        ("podscale-launcher", "podscale"),
        ("pipeline-runner", "kubeflow"),
    ]


def pipeline_role(**values: Any) -> set[tuple[str, str, str, str]]:
    made = helm.kinds(helm.template(None, {"rbac": {"pipelinePods": True, **values}}), "Role")
    (role,) = [item for item in made if item["metadata"]["name"] == "podscale-pipeline-pods"]
    return granted(role)


def test_pods_of_pipelines_read_only_the_objects_of_kfp() -> None:
    """The names are from KFP's backend/src/v2/config/env.go."""
    rest = {
        ("", "pods", "", "get"),
        ("", "pods", "", "patch"),
        ("argoproj.io", "workflowtaskresults", "", "create"),
        ("argoproj.io", "workflowtaskresults", "", "patch"),
    }
    secret, config = ("", "secrets", "mlpipeline-minio-artifact", "get"), ("", "configmaps", "kfp-launcher", "get")
    assert pipeline_role() == rest | {secret, config}
    assert pipeline_role(pipelineSecrets=["theirs"]) == rest | {("", "secrets", "theirs", "get"), config}
    assert pipeline_role(pipelineSecrets=[], pipelineConfigMaps=[]) == rest, "no rule without names"


def test_jobs_have_the_failure_policy_of_stages() -> None:
    """Invalid input fails them at once, and evicted pods do not count. Kubernetes requires restartPolicy Never."""
    stage = rendered("job", stage="report").job["spec"]
    jobs = helm.kinds(helm.template(None, EVERYTHING), "Job")
    assert len(jobs) == 3
    for job in jobs:
        assert job["spec"]["podFailurePolicy"]["rules"] == stage["podFailurePolicy"]["rules"][:2]
        assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["name"] == JOB_CONTAINER


def test_a_changed_direct_run_is_another_job() -> None:
    def name(**changes: Any) -> str:
        run = {"enabled": True, "document": {"run": {"id": "digits"}} | changes.pop("document", {})}
        made = helm.template(None, {"directRun": run} | changes)
        return str(next(item["metadata"]["name"] for item in helm.kinds(made, "Job")))

    same = name()
    assert name() == same
    assert name(document={"train": {"epochs": 3}}) != same
    assert name(images={"tag": "other"}) != same


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"images": {"registri": "x"}}, ["/images", "registri"]),
        ({"workspace": {"kind": "disk"}}, ["/workspace/kind", "claim", "bucket"]),
        ({"workspace": {"size": "lots"}}, ["/workspace/size", "lots"]),
        ({"defaults": {"launch": {"nodes": 0}}}, ["/defaults/launch/nodes"]),
        ({"defaults": {"launch": {"hardwar": "x"}}}, ["/defaults/launch", "hardwar"]),
        ({"directRun": {"document": {"run": {"id": "No Name"}}}}, ["/directRun/document/run/id", "No Name"]),
        ({"workspace": {"kind": "bucket"}}, ["workspace.bucket="]),
        ({"workspace": {"bucket": "runs"}}, ["workspace.bucket", "workspace.kind=bucket"]),
        ({"workspace": {"kind": "existing"}}, ["workspace.name="]),
        ({"workspace": {"kind": "none", "prepare": True}}, ["workspace.kind", "workspace.prepare"]),
        ({"serviceAccounts": {"trainer": {"create": False}}}, ["serviceAccounts.trainer.name"]),
        ({"metrics": {"tls": {"clientSecret": "mine"}}}, ["metrics.tls.secret"]),
        ({"directRun": {"enabled": True}}, ["directRun.document"]),
        ({"metrics": {"disabledAlerts": ["PodscaleNone"]}}, ["metrics.disabledAlerts", "PodscaleNone"]),
        ({"metrics": {"thresholds": {"dataWaitShare": "much"}}}, ["/metrics/thresholds/dataWaitShare"]),
        ({"metrics": {"thresholds": {"dataWait": 0.3}}}, ["/metrics/thresholds", "dataWait"]),
        ({"networkPolicy": {"storage": {"cidrs": ["not-a-cidr"]}}}, ["/networkPolicy/storage/cidrs/0", "not-a-cidr"]),
        ({"networkPolicy": {"storage": {"except": ["10.0.0.0/33"]}}}, ["/networkPolicy/storage/except/0"]),
        ({"networkPolicy": {"kubernetesApi": {"cidrs": ["10.0.0.1"]}}}, ["/networkPolicy/kubernetesApi/cidrs/0"]),
        ({"networkPolicy": {"dns": {"cidrs": ["fd00::/129"]}}}, ["/networkPolicy/dns/cidrs/0"]),
        ({"networkPolicy": {"dns": {"cidrs": ["fd00::1::/64"]}}}, ["/networkPolicy/dns/cidrs/0"]),
        ({"resources": {"launcher": {"limits": {"cpu": "abc"}}}}, ["/resources/launcher/limits/cpu", "abc"]),
        ({"resources": {"test": {"limit": {"cpu": 1}}}}, ["/resources/test", "limit"]),
        ({"resourceQuota": {"pods": "ten"}}, ["/resourceQuota/pods", "ten"]),
        ({"pipeline": {"preset": "digitz"}}, ["/pipeline/preset", "'digits'"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_wrong_values_get_a_readable_message(values: dict[str, Any], texts: list[str]) -> None:
    message = helm.refused(values)
    assert all(text in message for text in texts), message


@pytest.mark.parametrize(
    "values",
    [
        {"networkPolicy": {"storage": {"cidrs": ["0.0.0.0/0", "::/0", "fd00::/8", "2001:db8:0:1::a/128"]}}},
        {"resources": {"launcher": {"limits": {"cpu": 2, "memory": "1.5Gi", "ephemeral-storage": "1e9"}}}},
        {"resourceQuota": {"requests.cpu": "1500m", "requests.nvidia.com/gpu": 0, "pods": 10}},
        {"limitRange": [{"type": "Container", "default": {"cpu": "500m"}, "max": {"memory": "1Gi"}}]},
        {"pipeline": {"preset": "goyal2017-8k"}},
    ],
    ids=lambda values: ",".join(values),
)
def test_right_values_are_accepted(values: dict[str, Any]) -> None:
    assert helm.template(None, values)


def test_a_cluster_without_kueue_refuses_a_queue() -> None:
    """Helm reports kinds, such as v1/Pod, only of a cluster."""
    values = {"kueue": {"enabled": True, "clusterQueue": "theirs"}}
    message = helm.refused(values, apis=["v1/Pod"])
    assert "kueue.x-k8s.io/v1beta2" in message
    assert "kueue.enabled=false" in message
    assert helm.template(None, values, apis=["v1/Pod", KUEUE])


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_every_profile_is_rendered_without_a_cluster(profile: Path) -> None:
    """`helm template` without --api-versions renders the queue of a profile that has one."""
    queues = helm.kinds(helm.template(profile, apis=()), "LocalQueue")
    assert bool(queues) == ("kueue" in yaml.safe_load(profile.read_text(encoding="utf-8")))


def test_wrong_queues_get_a_readable_message() -> None:
    flavors = [{"name": "a", "quotas": {"cpu": 1}}, {"name": "b", "quotas": {"memory": "1Gi"}}]
    uneven = helm.refused({"kueue": {"enabled": True, "flavors": flavors}}, apis=[KUEUE])
    assert all(text in uneven for text in ("kueue.flavors", "memory", "cpu")), uneven
    both = helm.refused({"kueue": {"enabled": True, "clusterQueue": "c", "flavors": flavors[:1]}}, apis=[KUEUE])
    assert all(text in both for text in ("kueue.clusterQueue", "kueue.flavors")), both
    neither = helm.refused({"kueue": {"enabled": True}}, apis=[KUEUE])
    assert all(text in neither for text in ("kueue.clusterQueue", "kueue.flavors")), neither


FLAVOR = {"name": "a", "quotas": {"cpu": 1}}
CLASS = "check-capacity.autoscaling.x-k8s.io"


def test_nodes_are_requested_for_the_named_flavors() -> None:
    """Both objects and the queue name each other; Kueue runs the check for the flavors in the queue's strategy."""
    made = helm.template(helm.CHART / "ci" / "gpu-h100.yaml", helm.pools_of_the_gke_page())
    (check,) = helm.kinds(made, "AdmissionCheck")
    (config,) = helm.kinds(made, "ProvisioningRequestConfig")
    (queue,) = helm.kinds(made, "ClusterQueue")
    flavors = {item["metadata"]["name"] for item in helm.kinds(made, "ResourceFlavor")}
    assert check["spec"]["parameters"]["name"] == config["metadata"]["name"]
    (rule,) = queue["spec"]["admissionChecksStrategy"]["admissionChecks"]
    assert rule["name"] == check["metadata"]["name"]
    assert set(rule["onFlavors"]) < flavors
    assert config["spec"] == {
        "provisioningClassName": "queued-provisioning.gke.io",
        "managedResources": ["nvidia.com/gpu"],
        "parameters": {"maxRunDurationSeconds": "86400"},
        "podSetUpdates": {
            "nodeSelector": [
                {
                    "key": "autoscaling.gke.io/provisioning-request",
                    "valueFromProvisioningClassDetail": "ResizeRequestName",
                }
            ]
        },
        "retryStrategy": {"backoffLimitCount": 3},
    }


def test_a_queue_without_provisioning_has_no_check() -> None:
    made = helm.template(None, {"kueue": {"enabled": True, "flavors": [FLAVOR]}})
    assert not {"AdmissionCheck", "ProvisioningRequestConfig"} & {item["kind"] for item in made}
    (queue,) = helm.kinds(made, "ClusterQueue")
    assert "admissionChecksStrategy" not in queue["spec"]


@pytest.mark.parametrize(
    ("kueue", "provisioning", "apis", "named"),
    [
        ({"flavors": [FLAVOR]}, {"flavors": ["a"]}, (), "kueue.provisioning.className"),
        ({"flavors": [FLAVOR]}, {"className": CLASS, "flavors": ["b"]}, (), "kueue.provisioning.flavors"),
        ({"clusterQueue": "theirs"}, {"className": CLASS}, (), "kueue.clusterQueue"),
        ({"flavors": [FLAVOR]}, {"className": CLASS}, ("v1/Pod", KUEUE), "autoscaling.x-k8s.io/v1"),
        ({"flavors": [FLAVOR]}, {"className": "Not A Class"}, (), "className"),
    ],
)
def test_wrong_provisioning_is_refused(
    kueue: dict[str, Any], provisioning: dict[str, Any], apis: tuple[str, ...], named: str
) -> None:
    message = helm.refused({"kueue": {"enabled": True, **kueue, "provisioning": provisioning}}, apis=apis)
    assert named in message


def release_text(values: dict[str, Any], tmp_path: Path) -> str:
    """Return the text of NOTES.txt. `helm template` omits it, so it is rendered as another template."""
    chart = shutil.copytree(helm.CHART, tmp_path / "podscale")
    text = (chart / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    page = f'{{{{ define "notes" }}}}{text}{{{{ end }}}}\ntext: {{{{ include "notes" . | quote }}}}\n'
    (chart / "templates" / "notes.yaml").write_text(page, encoding="utf-8")
    arguments = ("--kube-version", helm.KUBERNETES, "--namespace", "lab", "--show-only", "templates/notes.yaml")
    done = helm.run("template", "podscale", chart, *arguments, values=values)
    assert done.returncode == 0, done.stderr
    return str(yaml.safe_load(done.stdout)["text"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "kubectl delete pvc podscale-workspace --namespace lab"),
        ({"workspace": {"keep": False}}, "Uninstalling DELETES it"),
        ({"workspace": {"kind": "bucket", "bucket": "my-runs"}}, "gs://my-runs at /workspace"),
        ({"workspace": {"kind": "existing", "name": "theirs"}}, "claim theirs at /workspace"),
        ({"workspace": {"kind": "none"}}, "Workspace: none"),
        ({"networkPolicy": {"enabled": False}}, "every pod of the cluster can connect"),
        ({"rbac": {"pipelinePods": True}}, "--set workspace.prepare=true"),
    ],
    ids=["claim", "deleted", "bucket", "existing", "none", "open", "pipelines"],
)
def test_the_release_text_names_the_next_commands(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    text = release_text(values, tmp_path)
    assert "helm test podscale --namespace lab" in text
    assert "podscale doctor --cluster" in text
    assert "podscale submit digits --namespace lab" in text
    assert expected in text
