{{/* Checks of the values of Ray, and of pods that share a volume. */}}
{{- define "trainshed.rayGuards" -}}
{{- $v := .Values }}
{{- if and (eq $v.storage.volume.accessMode "ReadWriteOnce") $v.ray.create }}
{{- $one := $v.storage.volume.singleNode }}
{{- if and (not $one) (gt (len $v.ray.workers) 1) }}
{{- fail "several groups of workers share a ReadWriteOnce volume, so all must fit on one node: set storage.volume.accessMode to ReadWriteMany (for an installed release: with existingClaim, a new claim with a copy of the data), keep one group, or set storage.volume.singleNode: true if the cluster has one node" }}
{{- end }}
{{- range $v.ray.workers }}
{{- $labels := list $v.nodeSelector $v.ray.head.nodeSelector (.nodeSelector | default dict) | uniq }}
{{- if and (not $one) (or (gt (len $labels) 1) (and .gpu (not .nodeSelector))) }}
{{- fail (printf "ray.workers %q, the head and the service share a ReadWriteOnce volume and so one node: give nodeSelector, ray.head.nodeSelector and that of the workers the same labels (of a GPU node, if the workers have GPUs), set storage.volume.singleNode: true if the cluster has one node, or set storage.volume.accessMode to ReadWriteMany" .name) }}
{{- end }}
{{- $taints := list }}
{{- range list $v.tolerations $v.ray.head.tolerations (.tolerations | default list) }}{{ $taints = append $taints (include "trainshed.tolerated" .) }}{{ end }}
{{- if gt (len (uniq $taints)) 1 }}
{{- fail (printf "ray.workers %q, the head and the service share a ReadWriteOnce volume and so one node, whose taints all must tolerate: give tolerations, ray.head.tolerations and those of the workers the same entries, or set storage.volume.accessMode to ReadWriteMany" .name) }}
{{- end }}
{{- end }}
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
{{- /* Digests of two images always differ. */}}
{{- if and $v.ray.create (not $v.ray.allowVersionSkew) (not $v.image.digest) (not $v.ray.image.digest) (ne ($v.ray.image.tag | default .Chart.AppVersion | splitList "@" | first) ($v.image.tag | default .Chart.AppVersion | splitList "@" | first)) }}
{{- fail (printf "image.tag %s and ray.image.tag %s differ: give both images the same tag, or set ray.allowVersionSkew: true (jobs wait while the versions of Trainshed in them differ)" ($v.image.tag | default .Chart.AppVersion) ($v.ray.image.tag | default .Chart.AppVersion)) }}
{{- end }}
{{- if and $v.ray.create $v.networkPolicy.enabled (not $v.networkPolicy.rayEgress) (not $v.networkPolicy.headEgress) }}
{{- range list $v.monitoring.prometheusUrl $v.monitoring.grafanaUrl }}
{{- /* Port 443 is open, but pods of a Service may have another port. */}}
{{- if and . (or (contains ".svc" .) (not (regexMatch "^https://[^/:]+(:443)?(/|$)" .))) }}
{{- fail "monitoring.prometheusUrl and grafanaUrl with network policies need a rule that lets Ray's head reach their pods: set networkPolicy.headEgress, e.g. [{ports: [{port: 9090}, {port: 3000}]}]" }}
{{- end }}
{{- end }}
{{- end }}
{{- $own := list "RAY_AUTH_TOKEN" "RAY_AUTH_MODE" "TRAINSHED_NODE_NAME" "TRAINSHED_POD_DIGEST" "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" }}
{{- range $v.ray.env }}
{{- if has .name $own }}
{{- fail (printf "ray.env has %s, which occurs twice, is set by KubeRay or the chart, or has a separate value (ray.drainSeconds)" .name) }}
{{- end }}
{{- $own = append $own .name }}
{{- end }}
{{- if and $v.ray.create (gt (len (include "trainshed.rayName" .)) 50) }}
{{- fail (printf "the RayCluster's name %s is longer than 50 letters, and KubeRay would truncate the name of its Secret: choose a shorter release name, or set fullnameOverride" (include "trainshed.rayName" .)) }}
{{- end }}
{{- if not (regexMatch "^[a-z][-a-z0-9]{0,62}$" (include "trainshed.fullname" .)) }}
{{- fail (printf "invalid Service name %s; expected a letter first, then letters, digits and dashes, at most 63: choose another release name, or set fullnameOverride" (include "trainshed.fullname" .)) }}
{{- end }}
{{- $names := list }}
{{- range $v.ray.workers }}
{{- if has .name $names }}{{ fail (printf "two groups of ray.workers are named %q: give each a unique name" .name) }}{{ end }}
{{- $names = append $names .name }}
{{- end }}
{{- /* Only if a cluster is available: rendering without one must succeed. */}}
{{- if and $v.ray.create (lookup "v1" "ServiceAccount" .Release.Namespace "default") (not (.Capabilities.APIVersions.Has "ray.io/v1/RayCluster")) }}
{{- fail "the resource RayCluster is not installed in this cluster: install KubeRay's operator first (1.6 or newer), or set ray.create: false and ray.address" }}
{{- end }}
{{- include "trainshed.plainSecrets" (dict "name" "ray.env" "env" $v.ray.env) }}
{{- include "trainshed.tmpWithinLimit" (dict "name" "ray.tmp" "tmp" $v.ray.tmp) }}
{{- include "trainshed.requestsWithinLimits" (dict "name" "ray.head.resources" "resources" $v.ray.head.resources "tmp" $v.ray.tmp) }}
{{- $head := $v.ray.head.resources.limits.memory }}
{{- if and $v.ray.create $head (lt (include "trainshed.amount" $head | float64) 1073741824.0) }}
{{- fail (printf "ray.head.resources.limits.memory %s is too small for Ray's processes, which take about 2 GiB, and 0.7 GiB for each job: set at least 1Gi" (toString $head)) }}
{{- end }}
{{- range $v.ray.workers }}
{{- if and $v.ray.create (lt (include "trainshed.amount" .memory | float64) 1073741824.0) }}
{{- fail (printf "ray.workers %q have memory %s, but a rank takes about 0.5 GB, and its standby process as well: set at least 1Gi" .name (toString .memory)) }}
{{- end }}
{{- end }}
{{- end }}
{{/* Tolerations in one order. All pods tolerate a lost node, for some seconds. */}}
{{- define "trainshed.tolerated" }}
{{- $found := list }}
{{- range . }}
{{- if not (has .key (list "node.kubernetes.io/not-ready" "node.kubernetes.io/unreachable")) }}{{ $found = append $found (toJson .) }}{{ end }}
{{- end }}
{{- sortAlpha $found | join "," }}
{{- end }}
