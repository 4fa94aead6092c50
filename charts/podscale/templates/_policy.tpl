{{/* Locks of the value `policy` as YAML with the keys of podscale/kubernetes/namespace.py; empty without locks. */}}
{{- define "podscale.policy" -}}
{{- $locked := .Values.policy -}}
{{- $locks := dict -}}
{{- with $locked.images }}{{ $_ := set $locks "images" . }}{{ end -}}
{{- with $locked.queues }}{{ $_ := set $locks "queues" . }}{{ end -}}
{{- with $locked.security }}{{ $_ := set $locks "security" . }}{{ end -}}
{{- with $locked.maxAccelerators -}}
{{- $_ := set $locks "max_accelerators" (int .) -}}
{{- $_ := set $locks "accelerator_resources" $locked.acceleratorResources -}}
{{- end -}}
{{- with $locked.maxHours }}{{ $_ := set $locks "max_hours" . }}{{ end -}}
{{- if $locks -}}
{{- $_ := set $locks "contact" (include "podscale.policyContact" .) -}}
{{- toYaml $locks -}}
{{- end -}}
{{- end -}}

{{- define "podscale.policyContact" -}}
{{- .Values.policy.contact | default (printf "the administrators of namespace %s" .Release.Namespace) -}}
{{- end -}}

