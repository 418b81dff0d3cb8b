{{/* Checks of values that contradict each other, with the remedy. The schema checks each value on its own. */}}
{{- define "trainshed.guards" -}}
{{- $v := .Values }}
{{- $postgres := ne $v.database.existingSecret "" }}
{{- if and (gt (int $v.replicas) 1) (not $postgres) }}
{{- fail "replicas > 1 needs Postgres, because only one process can use SQLite: set database.existingSecret, or replicas: 1" }}
{{- end }}
{{- if and (eq $v.strategy "RollingUpdate") (not $postgres) }}
{{- fail "strategy RollingUpdate needs Postgres, because two pods cannot use the same home volume: set database.existingSecret, or strategy: Recreate" }}
{{- end }}
{{- if and (eq $v.storage.volume.accessMode "ReadWriteOnce") (gt (len $v.ray.workers) 1) $v.ray.create }}
{{- fail "several groups of workers share a ReadWriteOnce volume, so all must fit on one node: set storage.volume.accessMode to ReadWriteMany (for an installed release: with existingClaim, a new claim with a copy of the data), or keep one group" }}
{{- end }}
{{- if and (eq $v.storage.volume.accessMode "ReadWriteOnce") $v.ray.create }}
{{- range $v.ray.workers }}
{{- if or (ne (toJson (.nodeSelector | default dict)) (toJson $v.nodeSelector)) (ne (toJson $v.nodeSelector) (toJson $v.ray.head.nodeSelector)) (and .gpu (not .nodeSelector)) }}
{{- fail (printf "workers %q, the head and the service share a ReadWriteOnce volume and so one node: give nodeSelector, ray.head.nodeSelector and that of the workers the same labels (of a GPU node, if the workers have GPUs), or set storage.volume.accessMode to ReadWriteMany" .name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (gt (int $v.replicas) 1) (eq $v.storage.volume.accessMode "ReadWriteOnce") }}
{{- fail "replicas > 1 with a ReadWriteOnce volume puts all replicas on one node: set storage.volume.accessMode to ReadWriteMany" }}
{{- end }}
{{- if and $v.ray.create $v.ray.address }}
{{- fail "ray.create and ray.address are both set: leave ray.address empty, or set ray.create: false to use that cluster" }}
{{- end }}
{{- if and (not $v.ray.create) (not $v.ray.address) }}
{{- fail "no Ray cluster: set ray.create: true, or ray.address to the URL of a cluster's dashboard" }}
{{- end }}
{{- if and $v.ray.address (not $v.ray.tokenSecret) }}
{{- fail "ray.address needs ray.tokenSecret, a Secret with that cluster's token in the key auth_token: on a cluster without a token, any client can run code" }}
{{- end }}
{{- if and (not $v.ray.create) (or (not $v.storage.volume.existingClaim) (eq $v.storage.volume.accessMode "ReadWriteOnce")) }}
{{- fail "ray.create: false needs storage.volume.existingClaim with accessMode ReadWriteMany, also with storage.runs on object storage (for prepared data): that Ray cluster must have the same folder at /srv/trainshed and run as the same user" }}
{{- end }}
{{- if ne (kindIs "invalid" $v.user.uid) (kindIs "invalid" $v.user.gid) }}
{{- fail "user.uid and user.gid must both be set or both be null (only if the platform assigns them, as OpenShift does)" }}
{{- end }}
{{- if and $v.monitoring.podMonitor $v.ray.create $v.networkPolicy.enabled (not $v.networkPolicy.metricsFrom) }}
{{- fail "monitoring.podMonitor with network policies needs networkPolicy.metricsFrom, or all scrapes of Ray are blocked: set it to the pods of Prometheus" }}
{{- end }}
{{- if and $v.monitoring.serviceMonitor $v.networkPolicy.enabled $v.networkPolicy.ingressFrom (not $v.networkPolicy.metricsFrom) }}
{{- fail "monitoring.serviceMonitor with networkPolicy.ingressFrom needs networkPolicy.metricsFrom, or all scrapes of the service are blocked: set it to the pods of Prometheus" }}
{{- end }}
{{- /* Digests of two images always differ. */}}
{{- if and $v.ray.create (not $v.ray.allowVersionSkew) (ne ($v.ray.image.tag | default .Chart.AppVersion | splitList "@" | first) ($v.image.tag | default .Chart.AppVersion | splitList "@" | first)) }}
{{- fail (printf "image.tag %s and ray.image.tag %s differ: give both images the same tag, or set ray.allowVersionSkew: true (jobs wait while the versions of Trainshed in them differ)" ($v.image.tag | default .Chart.AppVersion) ($v.ray.image.tag | default .Chart.AppVersion)) }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.host) }}
{{- fail "ingress.enabled needs ingress.host, the host name of the service for callers" }}
{{- end }}
{{- if and $v.ingress.enabled (not $v.ingress.tlsSecret) }}
{{- fail "ingress.enabled needs ingress.tlsSecret: keys must not be sent unencrypted" }}
{{- end }}
{{- if and $v.ingress.enabled (contains "/" $v.ingress.host) }}
{{- fail (printf "ingress.host %q has a path, but the service runs at the root path only: use a separate host name" $v.ingress.host) }}
{{- end }}
{{- if and $v.httpRoute.enabled (or (not $v.httpRoute.parentRefs) (not $v.httpRoute.hostnames)) }}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs (the Gateway) and httpRoute.hostnames" }}
{{- end }}
{{- if and $postgres $v.networkPolicy.enabled (not $v.networkPolicy.egress) }}
{{- fail "database.existingSecret with network policies needs a rule that lets the service reach it: set networkPolicy.egress, e.g. [{ports: [{port: 5432}]}], or networkPolicy.enabled: false" }}
{{- end }}
{{- if and $v.ray.create $v.networkPolicy.enabled (not $v.networkPolicy.rayEgress) (or $v.monitoring.prometheusUrl $v.monitoring.grafanaUrl) }}
{{- fail "monitoring.prometheusUrl and grafanaUrl with network policies need a rule that lets Ray's head reach their pods: set networkPolicy.rayEgress, e.g. [{ports: [{port: 9090}, {port: 3000}]}], or [{ports: [{port: 443}]}] if they are outside the cluster" }}
{{- end }}
{{- $own := list "RAY_AUTH_TOKEN" "RAY_AUTH_MODE" "FORWARDED_ALLOW_IPS" }}
{{- if $postgres }}{{ $own = append $own "TRAINSHED_SECRET_KEY" }}{{ end }}
{{- range $v.env }}
{{- if or (has .name $own) (and (hasPrefix "TRAINSHED_" .name) (ne .name "TRAINSHED_SECRET_KEY")) }}
{{- fail (printf "env has %s, which occurs twice or is set by the chart: use values for settings, and each other variable once" .name) }}
{{- end }}
{{- $own = append $own .name }}
{{- end }}
{{- $own = list "RAY_AUTH_TOKEN" "RAY_AUTH_MODE" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" }}
{{- range $v.ray.env }}
{{- if has .name $own }}
{{- fail (printf "ray.env has %s, which occurs twice, is set by KubeRay, or has a separate value (ray.drainSeconds)" .name) }}
{{- end }}
{{- $own = append $own .name }}
{{- end }}
{{- if gt (len (include "trainshed.rayName" .)) 50 }}
{{- fail (printf "the RayCluster's name %s is longer than 50 letters, and KubeRay would truncate the name of its Secret: choose a shorter release name" (include "trainshed.rayName" .)) }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "trainshed.rayName" .)) }}
{{- fail (printf "invalid Service name %s; expected a letter first, then letters, digits and dashes: choose another release name" (include "trainshed.rayName" .)) }}
{{- end }}
{{- $names := list }}
{{- range $v.ray.workers }}
{{- if has .name $names }}{{ fail (printf "two groups of ray.workers are named %q: give each a unique name" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}
{{- range $name, $_ := $v.settings }}
{{- $variable := printf "TRAINSHED_%s" (upper $name) }}
{{- if has $variable (list "TRAINSHED_HOME" "TRAINSHED_HOST" "TRAINSHED_PORT" "TRAINSHED_ALLOWED_HOSTS" "TRAINSHED_RAY_ADDRESS" "TRAINSHED_RUNS" "TRAINSHED_STORAGE_ROOTS" "TRAINSHED_CACHE" "TRAINSHED_ADMIN_KEY_FILE" "TRAINSHED_METRICS_KEY_FILE" "TRAINSHED_DASHBOARD_URL" "TRAINSHED_DATABASE_URL" "TRAINSHED_SECRET_KEY" "TRAINSHED_SECRET_KEY_FILE") }}
{{- fail (printf "settings.%s: %s is set by the chart, or is a secret: use the chart's value for it, or env with valueFrom (see values.yaml)" $name $variable) }}
{{- end }}
{{- end }}
{{- /* Only if a cluster is available: rendering without one must succeed. */}}
{{- if and $v.ray.create (lookup "v1" "ServiceAccount" .Release.Namespace "default") (not (.Capabilities.APIVersions.Has "ray.io/v1/RayCluster")) }}
{{- fail "the resource RayCluster is not installed in this cluster: install KubeRay's operator first (1.6 or newer), or set ray.create: false and ray.address" }}
{{- end }}
{{- end }}
