{{/* Names. A guard rejects names that are too long for KubeRay: a truncated name could belong to another release. */}}
{{- define "trainshed.fullname" -}}
{{- if contains "trainshed" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-trainshed" .Release.Name }}{{ end }}
{{- end }}
{{- define "trainshed.rayName" -}}{{ include "trainshed.fullname" . }}-ray{{- end }}

{{/* Labels of every object; selectors always name the component, so that the service never selects a pod of Ray. */}}
{{- define "trainshed.labels" -}}
app.kubernetes.io/name: trainshed
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: trainshed
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
{{- define "trainshed.selector" -}}
app.kubernetes.io/name: trainshed
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: api
{{- end }}

{{- define "trainshed.image" -}}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{- end }}
{{- define "trainshed.rayImage" -}}{{ .Values.ray.image.repository }}:{{ .Values.ray.image.tag | default .Chart.AppVersion }}{{- end }}

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

{{/* True if all pods must share a node, because only one node can mount their volume. */}}
{{- define "trainshed.oneNode" -}}{{ if eq .Values.storage.volume.accessMode "ReadWriteOnce" }}true{{ end }}{{- end }}

{{/* Pod Security "restricted": for the pod, then for each container. */}}
{{- define "trainshed.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.user.uid }}
runAsUser: {{ int64 . }}
{{- end }}
{{- with .Values.user.gid }}
runAsGroup: {{ int64 . }}
fsGroup: {{ int64 . }}
fsGroupChangePolicy: OnRootMismatch
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}
{{- define "trainshed.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Pods that share a ReadWriteOnce volume go to the node of the first one. */}}
{{- define "trainshed.affinity" -}}
{{- if include "trainshed.oneNode" . }}
affinity:
  podAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            app.kubernetes.io/part-of: trainshed
            app.kubernetes.io/instance: {{ .Release.Name }}
            trainshed.io/storage: "true"
{{- end }}
{{- end }}

{{/* Node selector and tolerations of a pod. */}}
{{- define "trainshed.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "trainshed.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Environment from the Secret with the credentials of the storage. */}}
{{- define "trainshed.credentials" -}}
{{- with .Values.storage.credentialsSecret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end }}

{{- define "trainshed.hosts" -}}
{{- $name := include "trainshed.fullname" . }}
{{- $hosts := list $name (printf "%s.%s" $name .Release.Namespace) (printf "%s.%s.svc" $name .Release.Namespace) (printf "%s.%s.svc.cluster.local" $name .Release.Namespace) }}
{{- if .Values.ingress.enabled }}{{ $hosts = append $hosts .Values.ingress.host }}{{ end }}
{{- if .Values.httpRoute.enabled }}{{ $hosts = concat $hosts .Values.httpRoute.hostnames }}{{ end }}
{{- join "," $hosts }}
{{- end }}
