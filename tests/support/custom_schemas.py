"""What objects of other projects' kinds may say, as far as ours do: unknown fields are refused.

Written from the facts of their CustomResourceDefinitions, which no package ships: KubeRay's RayCluster (1.3),
LeaderWorkerSet (0.7), KEDA's ScaledObject (2.17), InferencePool of the Gateway API Inference Extension (1.0),
routes of the Gateway API (1.6).
Pod templates are those of Kubernetes, and are validated as such (`manifest_rules.schema`).
"""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "texts": {"type": "object", "additionalProperties": {"type": "string"}},
    "bool": {"type": "boolean"},
    "count": {"type": "integer", "minimum": 0},
    "size": {"type": "integer", "minimum": 1},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "duration": {"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"},
    "template": {"type": "object"},
}


def _schema(shape: Any) -> dict[str, Any]:
    """Of a type by name; a tuple, of which one is said; a list of an entry, and how many there may be; or an
    object, whose names with an exclamation mark are required."""
    match shape:
        case str():
            return _TYPES[shape]
        case tuple():
            return {"enum": [*shape]}
        case [entry, least, most]:
            return {"type": "array", "items": _schema(entry), "minItems": least, "maxItems": most}
    return {
        "type": "object",
        "properties": {name.rstrip("!"): _schema(inner) for name, inner in shape.items()},
        "required": [name.rstrip("!") for name in shape if name.endswith("!")],
        "additionalProperties": False,
    }


_RAY_GROUP = {"rayStartParams": "texts", "template!": "template"}
_RAY_WORKERS = {"groupName!": "text", "replicas": "count", "minReplicas!": "count", "maxReplicas!": "count"}
_TRIGGER = {
    "type!": ("prometheus",),
    "metricType": ("AverageValue", "Value"),
    "metadata!": {"serverAddress!": "text", "query!": "text", "threshold!": "text"},
}
_METHOD = {"type": ("Exact", "RegularExpression"), "service": "text", "method": "text"}


def _route(**rule: Any) -> tuple[str, dict[str, Any]]:
    """With the fields of a rule that only this kind has."""
    backend = {"name!": "text", "namespace": "text", "weight": "count", "port!": "port"}
    parent = {"name!": "text", "namespace": "text", "sectionName": "text"}
    rules = {"backendRefs": [backend, 0, 16], **rule}
    spec = {"parentRefs": [parent, 0, 32], "hostnames": ["text", 0, 16], "rules": [rules, 0, 16]}
    return "gateway.networking.k8s.io/v1", spec


#: Kind → version of its API, and `spec`.
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "GRPCRoute": _route(matches=[{"method": _METHOD}, 0, 64]),
    "HTTPRoute": _route(timeouts={"request": "duration", "backendRequest": "duration"}),
    "RayCluster": (
        "ray.io/v1",
        {
            "rayVersion": "text",
            "enableInTreeAutoscaling": "bool",
            "headGroupSpec!": _RAY_GROUP | {"serviceType": ("ClusterIP", "NodePort", "LoadBalancer")},
            "workerGroupSpecs!": [_RAY_GROUP | _RAY_WORKERS, 1, 64],
        },
    ),
    "LeaderWorkerSet": (
        "leaderworkerset.x-k8s.io/v1",
        {
            "replicas": "count",
            "startupPolicy": ("LeaderCreated", "LeaderReady"),
            "rolloutStrategy": {
                "type!": ("RollingUpdate",),
                "rollingUpdateConfiguration": {"maxUnavailable": "count", "maxSurge": "count"},
            },
            "leaderWorkerTemplate!": {
                "size": "size",
                "restartPolicy": ("RecreateGroupOnPodRestart", "None"),
                "leaderTemplate": "template",
                "workerTemplate!": "template",
            },
        },
    ),
    "ScaledObject": (
        "keda.sh/v1alpha1",
        {
            "scaleTargetRef!": {"name!": "text"},
            "pollingInterval": "count",
            "minReplicaCount": "count",
            "maxReplicaCount": "count",
            "fallback": {
                "failureThreshold!": "count",
                "replicas!": "count",
                "behavior": ("currentReplicas",),
            },
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {"scaleDown": {"stabilizationWindowSeconds": "count"}}
                }
            },
            "triggers!": [_TRIGGER, 1, 64],
        },
    ),
    "InferencePool": (
        "inference.networking.k8s.io/v1",
        {
            "selector!": {"matchLabels!": "texts"},
            "targetPorts!": [{"number!": "port"}, 1, 8],
            "endpointPickerRef!": {
                "name!": "text",
                "port": {"number!": "port"},
                "failureMode": ("FailOpen", "FailClose"),
            },
        },
    ),
}
_METADATA = {"name!": "text", "namespace": "text", "labels": "texts"}
CUSTOM = {
    kind: _schema({"apiVersion!": (version,), "kind!": (kind,), "metadata!": _METADATA, "spec!": spec})
    for kind, (version, spec) in _SHAPES.items()
}
"""Schemas by kind."""
