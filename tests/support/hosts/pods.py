"""The chart's pods on test hosts: each with its environment, command, mounts and user, as a kubelet would start it."""

import base64
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.hosts.charts import NAMESPACE, Object, Rendered
from tests.support.hosts.containers import UID, Container, restrict, run, start
from tests.support.hosts.hosts import SHARED, Host


@dataclass
class Pod:
    """One pod of a rendered chart, on a separate host."""

    name: str
    template: Object
    host: Host
    rendered: Rendered
    secrets: Mapping[str, Mapping[str, str]]
    """Secrets that the chart does not create, such as KubeRay's token."""
    ray_command: str | None = None
    """The command that KubeRay gives the container."""
    process: "subprocess.Popen[bytes] | None" = None
    """The container, once it was started."""

    @property
    def container(self) -> Object:
        """Return the pod's only container."""
        (one,) = self.template["spec"]["containers"]
        found: Object = one
        return found

    def environment(self) -> dict[str, str]:
        """Return the variables of the container."""
        found = {"HOME": "/tmp"}
        for source in self.container.get("envFrom", []):
            if "configMapRef" in source:
                found |= self.rendered.of("ConfigMap", source["configMapRef"]["name"])["data"]
            else:
                found |= self._secret(source["secretRef"]["name"])
        for one in self.container.get("env", []):
            if "value" in one:
                found[one["name"]] = one["value"]
            elif "fieldRef" in one["valueFrom"]:
                found[one["name"]] = self._field(one["valueFrom"]["fieldRef"]["fieldPath"])
            else:
                reference = one["valueFrom"]["secretKeyRef"]
                found[one["name"]] = self._secret(reference["name"])[reference["key"]]
        return found

    def _field(self, path: str) -> str:
        """Return a field of the pod, as the downward API does; each host is a Kubernetes node."""
        if path == "spec.nodeName":
            return f"node-of-{self.host.name}"
        (name,) = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path).groups()  # type: ignore[union-attr]
        return str(self.template["metadata"]["annotations"][name])

    def _secret(self, name: str) -> Mapping[str, str]:
        if name in self.secrets:
            return self.secrets[name]
        data = self.rendered.of("Secret", name)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def command(self) -> tuple[str, ...]:
        """Return the container's command; the images' entrypoint only reaps orphans."""
        if self.ray_command is not None:
            return ("/bin/bash", "-c", "--", f"ulimit -n 65536; {self.ray_command}")
        return tuple(self.container["args"])

    def prepare(self) -> None:
        """Give the host the mounts and the read-only root of the container."""
        volumes = {volume["name"]: volume for volume in self.template["spec"]["volumes"]}
        writable = []
        for mount in self.container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "secret" in volume or "configMap" in volume:
                self._write_files(volume, path)
            elif path != SHARED:
                writable.append(path)
        restrict(self.host, *writable, *(["/dev/shm"] if self.ray_command else []))

    def _write_files(self, volume: Object, path: str) -> None:
        if "secret" in volume:
            files, mode = self._secret(volume["secret"]["secretName"]), oct(volume["secret"]["defaultMode"])[2:]
        else:
            files, mode = self.rendered.of("ConfigMap", volume["configMap"]["name"])["data"], "444"
        for name, text in files.items():
            self.host.write(f"{path}/{name}", text)
            # As fsGroup sets it.
            self.host.run("chgrp", str(UID), f"{path}/{name}")
            self.host.run("chmod", mode, f"{path}/{name}")

    def start(self) -> None:
        """Run the init containers, then start the container; it writes to its log in the lab's folder."""
        for one in self.template["spec"].get("initContainers", []):
            run(self.host, Container(f"{self.name}-{one['name']}", tuple(one["args"]), {"HOME": "/tmp"}))
        self.process = start(self.host, Container(self.name, self.command(), self.environment()))

    def restart(self) -> None:
        """Start the container again once it has ended, as a kubelet does; all its processes end with it."""
        assert self.process is not None, f"{self.name} was not started"
        self.process.wait(timeout=60)
        self.host.run("pkill", "-KILL", "--uid", str(UID), check=False)
        self.start()

    def end(self) -> None:
        """Run the preStop hook, with which a kubelet ends the pod."""
        self.run(*self.container["lifecycle"]["preStop"]["exec"]["command"], seconds=120)

    def run(self, *words: str, seconds: float = 60) -> str:
        """Run the container, or another command in it, to its end and return its output."""
        return run(self.host, Container(self.name, words or self.command(), self.environment()), seconds=seconds)


@dataclass
class PodSet:
    """All pods of a release."""

    pods: dict[str, Pod] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Pod:
        return self.pods[name]

    def __iter__(self) -> Iterator[Pod]:
        return iter(self.pods.values())


def place(rendered: Rendered, hosts: Mapping[str, Host], *, token: str, more: str = "") -> PodSet:
    """Put each pod of a release on the host of its name: api, test, ray-head, ray-worker-1 and so on.

    `more` is appended to each `ray start`. Services become entries of /etc/hosts.
    """
    cluster = rendered.of("RayCluster")
    name, spec = cluster["metadata"]["name"], cluster["spec"]
    head_service = f"{name}-head-svc.{NAMESPACE}.svc"
    templates: dict[str, tuple[Object, str | None]] = {}
    for component, template in rendered.pods():
        if component == "ray-head":
            templates[component] = template, f"{ray_start(spec['headGroupSpec'])} --head {more}"
        elif not component.startswith("ray-worker"):
            templates[component] = template, None
    numbers = iter(range(1, 100))
    for group in spec["workerGroupSpecs"]:
        for _ in range(group["replicas"]):
            command = f"{ray_start(group)} --address={head_service}:6379 {more}"
            templates[f"ray-worker-{next(numbers)}"] = group["template"], command
    services = {head_service: hosts["ray-head"], rendered.of("Service")["metadata"]["name"]: hosts["api"]}
    names = "".join(f"{host.address} {service}\n" for service, host in services.items())
    made = PodSet()
    for component, (template, ray_command) in templates.items():
        host = hosts[component]
        host.run("sh", "-c", 'printf %s "$0" >> /etc/hosts', names)
        secrets = {name: {"auth_token": token}}
        made.pods[component] = Pod(component, template, host, rendered, secrets, ray_command)
        if ray_command is not None:
            # KubeRay adds this for `authOptions`.
            variables = [{"name": "RAY_AUTH_MODE", "value": "token"}, {"name": "RAY_AUTH_TOKEN", "value": token}]
            made[component].container["env"] += variables
        made[component].prepare()
    return made


def ray_start(group: Mapping[str, Any]) -> str:
    """Return the `ray start` that KubeRay writes for a group: its own parameters, then those of the chart."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    own = {"block": "true", "dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
    if "cpu" in limits:
        own["num-cpus"] = str(limits["cpu"])
    parameters = own | group["rayStartParams"]
    words = [f"--{name}" if value == "true" else f"--{name}={value}" for name, value in sorted(parameters.items())]
    return " ".join(["ray start", *words])
