{{/* Names. A guard rejects names that are too long for KubeRay: a truncated name could belong to another release. */}}
{{- define "trainshed.fullname" -}}
{{- $name := .Values.nameOverride | default "trainshed" }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains $name .Release.Name }}{{ .Release.Name }}
{{- else }}{{ printf "%s-%s" .Release.Name $name }}{{ end }}
{{- end }}
{{- define "trainshed.rayName" -}}{{ include "trainshed.fullname" . }}-ray{{- end }}

{{/* Labels of every object; selectors always name the component, so that the service never selects a pod of Ray. */}}
{{- define "trainshed.labels" -}}
app.kubernetes.io/name: trainshed
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: trainshed
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end }}
{{- define "trainshed.selector" -}}
app.kubernetes.io/name: trainshed
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: api
{{- end }}
{{/* Labels of objects of the Prometheus operator and of dashboards, as JSON: a label of the chart cannot occur twice. */}}
{{- define "trainshed.monitoringLabels" -}}
{{- merge (deepCopy .context.Values.monitoring.labels) (include "trainshed.labels" .context | fromYaml) (.more | default dict) | toJson }}
{{- end }}

{{/* The image of a section of the values: [registry/]repository:tag, or @digest. */}}
{{- define "trainshed.imageOf" -}}
{{- $registry := .image.registry | default .context.Values.global.imageRegistry }}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end }}{{ .image.repository }}
{{- with .image.digest }}@{{ . }}{{ else }}:{{ .image.tag | default .context.Chart.AppVersion }}{{ end }}
{{- end }}
{{- define "trainshed.image" -}}{{ include "trainshed.imageOf" (dict "context" . "image" .Values.image) }}{{- end }}
{{- define "trainshed.rayImage" -}}{{ include "trainshed.imageOf" (dict "context" . "image" .Values.ray.image) }}{{- end }}

{{/* Secrets: existing ones, or the chart's. */}}
{{- define "trainshed.adminSecret" -}}{{ .Values.adminKey.existingSecret | default (printf "%s-admin" (include "trainshed.fullname" .)) }}{{- end }}
{{- define "trainshed.metricsSecret" -}}{{ .Values.metricsKey.existingSecret | default (printf "%s-metrics" (include "trainshed.fullname" .)) }}{{- end }}
{{/* KubeRay gives the Secret that it creates the name of the RayCluster. */}}
{{- define "trainshed.raySecret" -}}{{ .Values.ray.tokenSecret | default (include "trainshed.rayName" .) }}{{- end }}

{{- define "trainshed.storageClaim" -}}{{ .Values.storage.volume.existingClaim | default (printf "%s-storage" (include "trainshed.fullname" .)) }}{{- end }}
{{- define "trainshed.runs" -}}{{ .Values.storage.runs | default "file:///srv/trainshed/runs" }}{{- end }}
{{- define "trainshed.rayAddress" -}}
{{- if .Values.ray.create }}http://{{ include "trainshed.rayName" . }}-head-svc.{{ .Release.Namespace }}.svc:8265{{ else }}{{ .Values.ray.address }}{{ end }}
{{- end }}

{{/* Host names that the service accepts. */}}
{{- define "trainshed.hosts" -}}
{{- $name := include "trainshed.fullname" . }}
{{- $hosts := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) }}
{{- if .Values.ingress.enabled }}{{ $hosts = append $hosts .Values.ingress.host }}{{ end }}
{{- if .Values.httpRoute.enabled }}{{ $hosts = concat $hosts .Values.httpRoute.hostnames }}{{ end }}
{{- concat $hosts .Values.allowedHosts | join "," }}
{{- end }}
