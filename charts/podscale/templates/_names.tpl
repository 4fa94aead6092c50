{{/* Base name of all namespaced objects. */}}
{{- define "podscale.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/*
Base name of cluster-scoped objects: NAMESPACE.FULLNAME, or only one of them if they are equal. No other release has it,
because names of namespaces contain no dot. A longer name ends with a hash of the whole.
*/}}
{{- define "podscale.clusterName" -}}
{{- $name := include "podscale.fullname" . -}}
{{- $name = ternary $name (printf "%s.%s" .Release.Namespace $name) (eq .Release.Namespace $name) -}}
{{- if gt (len $name) 50 -}}
{{- $name = printf "%s-%s" (trunc 41 $name | trimSuffix "-" | trimSuffix ".") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Labels of all objects of the release. */}}
{{- define "podscale.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: podscale
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Labels of every Podscale pod, including pods that the chart did not create. */}}
{{- define "podscale.pods" -}}
app.kubernetes.io/name: podscale
{{- end -}}

{{/* Selector of the pods of runs, which jobs start. */}}
{{- define "podscale.ranks" -}}
matchLabels:
  {{- include "podscale.pods" . | nindent 2 }}
matchExpressions:
  - {key: podscale.dev/run, operator: Exists}
{{- end -}}

{{/* Name of a role's service account: (list $ "launcher"). */}}
{{- define "podscale.account" -}}
{{- $root := first . -}}
{{- $role := last . -}}
{{- (get $root.Values.serviceAccounts $role).name | default (printf "%s-%s" (include "podscale.fullname" $root) $role) -}}
{{- end -}}

{{- define "podscale.claim" -}}
{{- .Values.workspace.name | default (printf "%s-workspace" (include "podscale.fullname" .)) -}}
{{- end -}}

{{/* Full image reference: (list $ "train"). */}}
{{- define "podscale.image" -}}
{{- $images := (first .).Values.images -}}
{{- $name := get $images (last .) -}}
{{- if not (or (contains "@" $name) (contains ":" $name)) -}}
{{- $name = printf "%s:%s" $name ($images.tag | default (first .).Chart.AppVersion) -}}
{{- end -}}
{{- if $images.registry -}}{{ $images.registry }}/{{- end -}}
{{ $name }}
{{- end -}}
