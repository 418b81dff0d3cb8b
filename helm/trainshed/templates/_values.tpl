{{/*
Drop null values, and fill missing ones with those of values.yaml, in place: `null` removes a default, and
`--reuse-values` of an older release lacks new ones. Every template includes this first, because Helm renders templates in no promised order.
*/}}
{{- define "trainshed.values" }}
{{- if not (hasKey .Values "_filled") }}
{{- $defaults := required "files/values.yaml is not in the chart" (.Files.Get "files/values.yaml") | fromYaml }}
{{- include "trainshed.prune" .Values }}
{{- include "trainshed.fill" (dict "values" .Values "defaults" $defaults) }}
{{- $_ := set .Values "_filled" true }}
{{- end }}
{{- end }}
{{- define "trainshed.prune" }}
{{- range $name, $value := . }}
{{- if and (kindIs "invalid" $value) (kindIs "map" $) }}{{ $_ := unset $ $name }}
{{- else if or (kindIs "map" $value) (kindIs "slice" $value) }}{{ include "trainshed.prune" $value }}{{ end }}
{{- end }}
{{- end }}
{{- define "trainshed.fill" }}
{{- range $name, $default := .defaults }}
{{- if not (hasKey $.values $name) }}{{ $_ := set $.values $name $default }}{{ end }}
{{- /* null as uid and gid means that the platform assigns them. */}}
{{- if and (kindIs "map" $default) (ne $name "user") }}
{{- include "trainshed.fill" (dict "values" (get $.values $name) "defaults" $default) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A value as text: a map as JSON, a list with commas. Helm reads numbers as floats, and would write an exponent. */}}
{{- define "trainshed.text" -}}
{{- if kindIs "map" . }}{{ toJson . }}
{{- else if kindIs "slice" . }}{{ join "," . }}
{{- else if not (kindIs "float64" .) }}{{ toString . }}
{{- else if eq (floor .) . }}{{ int64 . }}
{{- else }}{{ regexReplaceAll "0+$" (printf "%.9f" .) "" }}{{ end }}
{{- end }}

{{/* A Kubernetes quantity as a number of units. */}}
{{- define "trainshed.amount" -}}
{{- $text := include "trainshed.text" . }}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 }}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (get $units (regexFind "[A-Za-z]*$" $text)) }}
{{- end }}

{{/* A duration of Prometheus, such as 1m30s, in seconds. */}}
{{- define "trainshed.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 "w" 604800.0 "y" 31536000.0 }}
{{- $total := 0.0 }}
{{- range regexFindAll "[0-9]+[a-z]+" . -1 }}
{{- $total = addf $total (mulf (regexFind "[0-9]+" .) (get $units (regexFind "[a-z]+" .))) }}
{{- end }}
{{- $total }}
{{- end }}

{{/* Requests and limits as text: KubeRay's definition does not accept fractions. `.tmp` bounds the volume /tmp. */}}
{{- define "trainshed.resources" -}}
{{- $own := dict "requests" .tmp.request "limits" .tmp.limit }}
{{- range $kind := list "requests" "limits" }}
{{ $kind }}:
  {{- $amounts := merge (dict) (get $.resources $kind) (dict "ephemeral-storage" (get $own $kind)) }}
  {{- range $name, $amount := $amounts }}
  {{ $name | quote }}: {{ include "trainshed.text" $amount | quote }}
  {{- end }}
{{- end }}
{{- end }}
