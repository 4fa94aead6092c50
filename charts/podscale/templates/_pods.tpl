{{/* Common fields of all pods that the release starts; they satisfy Pod Security "restricted". */}}
{{- define "podscale.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Retry policy of a Job with one container: the same as podscale/kubernetes/render/job.py sets for the stages. */}}
{{- define "podscale.retries" -}}
backoffLimit: 3
podFailurePolicy:
  rules:
    # Exit code 2 means invalid input. A restart cannot fix it.
    - action: FailJob
      onExitCodes: {containerName: podscale, operator: In, values: [2]}
    - action: Ignore
      onPodConditions:
        - {type: DisruptionTarget, status: "True"}
{{- end -}}

{{- define "podscale.containerSecurity" -}}
imagePullPolicy: {{ .Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}
