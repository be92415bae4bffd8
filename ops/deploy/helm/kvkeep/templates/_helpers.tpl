{{/* Values that let others in must be explicit; a schema could not explain why. */}}
{{- define "kvkeep.check" -}}
{{- $router := .Values.router.enabled -}}
{{- if not .Values.insecure -}}
{{- if not .Values.tls.enabled -}}
{{- fail "tls.enabled=false lets every pod of the cluster's network read along: allow it with insecure=true" -}}
{{- end -}}
{{- range $part := $router | ternary (list "scheduler" "router") (list "scheduler") -}}
{{- if not (or $.Values.tokens.enabled (index $.Values $part).settings.KVKEEP_TLS_CLIENT_CA_FILE) -}}
{{- fail (printf "tokens.enabled=false lets every pod that reaches a %s call it: allow it with insecure=true, or ask for %s%s%s"
  $part "certificates, " $part ".settings.KVKEEP_TLS_CLIENT_CA_FILE=/run/secrets/tls/ca.crt") -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.redis.bundled) (regexMatch "^redis(\\+cluster)?:" .Values.redis.url) -}}
{{- fail "redis.url leads to Redis without TLS: write rediss:// or rediss+cluster://, or allow it with insecure=true" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.cachemgr.zmqEvents (not .Values.insecure) -}}
{{- fail "cachemgr.zmqEvents=true sends events without TLS and tokens to all that reach their ports: allow it with insecure=true" -}}
{{- end -}}
{{- if gt (int .Values.router.minReplicas) (int .Values.router.maxReplicas) -}}
{{- fail "router.minReplicas must be at most router.maxReplicas" -}}
{{- end -}}
{{- end -}}

{{- define "kvkeep.name" -}}
{{- printf "%s-%s" .Release.Name (.Values.nameOverride | default "kvkeep") | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/*
Below, a part is (dict "top" $ "part" "cachemgr"). Parts of which there are pods: cachemgr, engine, router, redis, test.
Of the containers in them, each is named for its process, and its values, too; the engine's are scheduler and executor.
*/}}
{{- define "kvkeep.fullname" -}}
{{ include "kvkeep.name" .top }}-{{ .part }}
{{- end -}}

{{/* A name below which each pod has its own name. gRPC takes a certificate for *.NAME only if NAME has a dot. */}}
{{- define "kvkeep.domain" -}}
{{ include "kvkeep.fullname" . }}.{{ .top.Release.Namespace }}.svc
{{- end -}}

{{/* All labels of pods: the chart's version as a label would restart the pods with each version. */}}
{{- define "kvkeep.selector" -}}
app.kubernetes.io/name: kvkeep
app.kubernetes.io/instance: {{ .top.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "kvkeep.labels" -}}
{{ include "kvkeep.selector" . }}
app.kubernetes.io/version: {{ .top.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .top.Release.Service }}
helm.sh/chart: {{ .top.Chart.Name }}-{{ .top.Chart.Version }}
{{- end -}}

