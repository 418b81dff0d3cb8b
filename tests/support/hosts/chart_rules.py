"""Rules of the Kubernetes API server and of kubelets that the published schemas do not contain."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

_PART = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS = rf"{_PART}(\.{_PART})*"
_LABEL = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?"
_REPOSITORY = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*"
_HOST = (
    r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*)(:[0-9]+)?"
)
_IMAGE = rf"({_HOST}/)?{_REPOSITORY}(:[A-Za-z0-9_][-A-Za-z0-9._]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, **{f"{one}": 1000.0**n for n, one in enumerate("KMGTP", 1)}}
_UNITS |= {f"{one}i": 1024.0**n for n, one in enumerate("KMGTP", 1)}
_NATIVE = ("cpu", "memory", "ephemeral-storage")
"""Resources whose request may be lower than their limit, or have none."""
_FIELDS = (
    r"metadata\.(name|namespace|uid|(labels|annotations)\['[^']+'\])|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIPs?|podIPs?)"
)
_AMOUNTS = r"(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-\S+)"
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


def _host(value: Any) -> Found:
    yield from _name(value)
    if _parsed(ipaddress.ip_address, value):
        yield f"{value!r} is an address"


def _hosts(value: Any) -> Found:
    for one in value:
        yield from _host(one)
    if len(value) > 16:
        yield "more than 16 host names"


def _reference(value: Any) -> Found:
    if "name" in value:
        yield from _name(value["name"])


def _references(value: Any) -> Found:
    for one in value:
        yield from _reference(one)
    yield from _repeated([str(sorted(one.items())) for one in value])


def _gates(value: Any) -> Found:
    yield from _annotations(one["name"] for one in value)
    yield from _repeated([one["name"] for one in value])


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
        elif name not in _NATIVE and name != "storage":
            yield from _extended(name, one, requests=requests, limits=limits)


def _extended(name: str, one: str, *, requests: dict[str, str], limits: dict[str, str]) -> Found:
    if name not in limits or amount(requests.get(name, limits[name])) != amount(limits[name]):
        yield f"{name} needs a limit that equals its request"
    if amount(one) % 1 and not name.startswith("hugepages-"):
        yield f"{name} must be an integer"


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
    yield from _repeated(names)
    yield from (f"{one['name']} has two values" for one in value if one.get("value") and "valueFrom" in one)


def _repeated(names: Sequence[str]) -> Found:
    yield from (f"{name} occurs twice" for name in sorted(set(names)) if names.count(name) > 1)


def _matches(value: Any) -> Found:
    for one in value:
        if (one["operator"] in ("In", "NotIn")) != bool(one.get("values")):
            yield f"{one['operator']} with values {one.get('values')}"


def _block(value: Any) -> Found:
    whole = _parsed(ipaddress.ip_network, value["cidr"])
    parts = [_parsed(ipaddress.ip_network, one) for one in value.get("except", [])]
    if whole is None or None in parts:
        yield f"{value} has an invalid network"
    elif any(one.version != whole.version or one == whole or not one.subnet_of(whole) for one in parts):
        yield f"{value} excepts networks outside"


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text) if parse is ipaddress.ip_address else ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _ports(value: Any) -> Found:
    yield from (f"{one} ends before it begins" for one in value if "endPort" in one and one["endPort"] < one["port"])


def _image(value: Any) -> Found:
    if not re.fullmatch(_IMAGE, value):
        yield f"{value!r} is not an image"


def _matching(pattern: str) -> Callable[[Any], Found]:
    def rule(value: Any) -> Found:
        if not re.fullmatch(pattern, value):
            yield f"{value!r} is not supported"

    return rule


_RULES: dict[object, Callable[[Any], Found]] = {
    **dict.fromkeys(("secretName", "claimName", "volumeName", "storageClassName", "ingressClassName"), _name),
    **dict.fromkeys(("metadata", "secretRef", "secretKeyRef", "configMapRef", "configMapKeyRef"), _reference),
    **dict.fromkeys(("imagePullSecrets", "parentRefs"), _references),
    **dict.fromkeys(("labels", "matchLabels", "nodeSelector"), _labels),
    **dict.fromkeys(("sizeLimit", "storage"), _quantity),
    "annotations": _annotations,
    "env": _env,
    "fieldPath": _matching(_FIELDS),
    "host": _host,
    "hostnames": _hosts,
    "image": _image,
    "ipBlock": _block,
    "matchExpressions": _matches,
    "ports": _ports,
    "schedulingGates": _gates,
    "resource": _matching(_AMOUNTS),
    "resources": _resources,
    "tolerations": _tolerations,
}
