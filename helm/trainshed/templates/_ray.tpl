{{/*
The template of Ray's pods. KubeRay replaces the cluster if the template changes, but does not look at tolerations and
scheduling gates: a digest of the whole specification is part of the annotations, which it looks at.
*/}}
{{- define "trainshed.rayPod" }}
metadata:
  labels:
    # No version: KubeRay replaces the cluster if anything here changes.
    app.kubernetes.io/instance: {{ .context.Release.Name | quote }}
    app.kubernetes.io/part-of: trainshed
    app.kubernetes.io/component: {{ .component }}
    trainshed.io/storage: "true"
  annotations:
    trainshed.io/pod-digest: {{ include "trainshed.rayDigest" . | quote }}
    {{- if .head }}
    # Autoscalers of nodes must not end the head to save a node: all jobs would restart.
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- end }}
spec: {{- include "trainshed.raySpec" . | nindent 2 }}
{{- end }}
{{- define "trainshed.rayDigest" -}}{{ include "trainshed.raySpec" . | fromYaml | toJson | sha256sum | trunc 16 }}{{- end }}
{{- define "trainshed.raySpec" }}
{{- $context := .context }}
automountServiceAccountToken: false
enableServiceLinks: false
# The pause process reaps orphans: KubeRay's command replaces the image's init process.
shareProcessNamespace: true
{{- include "trainshed.pullSecrets" $context | nindent 0 }}
securityContext: {{- include "trainshed.podSecurity" $context | nindent 2 }}
# Ray drains a node on SIGTERM; its jobs save meanwhile, and move if there is capacity.
terminationGracePeriodSeconds: {{ add $context.Values.ray.drainSeconds 15 }}
{{- include "trainshed.placement" (dict "context" $context "pod" .pod) | nindent 0 }}
{{- include "trainshed.affinity" $context | nindent 0 }}
containers:
  - name: {{ .component }}
    image: {{ include "trainshed.rayImage" $context | quote }}
    imagePullPolicy: {{ $context.Values.ray.image.pullPolicy | quote }}
    terminationMessagePolicy: FallbackToLogsOnError
    securityContext: {{- include "trainshed.containerSecurity" $context | nindent 6 }}
    {{- if $context.Values.storage.credentialsSecret }}
    envFrom: {{- include "trainshed.credentials" $context | nindent 6 }}
    {{- end }}
    env: {{- include "trainshed.rayEnvironment" . | nindent 6 }}
    {{- if and .head $context.Values.ray.drainSeconds }}
    # A planned end of the head, e.g. by an upgrade: its jobs save and end before Ray does.
    lifecycle: {preStop: {exec: {command: [python, -m, train_loop.liveness.planned_end, --seconds, {{ int64 $context.Values.ray.drainSeconds | toString | quote }}]}}}
    {{- end }}
    ports: {{ .ports }}
    resources: {{- include "trainshed.resources" (dict "resources" .resources "tmp" $context.Values.ray.tmp) | nindent 6 }}
    volumeMounts:
      - {name: storage, mountPath: /srv/trainshed}
      - {name: tmp, mountPath: /tmp}
volumes:
  - name: storage
    persistentVolumeClaim: {claimName: {{ include "trainshed.storageClaim" $context | quote }}}
  {{- include "trainshed.tmp" $context.Values.ray.tmp | nindent 2 }}
{{- end }}

{{/* Variables of a Ray pod. A name that ray.env has takes its value there: an API server rejects a name that occurs twice. */}}
{{- define "trainshed.rayEnvironment" }}
{{- $values := .context.Values }}
{{- $interface := $values.ray.interface }}
{{- $own := dict "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" (int64 $values.ray.drainSeconds | toString) "GLOO_SOCKET_IFNAME" $interface "NCCL_SOCKET_IFNAME" $interface }}
{{- $own = merge $own (include (ternary "trainshed.headEnvironment" "trainshed.workerEnvironment" .head) .context | fromYaml) }}
{{- range $values.ray.env }}{{ $_ := unset $own .name }}{{ end }}
{{- range $name, $value := $own }}
{{- if $value }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}
# For `trainshed nodes` and `trainshed doctor`.
- {name: TRAINSHED_NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
- {name: TRAINSHED_POD_DIGEST, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['trainshed.io/pod-digest']"}}}
{{- with $values.ray.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{/* Variables of the head. A silent node is dead after 12 s; Ray's default is about one minute. */}}
{{- define "trainshed.headEnvironment" -}}
RAY_health_check_initial_delay_ms: "5000"
RAY_health_check_period_ms: "2000"
RAY_health_check_timeout_ms: "2000"
RAY_health_check_failure_threshold: "3"
RAY_PROMETHEUS_HOST: {{ .Values.monitoring.prometheusUrl | quote }}
RAY_GRAFANA_HOST: {{ .Values.monitoring.grafanaUrl | quote }}
RAY_GRAFANA_IFRAME_HOST: {{ .Values.monitoring.grafanaPublicUrl | quote }}
{{- end }}
{{/* Variables of workers. A worker exits after 15 s without an answer from its head, and its container restarts. */}}
{{- define "trainshed.workerEnvironment" -}}
RAY_gcs_rpc_server_reconnect_timeout_s: "15"
{{- end }}

{{/* Arguments of the pod template of the head, and of a group of workers. */}}
{{- define "trainshed.rayHead" -}}
{{- $ports := list }}
{{- range $name, $port := dict "gcs-server" 6379 "dashboard" 8265 "client" 10001 "metrics" 8080 "as-metrics" 44217 "dash-metrics" 44227 }}
{{- $ports = append $ports (dict "name" $name "containerPort" $port) }}
{{- end }}
{{- dict "head" true "component" "ray-head" "pod" .Values.ray.head "resources" .Values.ray.head.resources "ports" (toJson $ports) | toJson }}
{{- end }}
{{- define "trainshed.rayWorker" -}}
{{- $limits := dict "memory" .memory "cpu" .cpu }}
{{- if .gpu }}{{ $_ := set $limits "nvidia.com/gpu" (int64 .gpu) }}{{ end }}
{{- $resources := dict "requests" (dict "cpu" .cpu "memory" .memory) "limits" $limits }}
{{- $ports := list (dict "name" "metrics" "containerPort" 8080) }}
{{- dict "head" false "component" "ray-worker" "pod" . "resources" $resources "ports" (toJson $ports) | toJson }}
{{- end }}
{{- define "trainshed.rayDigests" -}}
{{- $context := . }}
{{- $found := list (include "trainshed.rayDigest" (include "trainshed.rayHead" . | fromJson | merge (dict "context" .))) }}
{{- range .Values.ray.workers }}
{{- $found = append $found (include "trainshed.rayDigest" (include "trainshed.rayWorker" . | fromJson | merge (dict "context" $context))) }}
{{- end }}
{{- $found | uniq | join "," }}
{{- end }}
