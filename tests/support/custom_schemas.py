"""What objects of other projects' kinds may say, as far as ours do: unknown fields are refused.

Written from the facts of their CustomResourceDefinitions, which no package ships: KubeRay's RayCluster (1.3),
LeaderWorkerSet (0.7), KEDA's ScaledObject (2.17), InferencePool of the Gateway API Inference Extension (1.0),
routes of the Gateway API (1.6).
Pod templates are those of Kubernetes, and are validated as such (`manifest_rules.schema`).
"""

from __future__ import annotations

from typing import Any

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}


def _closed(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _object(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _closed(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=_closed(["name"], name={"type": "string"}, namespace={"type": "string"}, labels=_TEXTS),
        spec=spec,
    )


_HEAD = _closed(
    ["template"],
    serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    rayStartParams=_TEXTS,
    template={"type": "object"},
)
_WORKERS = _closed(
    ["groupName", "minReplicas", "maxReplicas", "template"],
    groupName={"type": "string"},
    replicas=_COUNT,
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    rayStartParams=_TEXTS,
    template={"type": "object"},
)
_RAY_CLUSTER = _object(
    "ray.io/v1",
    "RayCluster",
    spec=_closed(
        ["headGroupSpec", "workerGroupSpecs"],
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        headGroupSpec=_HEAD,
        workerGroupSpecs={"type": "array", "items": _WORKERS, "minItems": 1},
    ),
)
_LEADER_WORKER_SET = _object(
    "leaderworkerset.x-k8s.io/v1",
    "LeaderWorkerSet",
    spec=_closed(
        ["leaderWorkerTemplate"],
        replicas=_COUNT,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=_closed(
            ["type"],
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_closed([], maxUnavailable=_COUNT, maxSurge=_COUNT),
        ),
        leaderWorkerTemplate=_closed(
            ["workerTemplate"],
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            leaderTemplate={"type": "object"},
            workerTemplate={"type": "object"},
        ),
    ),
)
_TRIGGER = _closed(
    ["type", "metadata"],
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_closed(
        ["serverAddress", "query", "threshold"],
        serverAddress={"type": "string"},
        query={"type": "string"},
        threshold={"type": "string"},
    ),
)
_BEHAVIOR = _closed([], scaleDown=_closed([], stabilizationWindowSeconds=_COUNT))
_SCALED_OBJECT = _object(
    "keda.sh/v1alpha1",
    "ScaledObject",
    spec=_closed(
        ["scaleTargetRef", "triggers"],
        scaleTargetRef=_closed(["name"], name={"type": "string"}),
        pollingInterval=_COUNT,
        minReplicaCount=_COUNT,
        maxReplicaCount=_COUNT,
        fallback=_closed(
            ["failureThreshold", "replicas"],
            failureThreshold=_COUNT,
            replicas=_COUNT,
            behavior={"const": "currentReplicas"},
        ),
        advanced=_closed([], horizontalPodAutoscalerConfig=_closed([], behavior=_BEHAVIOR)),
        triggers={"type": "array", "items": _TRIGGER, "minItems": 1},
    ),
)
_PORT = _closed(["number"], number={"type": "integer", "minimum": 1, "maximum": 65535})
_INFERENCE_POOL = _object(
    "inference.networking.k8s.io/v1",
    "InferencePool",
    spec=_closed(
        ["selector", "targetPorts", "endpointPickerRef"],
        selector=_closed(["matchLabels"], matchLabels=_TEXTS),
        targetPorts={"type": "array", "items": _PORT, "minItems": 1, "maxItems": 8},
        endpointPickerRef=_closed(
            ["name"], name={"type": "string"}, port=_PORT, failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    ),
)


def _route(kind: str, **rule: Any) -> dict[str, Any]:
    """With the fields of a rule that only this kind has."""
    name = {"name": {"type": "string"}}
    backend = _closed(
        ["name", "port"],
        **name,
        namespace={"type": "string"},
        weight=_COUNT,
        port=_PORT["properties"]["number"],
    )
    backends = {"type": "array", "items": backend, "maxItems": 16}
    parents = _closed(["name"], **name, namespace={"type": "string"}, sectionName={"type": "string"})
    rules = {"type": "array", "items": _closed([], backendRefs=backends, **rule), "maxItems": 16}
    hosts = {"type": "array", "items": {"type": "string"}, "maxItems": 16}
    parents = {"type": "array", "items": parents, "maxItems": 32}
    spec = _closed([], parentRefs=parents, hostnames=hosts, rules=rules)
    return _object("gateway.networking.k8s.io/v1", kind, spec=spec)


_METHOD = _closed(
    [], type={"enum": ["Exact", "RegularExpression"]}, service={"type": "string"}, method={"type": "string"}
)
_MATCHES = {"type": "array", "items": _closed([], method=_METHOD), "maxItems": 64}
_DURATION = {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
_TIMEOUTS = _closed([], request=_DURATION, backendRequest=_DURATION)
CUSTOM = {
    "GRPCRoute": _route("GRPCRoute", matches=_MATCHES),
    "HTTPRoute": _route("HTTPRoute", timeouts=_TIMEOUTS),
    "RayCluster": _RAY_CLUSTER,
    "LeaderWorkerSet": _LEADER_WORKER_SET,
    "ScaledObject": _SCALED_OBJECT,
    "InferencePool": _INFERENCE_POOL,
}
"""Schemas by kind."""
