{{/* Egress rules to the name servers. */}}
{{- define "podscale.toDns" -}}
{{- $policy := .Values.networkPolicy -}}
- to:
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ $policy.dns.namespace }}
      podSelector:
        matchExpressions:
          - {key: k8s-app, operator: In, values: [kube-dns, node-local-dns]}
    {{- range $policy.dns.cidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end -}}

{{/* Egress rules to object stores and the metadata server. */}}
{{- define "podscale.toStorage" -}}
{{- $policy := .Values.networkPolicy -}}
{{- with $policy.storage.cidrs }}
- to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . }}
        {{- if and $policy.storage.except (eq . "0.0.0.0/0") }}
        except:
          {{- toYaml $policy.storage.except | nindent 10 }}
        {{- end }}
    {{- end }}
  ports:
    - {protocol: TCP, port: 443}
{{- end }}
{{- if $policy.metadataServer }}
# Calico and Dataplane V2 see the metadata server at different addresses and ports.
- to:
    - ipBlock: {cidr: 169.254.169.252/32}
  ports:
    - {protocol: TCP, port: 987}
    - {protocol: TCP, port: 988}
- to:
    - ipBlock: {cidr: 169.254.169.254/32}
  ports:
    - {protocol: TCP, port: 80}
    - {protocol: TCP, port: 8080}
{{- end }}
{{- end -}}

{{/* Egress rules to the API server. */}}
{{- define "podscale.toKubernetesApi" -}}
{{- $policy := .Values.networkPolicy -}}
- to:
    {{- range $policy.kubernetesApi.cidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    {{- range $policy.kubernetesApi.ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}
