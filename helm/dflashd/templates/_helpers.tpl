{{- define "dflashd.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 46 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 46 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "dflashd.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "dflashd.labels" -}}
{{ include "dflashd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "dflashd.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end }}

{{- define "dflashd.worker" -}}
/opt/dflashd/{{ eq .Values.backend "cuda" | ternary "dflash-worker-cuda" "dflash-worker" }}
{{- end }}

{{- /* A setting as text: Helm reads every number as floating point, and would write 1048576 as 1.048576e+06. */ -}}
{{- define "dflashd.value" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- /* The leaders of the groups of other pods, as --connect wants them. */ -}}
{{- define "dflashd.leaders" -}}
{{- $workers := printf "%s-workers" (include "dflashd.name" .) -}}
{{- range $i := until (int .Values.groups.count) }}{{ if $i }},{{ end }}{{ $workers }}-{{ $i }}.{{ $workers }}.{{ $.Release.Namespace }}.svc:8502{{ end }}
{{- end }}

{{- /* What does not fit together, said before anything is made. Included by the configuration. */ -}}
{{- define "dflashd.check" -}}
{{- $v := .Values -}}
{{- if and (ne $v.mode "single") (not $v.groups.secretName) }}{{ fail "groups.secretName: modes groups and nodes need a Secret with key secret" }}{{ end }}
{{- if and (ne $v.mode "single") (ne (int $v.replicas) 1) }}{{ fail "replicas: a worker group has one coordinator; more replicas need mode single" }}{{ end }}
{{- if and (ne $v.mode "nodes") (ne (int $v.groups.hosts) 1) }}{{ fail "groups.hosts: groups over several pods need mode nodes" }}{{ end }}
{{- if ne (mod (int $v.groups.ranks) (int $v.groups.hosts)) 0 }}{{ fail "groups.ranks: must be a multiple of groups.hosts" }}{{ end }}
{{- if and (ne $v.mode "single") (ne $v.autoscaling.kind "none") }}{{ fail "autoscaling.kind: only mode single scales by itself; set groups.count" }}{{ end }}
{{- if and (eq $v.autoscaling.kind "keda") (not $v.autoscaling.prometheusAddress) }}{{ fail "autoscaling.prometheusAddress: keda asks Prometheus" }}{{ end }}
{{- if and (ne $v.service.type "ClusterIP") (not $v.auth.tokensSecret) (not $v.tls.clientCertificates) }}{{ fail "service.type: a server that can be reached from outside needs auth.tokensSecret or tls.clientCertificates" }}{{ end }}
{{- if and $v.tls.clientCertificates (not $v.tls.secretName) }}{{ fail "tls.clientCertificates: needs tls.secretName" }}{{ end }}
{{- if and (eq $v.models.source "claim") (not $v.models.claim) }}{{ fail "models.claim: name the PersistentVolumeClaim that holds the models, or choose another models.source" }}{{ end }}
{{- if and (eq $v.models.source "host") (not $v.models.hostPath) }}{{ fail "models.hostPath: name the folder" }}{{ end }}
{{- if and $v.models.download.enabled (not (has $v.models.source (list "claim" "create"))) }}{{ fail "models.download: fetches into a claim; models.source must be claim or create" }}{{ end }}
{{- if and $v.models.download.enabled (or (not $v.models.download.image) (not $v.models.download.target.repository)) }}{{ fail "models.download: needs image and target.repository" }}{{ end }}
{{- if and $v.models.download.enabled $v.model.drafter (not $v.models.download.drafter.repository) }}{{ fail "models.download.drafter.repository: a drafter is wanted" }}{{ end }}
{{- range $part := list "server" "engine" }}{{ range $key, $_ := index $v $part }}
{{- if has ($key | kebabcase) (list "model" "draft-model" "model-name" "listen" "ops-listen" "admin-listen" "connect" "group-secret-file" "tp" "groups" "backend" "drain-grace-seconds" "drain-seconds" "tls-cert" "tls-key" "tls-client-ca" "token-file" "open-metrics" "launch" "hosts" "host-index" "group-socket") }}{{ fail (printf "%s.%s: the chart sets it by itself" $part $key) }}{{ end }}
{{- end }}{{ end }}
{{- end }}

