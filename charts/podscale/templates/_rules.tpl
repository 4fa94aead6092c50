{{/* Groups of rules/podscale.yaml with the values' thresholds, without the disabled alerts. */}}
{{- define "podscale.rules" -}}
{{- $metrics := .Values.metrics -}}
{{- $file := .Files.Get "rules/podscale.yaml" | replace "@runbooks@" (printf "%s/" (trimSuffix "/" $metrics.runbooks)) -}}
{{- range $name, $number := $metrics.thresholds -}}
{{- $file = replace (printf "@%s@" $name) (toString $number) $file -}}
{{- end -}}
{{- $groups := list -}}
{{- range $group := (fromYaml $file).groups -}}
{{- $kept := list -}}
{{- range $rule := $group.rules -}}
{{- if not (has (get $rule "alert") $metrics.disabledAlerts) -}}
{{- $kept = append $kept $rule -}}
{{- end -}}
{{- end -}}
{{- if $kept -}}
{{- $groups = append $groups (dict "name" $group.name "rules" $kept) -}}
{{- end -}}
{{- end -}}
{{- dict "groups" $groups | toYaml -}}
{{- end -}}
