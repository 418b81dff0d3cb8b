"""Rules of the Kubernetes API server that its published schemas do not contain."""

import re
from collections.abc import Callable, Iterator
from typing import Any

_PART = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS = rf"{_PART}(\.{_PART})*"
_LABEL = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, **{f"{one}": 1000.0**n for n, one in enumerate("KMGTP", 1)}}
_UNITS |= {f"{one}i": 1024.0**n for n, one in enumerate("KMGTP", 1)}
Found = Iterator[str]


def broken_rules(one: object, path: str = "") -> Found:
    """Yield the broken rules below a node, with their paths."""
    items = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
    for name, value in items:
        here = f"{path}/{name}"
        yield from (f"{here}: {text}" for text in _RULES.get(name, _nothing)(value))
        yield from broken_rules(value, here)


def amount(text: str | float) -> float:
    """Return a quantity as a number."""
    found = re.fullmatch("([0-9.]+)(.*)", str(text))
    assert found is not None, text
    return float(found[1]) * _UNITS[found[2]]


def _nothing(_value: Any) -> Found:
    yield from ()


def _name(value: Any) -> Found:
    if not re.fullmatch(_DNS, value) or len(value) > 253:
        yield f"{value!r} is not a DNS name"


def _reference(value: Any) -> Found:
    if "name" in value:
        yield from _name(value["name"])


def _names(value: Any) -> Found:
    for one in value:
        yield from _reference(one) if isinstance(one, dict) else _name(one)


def _annotations(value: Any) -> Found:
    yield from (f"{key!r} is not a qualified name" for key in value if not re.fullmatch(f"({_DNS}/)?{_LABEL}", key))


def _labels(value: Any) -> Found:
    yield from _annotations(value)
    yield from (f"{one!r} is not a label" for one in value.values() if not re.fullmatch(f"({_LABEL})?", one))


def _quantity(value: Any) -> Found:
    if not re.fullmatch(_QUANTITY, str(value)) or amount(value) <= 0:
        yield f"{value!r} is not a positive quantity"


def _resources(value: Any) -> Found:
    requests, limits = value.get("requests", {}), value.get("limits", {})
    for name, one in [*requests.items(), *limits.items()]:
        if not re.fullmatch(_QUANTITY, str(one)):
            yield f"{one!r} is not a quantity"
        elif name in requests and name in limits and amount(requests[name]) > amount(limits[name]):
            yield f"the request of {name} exceeds its limit"


def _tolerations(value: Any) -> Found:
    for one in value:
        if "tolerationSeconds" in one and one.get("effect") != "NoExecute":
            yield "tolerationSeconds needs the effect NoExecute"
        if not one.get("key") and one.get("operator") != "Exists":
            yield "an empty key needs the operator Exists"
        if one.get("operator") == "Exists" and one.get("value"):
            yield "the operator Exists has no value"


def _env(value: Any) -> Found:
    names = [one["name"] for one in value]
    yield from (f"{name!r} is not a name" for name in names if not re.fullmatch("[A-Za-z_][-._A-Za-z0-9]*", name))
    yield from (f"{name} occurs twice" for name in set(names) if names.count(name) > 1)
    yield from (f"{one['name']} has two values" for one in value if one.get("value") and "valueFrom" in one)


_RULES: dict[object, Callable[[Any], Found]] = {
    **dict.fromkeys(("secretName", "claimName", "volumeName", "storageClassName", "ingressClassName", "host"), _name),
    **dict.fromkeys(("metadata", "secretRef", "secretKeyRef", "configMapRef", "configMapKeyRef"), _reference),
    **dict.fromkeys(("imagePullSecrets", "hostnames", "parentRefs"), _names),
    **dict.fromkeys(("labels", "matchLabels", "nodeSelector"), _labels),
    **dict.fromkeys(("sizeLimit", "storage"), _quantity),
    "annotations": _annotations,
    "resources": _resources,
    "tolerations": _tolerations,
    "env": _env,
}