{{- /* Security of a container. */ -}}
{{- define "dflashd.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* What all pods of the chart have in their spec. */ -}}
{{- define "dflashd.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
serviceAccountName: {{ include "dflashd.name" . }}
securityContext:
  runAsNonRoot: true
  {{- with .Values.runAsUser }}
  runAsUser: {{ int . }}
  runAsGroup: {{ int . }}
  {{- end }}
  {{- with .Values.fsGroup }}
  fsGroup: {{ int . }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Nodes on which a pod may run: (dict "root" . "ranks" whether they have to be those of ranks). */ -}}
{{- define "dflashd.nodes" -}}
{{- $v := .root.Values -}}
{{- $gpu := and .ranks (eq $v.backend "cuda") -}}
{{- with $gpu | ternary (merge (deepCopy $v.nodeSelector) $v.gpu.nodeSelector) $v.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $gpu | ternary (concat $v.tolerations $v.gpu.tolerations) $v.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Where a pod may run and how pods are spread: (dict "root" . "component" ... "ranks" whether it runs ranks). */ -}}
{{- define "dflashd.placement" -}}
{{- $v := .root.Values -}}
{{- $gpu := and .ranks (eq $v.backend "cuda") -}}
{{- include "dflashd.nodes" . }}
{{- if and $gpu $v.gpu.runtimeClassName }}
runtimeClassName: {{ $v.gpu.runtimeClassName }}
{{- end }}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "dflashd.selector" $.root | nindent 8 }}
        app.kubernetes.io/component: {{ $.component }}
  {{- end }}
{{- end }}

{{- /* Resources of a container that runs `gpus` ranks. */ -}}
{{- define "dflashd.workerResources" -}}
{{- $v := .root.Values -}}
{{- $extra := dict -}}
{{- if eq $v.backend "cuda" }}{{ $_ := set $extra $v.gpu.resource (int .gpus) }}{{ end -}}
{{- if eq $v.mode "nodes" }}{{ range $name, $count := $v.network.resources }}{{ $_ := set $extra $name (int $count) }}{{ end }}{{ end -}}
requests: {{- toYaml (merge (deepCopy $extra) ($v.resources.worker.requests | default dict)) | nindent 2 }}
limits: {{- toYaml (merge (deepCopy $extra) ($v.resources.worker.limits | default dict)) | nindent 2 }}
{{- end }}

{{- define "dflashd.modelsVolume" -}}
{{- $m := .root.Values.models -}}
- name: models
  {{- if eq $m.source "host" }}
  hostPath:
    path: {{ $m.hostPath }}
    type: Directory
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ eq $m.source "claim" | ternary $m.claim (printf "%s-models" (include "dflashd.name" .root)) }}
    {{- if .readOnly }}
    readOnly: true
    {{- end }}
  {{- end }}
{{- end }}

{{- /* Waits until the download has written its marker. */ -}}
{{- define "dflashd.waitForModels" -}}
{{- $m := .Values.models -}}
{{- if $m.download.enabled }}
initContainers:
  - name: wait-for-models
    image: {{ $m.download.image }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [sh, -ec]
    args:
      - |
        for marker in "$@"; do
          until [ -e "$marker" ]; do echo "waits for $marker"; sleep 5; done
        done
      - wait-for-models
      {{- range $part := list "target" "drafter" }}
      {{- with index $.Values.model $part }}
      - {{ $m.path }}/{{ . }}/.complete-{{ (index $m.download $part).revision | default "main" }}
      {{- end }}
      {{- end }}
    securityContext: {{- include "dflashd.containerSecurity" . | nindent 6 }}
    resources:
      requests: {cpu: 10m, memory: 32Mi}
      limits: {memory: 64Mi}
    volumeMounts:
      - {name: models, mountPath: {{ $m.path }}, readOnly: true}
{{- end }}
{{- end }}

{{- /* Volumes and mounts of every container of ours: models, and a small writable /tmp for sockets. */ -}}
{{- define "dflashd.volumes" -}}
{{- if ne .Values.models.source "image" }}
{{ include "dflashd.modelsVolume" (dict "root" . "readOnly" true) }}
{{- end }}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- end }}
{{- define "dflashd.mounts" -}}
{{- if ne .Values.models.source "image" }}
- {name: models, mountPath: {{ .Values.models.path }}, readOnly: true}
{{- end }}
- {name: tmp, mountPath: /tmp}
{{- end }}
{{- define "dflashd.sharedMemory" -}}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- end }}
{{- define "dflashd.groupSecret" -}}
- name: group-secret
  secret:
    secretName: {{ .Values.groups.secretName }}
    defaultMode: 0440
    items: [{key: secret, path: secret}]
{{- end }}