{{/* Checks of the locks against the chart's other values. */}}
{{- define "podscale.policyChecks" -}}
{{- $locked := .Values.policy -}}
{{- if and $locked.admission.enabled (not (include "podscale.policy" .)) -}}
{{- fail "policy.admission.enabled is true, but policy locks nothing: set policy.images, queues, security, maxAccelerators or maxHours" -}}
{{- end -}}
{{- if and $locked.admission.enabled (not (semverCompare ">=1.30-0" .Capabilities.KubeVersion.Version)) -}}
{{- fail (printf "policy.admission.enabled is true, but Kubernetes %s has no ValidatingAdmissionPolicy v1: upgrade to 1.30 or newer, or set policy.admission.enabled=false (with `helm template`: --kube-version)" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- range $role := list "train" "launcher" "test" -}}
{{- $image := include "podscale.image" (list $ $role) -}}
{{- if and $locked.images (ne (include "podscale.policyAllowsImage" (list $locked.images $image)) "true") -}}
{{- fail (printf "policy.images does not allow %s, the image of images.%s: add its registry, or change images.registry" $image $role) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.kueue.enabled $locked.queues (not (has .Values.kueue.localQueue $locked.queues)) -}}
{{- fail (printf "policy.queues does not have %s, which is kueue.localQueue and the default of runs: add it" .Values.kueue.localQueue) -}}
{{- end -}}
{{- end -}}

{{/* "true" if a list of allowed images covers an image: (list $allowed $image). */}}
{{- define "podscale.policyAllowsImage" -}}
{{- $image := last . -}}
{{- range first . -}}
{{- if regexMatch (printf "^%s($|/|@|:[^/]*$)" (regexQuoteMeta .)) $image }}true{{ break }}{{ end -}}
{{- end -}}
{{- end -}}

{{/*
Kinds of object that the admission policies check. CEL expressions: `items` is a list of parts with a pod template each;
for a part r, `template` is its pod template and `pods` the number of its pods. `deadlines` are the time limits,
seconds; 0 is none. A TrainJob has no pod template: its runtime has it, and its pods are checked.
*/}}
{{- define "podscale.policyKinds" -}}
pod:
  group: ""
  resources: [pods, pods/ephemeralcontainers]
  items: "[object]"
  template: r
  pods: "1"
job:
  group: batch
  resources: [jobs]
  items: "[object.spec]"
  template: r.template
  pods: r.?parallelism.orValue(1)
  deadlines: "[object.spec.?activeDeadlineSeconds.orValue(0)]"
pytorchjob:
  group: kubeflow.org
  resources: [pytorchjobs]
  items: object.spec.pytorchReplicaSpecs.map(name, object.spec.pytorchReplicaSpecs[name])
  template: r.template
  pods: "[r.?replicas.orValue(1), object.spec.?elasticPolicy.?maxReplicas.orValue(0)].max()"
  deadlines: "[object.spec.?runPolicy.?activeDeadlineSeconds.orValue(0)]"
jaxjob:
  group: kubeflow.org
  resources: [jaxjobs]
  items: object.spec.jaxReplicaSpecs.map(name, object.spec.jaxReplicaSpecs[name])
  template: r.template
  pods: r.?replicas.orValue(1)
  deadlines: "[object.spec.?runPolicy.?activeDeadlineSeconds.orValue(0)]"
jobset:
  group: jobset.x-k8s.io
  resources: [jobsets]
  items: object.spec.replicatedJobs
  template: r.template.spec.template
  pods: r.?replicas.orValue(1) * r.template.spec.?parallelism.orValue(1)
  deadlines: object.spec.replicatedJobs.map(r, r.template.spec.?activeDeadlineSeconds.orValue(0))
trainjob:
  group: trainer.kubeflow.org
  resources: [trainjobs]
  deadlines: "[object.spec.?activeDeadlineSeconds.orValue(0)]"
{{- end -}}

{{/* CEL: all containers of a pod's spec: "r.template.spec". */}}
{{- define "podscale.policyContainers" -}}
({{ . }}.containers + {{ . }}.?initContainers.orValue([]) + {{ . }}.?ephemeralContainers.orValue([]))
{{- end -}}

{{/* CEL: number of accelerators in optional limits: (list $resources "c.?resources.?limits"). */}}
{{- define "podscale.policyAmount" -}}
{{ toJson (first .) }}.map(n, {{ last . }}[?n].orValue('0')).map(v, quantity(type(v) == string ? v : string(dyn(v))).asInteger()).sum()
{{- end -}}

{{/* CEL: true if the pod's spec s meets what Pod Security "restricted" requires. */}}
{{- define "podscale.policyRestricted" -}}
!s.?hostNetwork.orValue(false) && !s.?hostPID.orValue(false) && !s.?hostIPC.orValue(false) &&
s.?volumes.orValue([]).all(v, has(v.configMap) || has(v.csi) || has(v.downwardAPI) || has(v.emptyDir) ||
  has(v.ephemeral) || has(v.persistentVolumeClaim) || has(v.projected) || has(v.secret)) &&
{{ include "podscale.policyContainers" "s" }}.all(c,
  !c.?securityContext.?privileged.orValue(false) &&
  !c.?securityContext.?allowPrivilegeEscalation.orValue(true) &&
  'ALL' in c.?securityContext.?capabilities.?drop.orValue([]) &&
  c.?securityContext.?capabilities.?add.orValue([]).all(a, a == 'NET_BIND_SERVICE') &&
  c.?securityContext.?runAsNonRoot.orValue(s.?securityContext.?runAsNonRoot.orValue(false)) &&
  c.?securityContext.?runAsUser.orValue(s.?securityContext.?runAsUser.orValue(1)) != 0 &&
  c.?securityContext.?seccompProfile.?type.orValue(s.?securityContext.?seccompProfile.?type.orValue(''))
    in ['RuntimeDefault', 'Localhost'] &&
  c.?ports.orValue([]).all(p, p.?hostPort.orValue(0) == 0))
{{- end -}}

{{/* CEL: number of accelerators of an object of a kind: (list $resources $kind). */}}
{{- define "podscale.policyAccelerators" -}}
{{- $resources := first . -}}
{{- $kind := last . -}}
{{- if $kind.items -}}
{{ $kind.items }}.map(r, {{ $kind.pods }} *
  {{ include "podscale.policyContainers" (printf "%s.spec" $kind.template) }}.map(c,
    {{ include "podscale.policyAmount" (list $resources "c.?resources.?limits") }}).sum()).filter(n, n > 0).sum()
{{- else -}}
object.spec.?trainer.?numNodes.orValue(1) *
  {{ include "podscale.policyAmount" (list $resources "object.spec.?trainer.?resourcesPerNode.?limits") }}
{{- end -}}
{{- end -}}

{{/* CEL: images of an object of a kind, as a list of lists. */}}
{{- define "podscale.policyImages" -}}
{{- if .items -}}
{{ .items }}.map(r, {{ include "podscale.policyContainers" (printf "%s.spec" .template) }}.map(c, c.?image.orValue('')))
{{- else -}}
[[object.spec.?trainer.?image].filter(image, image.hasValue()).map(image, image.value())]
{{- end -}}
{{- end -}}

{{/* CEL: true if the object is of a run of Podscale: it or one of its pod templates has the label. */}}
{{- define "podscale.policyIsRun" -}}
'podscale.dev/run' in object.metadata.?labels.orValue({})
{{- if .items }} ||
{{ .items }}.exists(r, 'podscale.dev/run' in {{ .template }}.?metadata.?labels.orValue({}))
{{- end -}}
{{- end -}}
