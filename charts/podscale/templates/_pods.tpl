{{/* What every pod that the release starts has in common; it satisfies Pod Security "restricted". */}}
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

{{/* When a Job of one container gives up: as podscale/kubernetes/render/job.py has it for the stages. */}}
{{- define "podscale.retries" -}}
backoffLimit: 3
podFailurePolicy:
  rules:
    # Exit code 2 is bad input, which a restart cannot change.
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
