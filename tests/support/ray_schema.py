"""What a `ray.io/v1` RayCluster may say, as far as ours do: unknown fields are refused.

Written from the facts of KubeRay's CustomResourceDefinition, which no package ships. Its pod templates are
those of Kubernetes, and are validated as such (`manifest_rules.schema`).
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
RAY_CLUSTER = _closed(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayCluster"},
    metadata=_closed(["name"], name={"type": "string"}, namespace={"type": "string"}, labels=_TEXTS),
    spec=_closed(
        ["headGroupSpec", "workerGroupSpecs"],
        rayVersion={"type": "string"},
        enableInTreeAutoscaling={"type": "boolean"},
        headGroupSpec=_HEAD,
        workerGroupSpecs={"type": "array", "items": _WORKERS, "minItems": 1},
    ),
)
