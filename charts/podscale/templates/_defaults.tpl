{{/* Partial run document of the namespace: the chart's own settings, overridden by the value `defaults`. */}}
{{- define "podscale.defaults" -}}
{{- $cluster := dict "namespace" .Release.Namespace "service_account" (include "podscale.account" (list . "trainer")) "image_pull_policy" .Values.images.pullPolicy -}}
{{- with .Values.images.pullSecrets }}{{ $_ := set $cluster "image_pull_secrets" . }}{{ end -}}
{{- with .Values.metrics.tls.secret }}{{ $_ := set $cluster "metrics_tls_secret" . }}{{ end -}}
{{- if .Values.metrics.tls.clientSecret }}{{ $_ := set $cluster "metrics_mutual_tls" true }}{{ end -}}
{{- with .Values.metrics.tokenSecret }}{{ $_ := set $cluster "metrics_token_secret" . }}{{ end -}}
{{- with .Values.policy.queues }}{{ $_ := set $cluster "queue" (first .) }}{{ end -}}
{{- if .Values.kueue.enabled }}{{ $_ := set $cluster "queue" .Values.kueue.localQueue }}{{ end -}}
{{- with .Values.priorityClasses }}{{ $_ := set $cluster "priority_class" (printf "%s-%s" (include "podscale.clusterName" $) (first .).name) }}{{ end -}}
{{- $document := dict "launch" (dict "image" (include "podscale.image" (list . "train")) "launcher_image" (include "podscale.image" (list . "launcher")) "cluster" $cluster) -}}
{{- with .Values.policy.maxHours }}{{ $_ := set $document.launch "time_limit_hours" (minf 168 .) }}{{ end -}}
{{- if ne .Values.workspace.kind "none" -}}
{{- $_ := set $cluster "workspace_claim" (include "podscale.claim" .) -}}
{{- $_ := set $document "run" (dict "workspace" .Values.workspace.path) -}}
{{- end -}}
{{- if eq .Values.workspace.kind "bucket" }}{{ $_ := set $cluster "annotations" (dict "gke-gcsfuse/volumes" "true") }}{{ end -}}
{{- mergeOverwrite $document (deepCopy .Values.defaults) | toYaml -}}
{{- end -}}