{{- /* The pod of a worker group, or of one host of it. */ -}}
{{- define "dflashd.workerPod" -}}
{{- $workers := printf "%s-workers" (include "dflashd.name" .) -}}
metadata:
  labels:
    {{- include "dflashd.selector" . | nindent 4 }}
    app.kubernetes.io/component: workers
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with .Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- with include "dflashd.podSpec" . | trim }}{{ . | nindent 2 }}{{ end }}
  {{- with include "dflashd.placement" (dict "root" . "component" "workers" "ranks" true) | trim }}{{ . | nindent 2 }}{{ end }}
  # The launcher gives ranks ten seconds to end.
  terminationGracePeriodSeconds: 30
  {{- with include "dflashd.waitForModels" . | trim }}{{ . | nindent 2 }}{{ end }}
  containers:
    - name: worker
      image: {{ include "dflashd.image" . }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [{{ include "dflashd.worker" . }}]
      args:
        - --launch
        - --model={{ .Values.models.path }}/{{ .Values.model.target }}
        {{- with .Values.model.drafter }}
        - --draft-model={{ $.Values.models.path }}/{{ . }}
        {{- end }}
        - --listen=0.0.0.0:8502
        - --tp={{ int .Values.groups.ranks }}
        - --group-secret-file=/etc/dflashd/group/secret
        - --log-format={{ .Values.server.logFormat | default "json" }}
        {{- with .Values.server.logLevel }}
        - --log-level={{ . }}
        {{- end }}
        {{- if eq .Values.mode "nodes" }}
        - --hosts={{ int .Values.groups.hosts }}
        - --host-index=$(LWS_WORKER_INDEX)
        - --group-socket=tcp:$(LWS_LEADER_ADDRESS):8504
        {{- end }}
        {{- range $key, $value := .Values.engine }}
        - --{{ $key | kebabcase }}={{ include "dflashd.value" $value }}
        {{- end }}
      {{- if and (eq .Values.mode "nodes") .Values.network.env }}
      env:
        {{- range $name, $value := .Values.network.env }}
        - {name: {{ $name }}, value: {{ $value | quote }}}
        {{- end }}
      {{- end }}
      ports:
        - {name: group, containerPort: 8502}
        {{- if eq .Values.mode "nodes" }}
        - {name: ranks, containerPort: 8504}
        {{- end }}
      {{- if eq .Values.mode "groups" }}
      # The leader listens when the model is loaded. There is no liveness probe: the launcher watches its ranks, ends a group that
      # stands still and starts it again, and exits when that would not help.
      startupProbe:
        tcpSocket: {port: group}
        periodSeconds: {{ int .Values.probes.startup.periodSeconds }}
        failureThreshold: {{ int .Values.probes.startup.failureThreshold }}
        timeoutSeconds: 5
      readinessProbe:
        tcpSocket: {port: group}
        periodSeconds: {{ int .Values.probes.readiness.periodSeconds }}
        failureThreshold: {{ int .Values.probes.readiness.failureThreshold }}
        timeoutSeconds: 5
      {{- end }}
      securityContext:
        {{- if and (eq .Values.mode "nodes") .Values.network.resources }}
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
          add: [IPC_LOCK]
        {{- else }}
        {{- include "dflashd.containerSecurity" . | nindent 8 }}
        {{- end }}
      resources: {{- include "dflashd.workerResources" (dict "root" . "gpus" (div (int .Values.groups.ranks) (int .Values.groups.hosts))) | nindent 8 }}
      volumeMounts:
        {{- with include "dflashd.mounts" . | trim }}{{ . | nindent 8 }}{{ end }}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: group-secret, mountPath: /etc/dflashd/group, readOnly: true}
  volumes:
    {{- with include "dflashd.volumes" . | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with include "dflashd.sharedMemory" . | trim }}{{ . | nindent 4 }}{{ end }}
    {{- with include "dflashd.groupSecret" . | trim }}{{ . | nindent 4 }}{{ end }}
{{- end }}
