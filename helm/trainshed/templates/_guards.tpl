{{/* Checks of values that contradict each other, with the remedy. The schema checks each value on its own. */}}
{{- define "trainshed.guards" -}}
{{- $v := .Values }}
{{- if not $v.enabled }}
{{- fail "enabled: false is for the condition of a parent chart, which then does not render this one: to stop the service, set replicas: 0" }}
{{- end }}
{{- $postgres := not (empty $v.database.existingSecret) }}
{{- if and (gt (int $v.replicas) 1) (not $postgres) }}
{{- fail "replicas > 1 needs Postgres, because only one process can use SQLite: set database.existingSecret, or replicas: 1" }}
{{- end }}
{{- if and (eq $v.strategy "RollingUpdate") (not $postgres) }}
{{- fail "strategy RollingUpdate needs Postgres, because two pods cannot use the same home volume: set database.existingSecret, or strategy: Recreate" }}
{{- end }}
{{- if and (gt (int $v.replicas) 1) (eq $v.storage.volume.accessMode "ReadWriteOnce") (not $v.storage.volume.singleNode) }}
{{- fail "replicas > 1 with a ReadWriteOnce volume puts all replicas on one node: set storage.volume.accessMode to ReadWriteMany, or singleNode: true if the cluster has one node" }}
{{- end }}
{{- if ne (kindIs "invalid" $v.user.uid) (kindIs "invalid" $v.user.gid) }}
{{- fail "user.uid and user.gid must both be set or both be null (only if the platform assigns them, as OpenShift does)" }}
{{- end }}
{{- if and $v.monitoring.podMonitor $v.ray.create $v.networkPolicy.enabled (not $v.networkPolicy.metricsFrom) }}
{{- fail "monitoring.podMonitor with network policies needs networkPolicy.metricsFrom, or all scrapes of Ray are blocked: set it to the pods of Prometheus" }}
{{- end }}
{{- if and $v.monitoring.podMonitor (not $v.ray.create) }}
{{- fail "monitoring.podMonitor scrapes pods of the RayCluster that ray.create makes, and of no other: set podMonitor: false, and scrape that cluster yourself" }}
{{- end }}
{{- if and $v.monitoring.podMonitor $v.ray.create (eq $v.ipFamily "IPv6") }}
{{- fail "monitoring.podMonitor cannot scrape pods with IPv6 addresses only, because Ray exports its series over IPv4: set podMonitor: false, or ipFamily: dual on a dual-stack cluster" }}
{{- end }}
{{- if and $v.monitoring.serviceMonitor $v.networkPolicy.enabled $v.networkPolicy.ingressFrom (not $v.networkPolicy.metricsFrom) }}
{{- fail "monitoring.serviceMonitor with networkPolicy.ingressFrom needs networkPolicy.metricsFrom, or all scrapes of the service are blocked: set it to the pods of Prometheus" }}
{{- end }}
{{- $interval := include "trainshed.seconds" $v.monitoring.interval | float64 }}
{{- if and $interval (gt (include "trainshed.seconds" $v.monitoring.scrapeTimeout | float64) $interval) }}
{{- fail (printf "monitoring.scrapeTimeout %s exceeds interval %s, which Prometheus rejects: lower it, or raise the interval" $v.monitoring.scrapeTimeout $v.monitoring.interval) }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}
{{- fail "ingress.enabled needs ingress.host, the host name of the service for callers" }}
{{- end }}
{{- if and $v.ingress.enabled (eq $v.ingress.tls "secret") (not $v.ingress.tlsSecret) }}
{{- fail "ingress.enabled needs ingress.tlsSecret, because keys must not be sent unencrypted; set ingress.tls: controller if the ingress controller has the certificate (AWS ALB with ACM, Google-managed certificates, a default certificate)" }}
{{- end }}
{{- if and $v.ingress.enabled (eq $v.ingress.tls "controller") $v.ingress.tlsSecret }}
{{- fail "ingress.tls: controller does not use ingress.tlsSecret: set ingress.tls: secret, or leave tlsSecret empty" }}
{{- end }}
{{- if and $v.ingress.enabled (contains "/" $v.ingress.host) }}
{{- fail (printf "ingress.host %q has a path, but the service runs at the root path only: use a separate host name" $v.ingress.host) }}
{{- end }}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) }}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs, the Gateway" }}
{{- end }}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.hostnames) (not $v.allowedHosts) }}
{{- fail "httpRoute.enabled needs httpRoute.hostnames, or allowedHosts with the host names of the Gateway's listener: the service rejects requests for other hosts" }}
{{- end }}
{{- include "trainshed.tmpWithinLimit" (dict "name" "tmp" "tmp" $v.tmp) }}
{{- include "trainshed.requestsWithinLimits" (dict "name" "resources" "resources" $v.resources "tmp" $v.tmp) }}
{{- $checks := mulf ($v.settings.preflight_checks | default 4) ($v.settings.preflight_memory_bytes | default 268435456) }}
{{- if and $v.resources.limits.memory (gt (addf $checks 805306368) (include "trainshed.amount" $v.resources.limits.memory | float64)) }}
{{- fail (printf "settings.preflight_checks times preflight_memory_bytes, plus 768 MiB for the service, exceeds resources.limits.memory %s: raise the limit, or lower one of the settings" (toString $v.resources.limits.memory)) }}
{{- end }}
{{- if and $postgres $v.networkPolicy.enabled (not $v.networkPolicy.egress) }}
{{- fail "database.existingSecret with network policies needs a rule that lets the service reach it: set networkPolicy.egress, e.g. [{ports: [{port: 5432}]}], or networkPolicy.enabled: false" }}
{{- end }}
{{- include "trainshed.policyGuards" $v.networkPolicy }}
{{- $own := list "RAY_AUTH_TOKEN" "RAY_AUTH_MODE" "FORWARDED_ALLOW_IPS" }}
{{- if $postgres }}{{ $own = append $own "TRAINSHED_SECRET_KEY" }}{{ end }}
{{- range $v.env }}
{{- if or (has .name $own) (and (hasPrefix "TRAINSHED_" .name) (ne .name "TRAINSHED_SECRET_KEY")) }}
{{- fail (printf "env has %s, which occurs twice or is set by the chart: use values for settings, and each other variable once" .name) }}
{{- end }}
{{- $own = append $own .name }}
{{- end }}
{{- include "trainshed.plainSecrets" (dict "name" "env" "env" $v.env) }}
{{- range $name, $_ := $v.settings }}
{{- $variable := printf "TRAINSHED_%s" (upper $name) }}
{{- if has $variable (list "TRAINSHED_HOME" "TRAINSHED_HOST" "TRAINSHED_PORT" "TRAINSHED_ALLOWED_HOSTS" "TRAINSHED_RAY_ADDRESS" "TRAINSHED_RUNS" "TRAINSHED_STORAGE_ROOTS" "TRAINSHED_CACHE" "TRAINSHED_ADMIN_KEY_FILE" "TRAINSHED_METRICS_KEY_FILE" "TRAINSHED_DASHBOARD_URL" "TRAINSHED_DATABASE_URL" "TRAINSHED_SECRET_KEY" "TRAINSHED_SECRET_KEY_FILE" "TRAINSHED_RAY_POD_DIGESTS" "TRAINSHED_RAY_CLUSTER") }}
{{- fail (printf "settings.%s: %s is set by the chart, or is a secret: use the chart's value for it, or env with valueFrom (see values.yaml)" $name $variable) }}
{{- end }}
{{- end }}
{{- end }}
{{/* Kubernetes overcommits cpu, memory and ephemeral-storage only. */}}
{{- define "trainshed.requestsWithinLimits" }}
{{- $all := include "trainshed.resources" . | fromYaml }}
{{- range $resource, $request := $all.requests }}
{{- $limit := get $all.limits $resource }}
{{- if and (not (has $resource (list "cpu" "memory" "ephemeral-storage"))) (ne $request ($limit | toString)) }}
{{- fail (printf "%s.requests.%s %s needs an equal limit, because Kubernetes does not overcommit it: set %s.limits to the same, and leave it out of requests" $.name $resource $request $.name) }}
{{- end }}
{{- if and $limit (gt (include "trainshed.amount" $request | float64) (include "trainshed.amount" $limit | float64)) }}
{{- fail (printf "%s.requests.%s %s exceeds its limit %s: no pod could start; lower the request, or raise the limit" $.name $resource (toString $request) (toString $limit)) }}
{{- end }}
{{- end }}
{{- end }}
{{- define "trainshed.tmpWithinLimit" }}
{{- if gt (include "trainshed.amount" .tmp.request | float64) (include "trainshed.amount" .tmp.limit | float64) }}
{{- fail (printf "%s.request %s exceeds %s.limit %s: no pod could start; lower the request, or raise the limit" .name (toString .tmp.request) .name (toString .tmp.limit)) }}
{{- end }}
{{- end }}
{{- define "trainshed.plainSecrets" }}
{{- range .env }}
{{- /* $(NAME) stands for another variable, which may come from a Secret. */}}
{{- $value := regexReplaceAll "\\$\\([-._A-Za-z][-._A-Za-z0-9]*\\)" (.value | default "") "" }}
{{- $named := and $value (regexMatch "(?i)(secret|passw(or)?d|pwd|passphrase|token|(api|access|private|account|secret)_?key)$" .name) (not (regexMatch "^([0-9.]*|true|false|/.*)$" $value)) }}
{{- if or $named (regexMatch "://[^/@\\s]*:[^/@\\s]+@" $value) }}
{{- fail (printf "%s.%s has its secret in plain text, which all who can read the release see: use valueFrom with a Secret" $.name .name) }}
{{- end }}
{{- end }}
{{- end }}
{{/* Rules of NetworkPolicies that a schema cannot express. */}}
{{- define "trainshed.policyGuards" }}
{{- range $name := list "egress" "rayEgress" "headEgress" }}
{{- range get $ $name }}
{{- include "trainshed.excepted" (dict "name" $name "peers" .to) }}
{{- range .ports }}
{{- if and .endPort (lt (int .endPort) (int .port)) }}
{{- fail (printf "networkPolicy.%s: endPort %d is lower than port %d: exchange them" $name (int .endPort) (int .port)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name := list "ingressFrom" "metricsFrom" }}{{ include "trainshed.excepted" (dict "name" $name "peers" (get $ $name)) }}{{ end }}
{{- end }}
{{- define "trainshed.excepted" }}
{{- range .peers }}{{ with .ipBlock }}
{{- $whole := include "trainshed.bits" .cidr }}
{{- range $part := .except }}
{{- $bits := include "trainshed.bits" $part }}
{{- if or (ne (contains ":" $part) (contains ":" $whole)) (and (not (contains ":" $part)) (or (eq $bits $whole) (not (hasPrefix $whole $bits)))) }}
{{- fail (printf "networkPolicy.%s: except %s is not a part of cidr: name networks within it" $.name $part) }}
{{- end }}
{{- end }}
{{- end }}{{ end }}
{{- end }}
{{/* The bits of an IPv4 network, or an IPv6 network as it is. */}}
{{- define "trainshed.bits" -}}
{{- if contains ":" . }}{{ . }}{{ else }}
{{- $bits := "" }}
{{- range splitList "/" . | first | splitList "." }}{{ $bits = printf "%s%08b" $bits (int .) }}{{ end }}
{{- trunc (splitList "/" . | last | int) $bits }}
{{- end }}
{{- end }}
