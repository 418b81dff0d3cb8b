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

{{/* True if all pods must share a node, because only one node can mount their volume. */}}
{{- define "trainshed.oneNode" -}}{{ if eq .Values.storage.volume.accessMode "ReadWriteOnce" }}true{{ end }}{{- end }}

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
            app.kubernetes.io/instance: {{ .Release.Name | quote }}
            trainshed.io/storage: "true"
{{- end }}
{{- end }}

{{/* Node selector, tolerations and scheduling gates of a pod. It leaves a lost node after nodeLossSeconds. */}}
{{- define "trainshed.placement" -}}
{{- $tolerations := .pod.tolerations | default list }}
{{- range $taint := list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable" }}
{{- $given := false }}
{{- range $.pod.tolerations }}{{ if eq (.key | default "") $taint }}{{ $given = true }}{{ end }}{{ end }}
{{- if not $given }}
{{- $tolerations = append $tolerations (dict "key" $taint "operator" "Exists" "effect" "NoExecute" "tolerationSeconds" (int64 $.context.Values.nodeLossSeconds)) }}
{{- end }}
{{- end }}
tolerations: {{ toJson $tolerations }}
{{- with .pod.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .pod.schedulingGates }}
schedulingGates: {{ toJson . }}
{{- end }}
{{- end }}

{{/* Secrets for pulls: names, or {name: NAME} as in a pod. */}}
{{- define "trainshed.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
{{- $names := list }}
{{- range . }}{{ $names = append $names (kindIs "map" . | ternary . (dict "name" .) | dig "name" "") }}{{ end }}
imagePullSecrets:
  {{- range uniq $names }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Environment from the Secret with the credentials of the storage. */}}
{{- define "trainshed.credentials" -}}
{{- with .Values.storage.credentialsSecret }}
- secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end }}

{{- define "trainshed.tmp" -}}
- name: tmp
  emptyDir: {sizeLimit: {{ include "trainshed.text" .limit | quote }}}
{{- end }}
