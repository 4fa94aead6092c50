{{/* Checks that the schema cannot express. Each message: problem, reason, what to do. */}}
{{- define "podscale.checks" -}}
{{- $workspace := .Values.workspace -}}
{{- if and (eq $workspace.kind "bucket") (not $workspace.bucket) -}}
{{- fail "workspace.kind is bucket, but workspace.bucket is empty: name the bucket, such as --set workspace.bucket=my-runs" -}}
{{- end -}}
{{- if and $workspace.bucket (ne $workspace.kind "bucket") -}}
{{- fail (printf "workspace.bucket is %q, but workspace.kind is %s, which mounts no bucket: set workspace.kind=bucket, or leave workspace.bucket empty" $workspace.bucket $workspace.kind) -}}
{{- end -}}
{{- if and (eq $workspace.kind "existing") (not $workspace.name) -}}
{{- fail "workspace.kind is existing, but workspace.name is empty: name the claim, such as --set workspace.name=my-claim" -}}
{{- end -}}
{{- if and $workspace.prepare (has $workspace.kind (list "bucket" "none")) -}}
{{- fail (printf "workspace.prepare is true, but workspace.kind is %s, which has no volume with file owners: leave workspace.prepare false (for a bucket, workspace.mountOptions set who may write)" $workspace.kind) -}}
{{- end -}}
{{- range $role, $account := .Values.serviceAccounts -}}
{{- if and (not $account.create) (not $account.name) -}}
{{- fail (printf "serviceAccounts.%s.create is false, but serviceAccounts.%s.name is empty: name the account that exists" $role $role) -}}
{{- end -}}
{{- end -}}
{{- if .Values.kueue.enabled -}}
{{- include "podscale.kueueChecks" . -}}
{{- end -}}
{{- include "podscale.policyChecks" . -}}
{{- if and .Values.metrics.tls.clientSecret (not .Values.metrics.tls.secret) -}}
{{- fail "metrics.tls.clientSecret is set, but metrics.tls.secret is empty: client certificates need HTTPS; set metrics.tls.secret to the Secret with the pods' certificate" -}}
{{- end -}}
{{- range .Values.metrics.disabledAlerts -}}
{{- if not (contains (printf "alert: %s\n" .) ($.Files.Get "rules/podscale.yaml")) -}}
{{- fail (printf "metrics.disabledAlerts names %s, which is not an alert: choose from those in rules/podscale.yaml" .) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.directRun.enabled (not .Values.directRun.document) -}}
{{- fail "directRun.enabled is true, but directRun.document is empty: give the run document, such as --set-file or a values file with directRun.document.run.id" -}}
{{- end -}}
{{- if and .Values.directRun.enabled (eq $workspace.kind "none") -}}
{{- fail "directRun.enabled is true, but workspace.kind is none, so its stages share no directory: choose claim, bucket or existing" -}}
{{- end -}}
{{- end -}}

{{- define "podscale.kueueChecks" -}}
{{- /* Helm knows the kinds, such as v1/Pod, only of a cluster; `helm template` and `helm lint` have none to ask. */}}
{{- if and (.Capabilities.APIVersions.Has "v1/Pod") (not (.Capabilities.APIVersions.Has "kueue.x-k8s.io/v1beta2")) -}}
{{- fail "kueue.enabled is true, but this cluster does not serve kueue.x-k8s.io/v1beta2: install Kueue 0.15 or newer, or set kueue.enabled=false" -}}
{{- end -}}
{{- if and (not .Values.kueue.clusterQueue) (not .Values.kueue.flavors) -}}
{{- fail "kueue.enabled is true, but there is neither kueue.clusterQueue nor kueue.flavors: name an existing ClusterQueue, or list the flavors of the one to create" -}}
{{- end -}}
{{- if and .Values.kueue.clusterQueue .Values.kueue.flavors -}}
{{- fail (printf "kueue.clusterQueue is %q, so none is created, but kueue.flavors is not empty: remove one of the two" .Values.kueue.clusterQueue) -}}
{{- end -}}
{{- $names := "" -}}
{{- range .Values.kueue.flavors -}}
{{- $found := keys .quotas | sortAlpha | join ", " -}}
{{- if and $names (ne $names $found) -}}
{{- fail (printf "kueue.flavors: %s names the resources %s, the flavors before it %s; Kueue requires the same resources in all flavors: add the missing ones with quota 0" .name $found $names) -}}
{{- end -}}
{{- $names = $found -}}
{{- end -}}
{{- include "podscale.provisioningChecks" . -}}
{{- end -}}

{{- define "podscale.provisioningChecks" -}}
{{- $provisioning := .Values.kueue.provisioning -}}
{{- if not $provisioning.className -}}
{{- if or $provisioning.flavors $provisioning.managedResources $provisioning.parameters $provisioning.nodeSelector -}}
{{- fail "kueue.provisioning has options, but kueue.provisioning.className is empty, so nothing is requested: name the class, such as queued-provisioning.gke.io" -}}
{{- end -}}
{{- else -}}
{{- if and (.Capabilities.APIVersions.Has "v1/Pod") (not (.Capabilities.APIVersions.Has "autoscaling.x-k8s.io/v1")) -}}
{{- fail (printf "kueue.provisioning.className is %s, but this cluster does not serve autoscaling.x-k8s.io/v1 (ProvisioningRequest), so Kueue would admit no job: enable ProvisioningRequests in its autoscaler, or leave className empty" $provisioning.className) -}}
{{- end -}}
{{- if .Values.kueue.clusterQueue -}}
{{- fail (printf "kueue.provisioning.className is set, but kueue.clusterQueue is %q, which the chart does not change: add the AdmissionCheck to that queue, or let kueue.flavors create one" .Values.kueue.clusterQueue) -}}
{{- end -}}
{{- $known := list -}}
{{- range .Values.kueue.flavors -}}
{{- $known = append $known .name -}}
{{- end -}}
{{- range $provisioning.flavors -}}
{{- if not (has . $known) -}}
{{- fail (printf "kueue.provisioning.flavors names %s, which is none of kueue.flavors (%s): correct the name" . (join ", " $known)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