{{- define "kvkeep.image" -}}
{{- $images := .top.Values.image -}}
{{- $image := index $images .image -}}
{{- with $image.registry | default $images.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ $image.tag | default $images.tag | default .top.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The beginning of a container, which may do nothing but compute. */}}
{{- define "kvkeep.container" -}}
image: {{ include "kvkeep.image" . }}
imagePullPolicy: {{ .top.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* `place` has the nodeSelector and tolerations from the values. */}}
{{- define "kvkeep.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Otherwise a new pod lets the group write to all folders of a volume, which the executor refuses.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .top.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with .place }}
{{- $place := index $.top.Values . }}
{{- with $place.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $place.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "kvkeep.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A process that waits for others is live, but not ready. Kubernetes' own probe of gRPC does not support TLS. */}}
{{- define "kvkeep.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .top.Values.tls.enabled -}}
startupProbe:
  httpGet: {path: /live, port: {{ .metrics }}, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ .starts }}
livenessProbe:
  httpGet: {path: /live, port: {{ .metrics }}, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
{{- if .top.Values.tls.enabled }}
  httpGet: {path: /health, port: {{ .metrics }}, scheme: HTTPS}
{{- else }}
  grpc: {port: {{ .port }}}
{{- end }}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{/* Load balancers send requests to a pod for some seconds after it was told to end: until then it serves. */}}
{{- define "kvkeep.leave" -}}
lifecycle:
  preStop:
    exec: {command: [sleep, "{{ include "kvkeep.leaveSeconds" . }}"]}
{{- end -}}
{{- define "kvkeep.leaveSeconds" -}}5{{- end -}}

{{/* Whose token a process shows. The cache manager calls nobody; kvctl is in the same container. */}}
{{- define "kvkeep.role" -}}
{{ ternary "operator" .part (eq .part "cachemgr") }}
{{- end -}}

{{- define "kvkeep.environment" -}}
{{- $top := .top -}}
{{- $part := index $top.Values .part -}}
{{- if $top.Values.insecure }}
- {name: KVKEEP_INSECURE, value: "1"}
{{- end }}
{{- if $top.Values.tls.enabled }}
- {name: KVKEEP_TLS_CERT_FILE, value: /run/secrets/tls/tls.crt}
- {name: KVKEEP_TLS_KEY_FILE, value: /run/secrets/tls/tls.key}
- {name: KVKEEP_TLS_CA_FILE, value: /run/secrets/tls/ca.crt}
{{- /* Callers have tokens and no certificates. */}}
{{- if not (has .part (list "scheduler" "router")) }}
- {name: KVKEEP_TLS_CLIENT_CA_FILE, value: /run/secrets/tls/ca.crt}
{{- end }}
{{- end }}
{{- if $top.Values.tokens.enabled }}
- {name: KVKEEP_TOKENS_FILE, value: /run/secrets/tokens/tokens}
- {name: KVKEEP_TOKEN_FILE, value: /run/secrets/tokens/{{ include "kvkeep.role" . }}.token}
{{- end }}
{{- range $name, $value := $part.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- range $part.extraEnv }}
- {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "kvkeep.envFrom" -}}
{{- with (index .top.Values .part).envFrom }}
envFrom: {{ toJson . }}
{{- end }}
{{- end -}}

{{- define "kvkeep.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .top.Values.tls.enabled }}
- {name: tls, mountPath: /run/secrets/tls, readOnly: true}
{{- end }}
{{- if .top.Values.tokens.enabled }}
- {name: {{ include "kvkeep.role" . }}-tokens, mountPath: /run/secrets/tokens, readOnly: true}
{{- end }}
{{- end -}}

{{/* Volumes of a pod; `processes` are its processes that show tokens and ask for tokens. */}}
{{- define "kvkeep.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .top.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "kvkeep.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- if .top.Values.tokens.enabled }}
{{- range .processes }}
{{- $role := include "kvkeep.role" (dict "part" .) }}
- name: {{ $role }}-tokens
  secret:
    secretName: {{ include "kvkeep.tokensSecret" $.top }}
    defaultMode: 0440
    items:
      - {key: tokens, path: tokens}
      - {key: {{ $role }}.token, path: {{ $role }}.token}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvkeep.tlsSecret" -}}
{{ index .top.Values.tls.secrets .part | default (printf "%s-tls" (include "kvkeep.fullname" .)) }}
{{- end -}}

{{- define "kvkeep.tokensSecret" -}}
{{ .Values.tokens.secret | default (printf "%s-tokens" (include "kvkeep.name" .)) }}
{{- end -}}

{{/* The first ports of a cache manager's ZeroMQ events and replays: engine n of its shard adds n to each. */}}
{{- define "kvkeep.zmqPorts" -}}
events: 5557
replays: 6557
{{- end -}}

{{/* How many engines the largest shard has. */}}
{{- define "kvkeep.mostEngines" -}}
{{- $most := 0 -}}
{{- range .Values.shards }}{{- $most = max $most (int .) }}{{- end -}}
{{- $most -}}
{{- end -}}

{{/* The component that callers reach. */}}
{{- define "kvkeep.front" -}}
{{ ternary "router" "engine" .Values.router.enabled }}
{{- end -}}

{{/* Each engine by its own name: one name for all engines would resolve to addresses, which no certificate has. */}}
{{- define "kvkeep.engines" -}}
{{- $it := dict "top" $ "part" "engine" -}}
{{- $engines := list -}}
{{- range $shard, $count := .Values.shards -}}
{{- range $number := until (int $count) -}}
{{- $name := printf "%s-%d-%d.%s" (include "kvkeep.fullname" $it) $shard $number (include "kvkeep.domain" $it) -}}
{{- $engines = append $engines (printf "%s:50051" $name) -}}
{{- end -}}
{{- end -}}
{{- join "," $engines -}}
{{- end -}}

{{- define "kvkeep.redisSecret" -}}
{{ .Values.redis.passwordSecret | default (include "kvkeep.fullname" (dict "top" . "part" "redis")) }}
{{- end -}}

{{/* Variables of a process that talks to Redis. */}}
{{- define "kvkeep.redis" -}}
{{- if or .Values.redis.bundled .Values.redis.passwordSecret }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "kvkeep.redisSecret" $ }}, key: password}
{{- end }}
- name: KVKEEP_REDIS_URL
  {{- if .Values.redis.bundled }}
  value: {{ include "kvkeep.redisUrl" $ }}
  {{- else if .Values.redis.urlSecret }}
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.urlSecret }}, key: url}
  {{- else }}
  value: {{ .Values.redis.url }}
  {{- end }}
{{- end -}}

{{- define "kvkeep.redisUrl" -}}
{{- $place := printf ":$(REDIS_PASSWORD)@%s:6379" (include "kvkeep.fullname" (dict "top" . "part" "redis")) -}}
{{- if .Values.tls.enabled -}}
{{- $tls := "/run/secrets/tls" -}}
rediss://{{ $place }}?ssl_ca_certs={{ $tls }}/ca.crt&ssl_certfile={{ $tls }}/tls.crt&ssl_keyfile={{ $tls }}/tls.key
{{- else -}}
redis://{{ $place }}
{{- end -}}
{{- end -}}

{{- define "kvkeep.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests: {storage: {{ .size }}}
{{- end -}}
