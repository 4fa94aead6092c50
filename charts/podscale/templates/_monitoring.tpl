{{/* Selector of the tasks of Kubeflow Pipelines that run a stage in their own pod; Argo labels the pods. */}}
{{- define "podscale.tasks" -}}
matchLabels:
  {{- include "podscale.pods" . | nindent 2 }}
matchExpressions:
  - {key: workflows.argoproj.io/workflow, operator: Exists}
  - {key: app.kubernetes.io/component, operator: In, values: [shard, train, evaluate]}
{{- end -}}

{{/* TLS and credentials of a scrape, as fields of a PodMonitor. */}}
{{- define "podscale.scrape" -}}
{{- if .Values.metrics.tls.secret }}
scheme: https
tlsConfig:
  ca: {secret: {name: {{ .Values.metrics.tls.secret }}, key: ca.crt}}
  serverName: {{ .Values.metrics.tls.serverName }}
  {{- with .Values.metrics.tls.clientSecret }}
  cert: {secret: {name: {{ . }}, key: tls.crt}}
  keySecret: {name: {{ . }}, key: tls.key}
  {{- end }}
{{- end }}
{{- with .Values.metrics.tokenSecret }}
authorization:
  credentials: {name: {{ . }}, key: token}
{{- end }}
{{- end -}}

{{/* TLS and credentials of a scrape, as fields of a PodMonitoring. */}}
{{- define "podscale.googleScrape" -}}
{{- if .Values.metrics.tls.secret }}
scheme: https
tls:
  ca: {secret: {name: {{ .Values.metrics.tls.secret }}, key: ca.crt}}
  serverName: {{ .Values.metrics.tls.serverName }}
  {{- with .Values.metrics.tls.clientSecret }}
  cert: {secret: {name: {{ . }}, key: tls.crt}}
  key: {secret: {name: {{ . }}, key: tls.key}}
  {{- end }}
{{- end }}
{{- with .Values.metrics.tokenSecret }}
authorization:
  type: Bearer
  credentials: {secret: {name: {{ . }}, key: token}}
{{- end }}
{{- end -}}
