{{/* What lets others in must be said; a schema could not tell why. */}}
{{- define "kvkeep.check" -}}
{{- if not .Values.insecure -}}
{{- if not .Values.tls.enabled -}}
{{- fail "tls.enabled=false lets whoever is in the cluster's network read along: allow it with insecure=true" -}}
{{- end -}}
{{- if not (or .Values.tokens.enabled .Values.scheduler.settings.KVKEEP_TLS_CLIENT_CA_FILE) -}}
{{- fail (print "tokens.enabled=false lets whoever reaches the schedulers call them: allow it with insecure=true, or ask "
  "for certificates, scheduler.settings.KVKEEP_TLS_CLIENT_CA_FILE=/run/secrets/tls/ca.crt") -}}
{{- end -}}
{{- if and (not .Values.redis.bundled) (regexMatch "^redis(\\+cluster)?:" .Values.redis.url) -}}
{{- fail "redis.url leads to Redis without TLS: write rediss:// or rediss+cluster://, or allow it with insecure=true" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvkeep.name" -}}
{{- printf "%s-%s" .Release.Name (.Values.nameOverride | default "kvkeep") | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Below, a part is (dict "top" $ "part" "cachemgr"). */}}
{{- define "kvkeep.fullname" -}}
{{ include "kvkeep.name" .top }}-{{ .part }}
{{- end -}}

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
{{ index .top.Values.image.repositories .part }}:{{ .top.Values.image.tag | default .top.Chart.AppVersion }}
{{- end -}}

{{/* What a pod of ours may do: nothing but compute. */}}
{{- define "kvkeep.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .top.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with index .top.Values .part }}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvkeep.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Kubernetes' own probes know no gRPC with TLS. A process that waits for others lives, and is not ready. */}}
{{- define "kvkeep.probes" -}}
startupProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 5
  failureThreshold: {{ .starts }}
livenessProbe:
  tcpSocket: {port: {{ .port }}}
  periodSeconds: 10
readinessProbe:
{{- if .top.Values.tls.enabled }}
  exec: {command: [python, -m, protos.rpc.probe, {{ .part }}]}
{{- else }}
  grpc: {port: {{ .port }}}
{{- end }}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{/* Whose token a pod shows. The cache manager calls nobody; kvctl is beside it. */}}
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
{{- if ne .part "scheduler" }}
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
{{- if and .top.Values.tokens.enabled (ne .part "redis") }}
- {name: tokens, mountPath: /run/secrets/tokens, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvkeep.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .top.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ index .top.Values.tls.secrets .part | default (printf "%s-tls" (include "kvkeep.fullname" .)) }}
    defaultMode: 0440
{{- end }}
{{- if and .top.Values.tokens.enabled (ne .part "redis") }}
- name: tokens
  secret:
    secretName: {{ .top.Values.tokens.secret | default (printf "%s-tokens" (include "kvkeep.name" .top)) }}
    defaultMode: 0440
    items:
      - {key: tokens, path: tokens}
      - {key: {{ include "kvkeep.role" . }}.token, path: {{ include "kvkeep.role" . }}.token}
{{- end }}
{{- end -}}

{{- define "kvkeep.redisSecret" -}}
{{ .Values.redis.passwordSecret | default (include "kvkeep.fullname" (dict "top" . "part" "redis")) }}
{{- end -}}

{{- define "kvkeep.redisUrl" -}}
{{- $place := printf ":$(REDIS_PASSWORD)@%s:6379/0" (include "kvkeep.fullname" (dict "top" . "part" "redis")) -}}
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
