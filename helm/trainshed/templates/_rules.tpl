{{/* Groups of alert rules: those of all deployments, and those of this release. `runbook_url` needs monitoring.runbookUrl. */}}
{{- define "trainshed.ruleGroups" }}
{{- $name := include "trainshed.fullname" . }}
{{- $claims := printf "%s-home|%s" $name (include "trainshed.storageClaim" .) }}
{{- $general := required "files/alerts.yml is not in the chart" (.Files.Get "files/alerts.yml") }}
{{- $general = $general | replace ".*trainshed-(home|storage)" $claims | replace ".*trainshed-" (printf "%s-" $name) }}
{{- $own := dict "name" $name "rules" (include "trainshed.ownRules" . | fromYamlArray) }}
{{- $groups := append ($general | fromYaml).groups $own }}
{{- with .Values.monitoring.runbookUrl }}
{{- $base := trimSuffix "/" . }}
{{- range $groups }}{{ range .rules }}
{{- if .annotations.runbook }}{{ $_ := set .annotations "runbook_url" (printf "%s/%s" $base .annotations.runbook) }}{{ end }}
{{- end }}{{ end }}
{{- end }}
{{- toYaml $groups }}
{{- end }}

{{- define "trainshed.ownRules" }}
{{- $name := include "trainshed.fullname" . }}
{{- $where := printf "namespace=%q" .Release.Namespace }}
# The general rule is silent if another release reports to the same Prometheus.
- alert: TrainshedReleaseGone
  expr: {{ printf "absent(trainshed_build_info{%s, service=%q})" $where $name | quote }}
  for: 2m
  labels: {severity: critical}
  annotations:
    summary: {{ printf "Release %s in namespace %s does not report to Prometheus." .Release.Name .Release.Namespace | quote }}
    description: Check the pods of the service, and its ServiceMonitor.
    runbook: docs/operate/runbook.md#the-service-is-lost
{{- if .Values.ray.create }}
{{- $pods := 1 }}
{{- range .Values.ray.workers }}{{ $pods = add $pods (int64 .replicas) }}{{ end }}
{{- $ready := printf "kube_pod_status_ready{%s, pod=~%q, condition=\"true\"}" $where (printf "%s-.+" (include "trainshed.rayName" .)) }}
# Also of pods that a quota or a webhook refuses. Silent without kube-state-metrics.
- alert: TrainshedRayPodsMissing
  expr: {{ printf "(count(%s == 1) or vector(0)) < %d and on () count(kube_pod_status_ready) > 0" $ready $pods | quote }}
  for: 15m
  labels: {severity: warning}
  annotations:
    summary: {{ printf "Fewer than %d pods of Ray are ready in release %s." $pods .Release.Name | quote }}
    description: {{ printf "`kubectl describe raycluster %s --namespace %s` shows why." (include "trainshed.rayName" .) .Release.Namespace | quote }}
    runbook: docs/operate/runbook.md#pods-do-not-start
{{- end }}
{{- $hosts := concat (.Values.ingress.enabled | ternary (list .Values.ingress.host) list) (.Values.httpRoute.enabled | ternary .Values.httpRoute.hostnames list) }}
{{- if $hosts }}
{{- $names := list }}
{{- range $hosts }}{{ $names = append $names (regexQuoteMeta .) }}{{ end }}
{{- $found := list (printf "probe_ssl_earliest_cert_expiry{instance=~%q}" (printf "(https://)?(%s)([:/].*)?" (join "|" $names))) }}
{{- $found = append $found (printf "nginx_ingress_controller_ssl_expire_time_seconds{host=~%q}" (join "|" $names)) }}
{{- with .Values.ingress.tlsSecret }}
{{- $found = append $found (printf "certmanager_certificate_expiration_timestamp_seconds{%s, name=%q}" $where .) }}
{{- end }}
# Of blackbox exporter, ingress-nginx or cert-manager; silent without them.
- alert: TrainshedCertificateExpires
  expr: {{ printf "min by (namespace, name, instance, host) (%s) - time() < 7 * 86400" (join " or " $found) | quote }}
  for: 1h
  labels: {severity: warning}
  annotations:
    summary: {{ printf "The certificate of %s expires within a week." (join ", " $hosts) | quote }}
    description: Clients cannot reach the service afterwards.
    runbook: docs/operate/runbook.md#a-certificate-expires
{{- end }}
{{- end }}
