"""Several hosts on one machine: each has its own network, hostname, processes, files and shared memory.

A host is a set of Linux namespaces around one idle process. A bridge in a namespace of its own connects all hosts,
so no packet leaves what a test has created. When the test's process ends, in whatever way, the kernel removes them all.
This needs root and iproute2.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from tests.support.hosts.namespaces import Namespace, PortForwarder

REPOSITORY = Path(__file__).parents[3]
OPT, SHARED = "/opt/trainshed", "/srv/trainshed"
"""The path of the project and of the shared storage on every host."""
HostsFile = Literal["real", "debian", "none"]
"""The entry of the host's own name in /etc/hosts: its address, 127.0.1.1, or none."""
_NET, _NET6 = "10.77.0", "fd77:"
_START = r"""
set -e
lab=$1 name=$2 repository=$3 shared=$4
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
cd /mnt/root
mount --rbind /dev dev
mount -t tmpfs tmpfs dev/shm
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs tmpfs run
mkdir -p "opt/trainshed" "srv/trainshed" ".$repository" ".$lab"
mount --bind "$repository" "opt/trainshed"
mount --bind "$repository" ".$repository"
mount --bind "$lab" ".$lab"
mkdir -p ".$lab/shared"
mount --bind "$shared" ".$lab/shared"
mount --bind ".$lab/shared" "srv/trainshed"
hostname "$name"
cp "$lab/$name.hosts" etc/hosts
echo "$name" > etc/hostname
ip link set lo up
exec chroot . /bin/sh -c 'echo ready; exec sleep infinity'
"""


def why_no_hosts() -> str | None:
    """Return the reason why hosts cannot be created here; None if they can."""
    if os.geteuid() != 0:
        return "test hosts need root"
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    return f"test hosts need {', '.join(missing)} (Debian: iproute2, util-linux)" if missing else None


class Host:
    """One host of a `Lab`."""

    def __init__(self, lab: "Lab", name: str, number: int, hosts_file: HostsFile) -> None:
        self.lab = lab
        self.name = name
        self.number = number
        self.hosts_file = hosts_file
        self.address = f"{_NET6}:{number}" if lab.ipv6 else f"{_NET}.{number}"
        self._namespace: Namespace | None = None
        self._forwarders: list[PortForwarder] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Switch the host on, without any processes."""
        (self.lab.folder / f"{self.name}.hosts").write_text(self._hosts_text())
        script = ["sh", "-c", _START, "sh", str(self.lab.folder), self.name, str(REPOSITORY), str(self.lab.shared)]
        flags = ["--net", "--mount", "--uts", "--pid", "--propagation", "private"]
        self._namespace = Namespace(script, flags)
        self._namespace.wait_until_ready()
        self.lab.plug_in(self, self._namespace.pid)

    def _hosts_text(self) -> str:
        own = {"real": f"{self.address} {self.name}\n", "debian": f"127.0.1.1 {self.name}\n", "none": ""}
        others = "".join(f"{host.address} {host.name}\n" for host in self.lab.hosts.values() if host is not self)
        return "127.0.0.1 localhost\n" + own[self.hosts_file] + (others if self.hosts_file == "real" else "")

    @property
    def is_on(self) -> bool:
        """Return True if the host is switched on."""
        return self._namespace is not None

    @property
    def in_url(self) -> str:
        """Return the host's address as it is written in URLs."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def command(self, *command: str, env: Mapping[str, str] | None = None) -> list[str]:
        """Return the command line that runs a command on this host, with a clean environment."""
        assert self._namespace is not None, f"{self.name} is off"
        own = {
            "PATH": f"{OPT}/.venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "TMPDIR": "/run",
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",
            **(env or {}),
        }
        words = [f"{name}={value}" for name, value in own.items()]
        enter = self._namespace.enter("-m", "-u", "-n", "-p", "-r")
        return [*enter, "env", f"--chdir={OPT}", "-i", *words, *command]

    def run(self, *command: str, seconds: float = 60, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a command on this host to its end and return its output. Raises AssertionError if it fails."""
        done = subprocess.run(
            self.command(*command, env=env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=False,
        )
        text = done.stdout.decode(errors="replace")
        assert not check or done.returncode == 0, (
            f"{self.name}: {' '.join(command)} ended with {done.returncode}: {text}"
        )
        return text

    def spawn(self, *command: str, log: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
        """Start a command on this host; its output goes to a log in the lab's folder."""
        return self.spawn_line(self.command(*command, env=env), log=log)

    def spawn_line(self, line: Sequence[str], *, log: str) -> "subprocess.Popen[bytes]":
        """Start a command line made by `command`; it ends with the host."""
        with self.log(log).open("ab") as file:
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def log(self, name: str) -> Path:
        """Return the path of a log of this host, as seen from the test."""
        return self.lab.folder / f"{self.name}-{name}.log"

    def write(self, path: str, text: str) -> None:
        """Write a file on this host."""
        assert self._namespace is not None
        subprocess.run(
            self.command("sh", "-c", 'mkdir -p "$(dirname "$0")" && cat > "$0"', path),
            input=text.encode(),
            check=True,
            timeout=30,
        )

    def read(self, path: str) -> str | None:
        """Return a file of this host; None if it does not exist."""
        done = subprocess.run(self.command("cat", path), capture_output=True, timeout=30, check=False)
        return done.stdout.decode() if done.returncode == 0 else None

    def start_unit(self, unit: str, env: Mapping[str, str] | None = None, *, without: Sequence[str] = ()) -> None:
        """Start one of the project's systemd units, which is started again whenever it ends.

        Its variables that begin with one of `without` are left out.
        """
        file = f"{OPT}/deploy/systemd/{unit}.service"
        options = [f"--without={prefix}" for prefix in without]
        self.spawn("python", "-m", "tests.support.hosts.units", file, *options, log=unit, env=env)

    def stop_unit(self, unit: str) -> None:
        """Ask a unit to stop, as `systemctl stop` does."""
        self.run("pkill", "-TERM", "-f", f"hosts.units .*/{unit}.service")

    def cut(self) -> None:
        """Disconnect the host from the network."""
        self.lab.switch("ip", "link", "set", f"port{self.number}", "down")

    def heal(self) -> None:
        """Reconnect the host to the network."""
        self.lab.switch("ip", "link", "set", f"port{self.number}", "up")

    def block(self, other: "Host") -> None:
        """Drop all packets to another host, as a firewall between the two would."""
        self.run("ip", "route", "add", "blackhole", other.address)

    def unblock(self, other: "Host") -> None:
        """Stop dropping packets."""
        self.run("ip", "route", "delete", "blackhole", other.address)

    def freeze(self) -> None:
        """Stop all processes, as a paused virtual machine does."""
        self._signal_all("kill -STOP -1")

    def freeze_for(self, seconds: float) -> None:
        """Stop all processes for some seconds, however slow this machine is to start the next process."""
        self._signal_all(f"kill -STOP -1; sleep {seconds}; kill -CONT -1")
        self.thaw()

    def thaw(self) -> None:
        """Resume all processes."""
        self._signal_all("kill -CONT -1")
        # nsenter stops itself when its child is stopped.
        for process in self._processes:
            process.send_signal(signal.SIGCONT)

    def _signal_all(self, script: str) -> None:
        assert self._namespace is not None
        # -1 is every process of the namespace except its first process and the sender, which is the shell.
        command = [*self._namespace.enter("-p", "-m", "-r"), "sh", "-c", script]
        subprocess.run(command, check=False, timeout=30, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """Switch the host off without warning."""
        for forwarder in self._forwarders:
            forwarder.close()
        self._forwarders = []
        if self._namespace is not None:
            self._namespace.kill()
            # Each of these reaps a process inside; otherwise the namespace does not end.
            for process in self._processes:
                process.kill()
                process.wait(timeout=30)
            self._namespace.wait()
            self._namespace, self._processes = None, []
            self.lab.unplug(self)

    def unmount(self) -> None:
        """Unmount the shared storage; its mount point stays, empty."""
        self.run("umount", "--lazy", SHARED)

    def mount(self) -> None:
        """Mount the shared storage again."""
        self.run("mount", "--bind", str(self.lab.folder / "shared"), SHARED)

    def forward(self, port: int, *, address: str | None = None) -> int:
        """Return a port of 127.0.0.1 in the test's namespace that forwards to a port of this host."""
        assert self._namespace is not None
        self._forwarders.append(PortForwarder(self._namespace, (address or self.address, port)))
        return self._forwarders[-1].port


class Lab:
    """The hosts of one test, the network that connects them, and the storage that they share.

    With `ipv6`, hosts have IPv6 addresses only. Otherwise they have both kinds, and know each other by IPv4.
    """

    def __init__(self, folder: Path, shared: Path, *, ipv6: bool = False) -> None:
        self.folder = folder
        self.shared = shared
        self.ipv6 = ipv6
        self.hosts: dict[str, Host] = {}
        self._switch = Namespace(["sleep", "infinity"], ["--net"])
        self.switch("ip", "link", "add", "bridge0", "type", "bridge")
        self.switch("ip", "link", "set", "bridge0", "up")

    def switch(self, *command: str) -> None:
        """Run a command in the namespace of the bridge."""
        subprocess.run([*self._switch.enter("-n"), *command], check=True, timeout=30, capture_output=True)

    def plug_in(self, host: Host, pid: int) -> None:
        """Connect a host to the bridge."""
        port = f"port{host.number}"
        self.switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self.switch("ip", "link", "set", port, "master", "bridge0", "up")
        if not self.ipv6:
            host.run("ip", "addr", "add", f"{_NET}.{host.number}/24", "dev", "eth0")
        host.run("ip", "-6", "addr", "add", f"{_NET6}:{host.number}/64", "dev", "eth0", "nodad")
        host.run("ip", "link", "set", "eth0", "up")

    def unplug(self, host: Host) -> None:
        """Remove the port of a host that was switched off."""
        with suppress(subprocess.CalledProcessError):
            self.switch("ip", "link", "delete", f"port{host.number}")

    def add(self, name: str, number: int, hosts_file: HostsFile = "real") -> Host:
        """Describe a host; `start` switches it on."""
        self.hosts[name] = Host(self, name, number, hosts_file)
        return self.hosts[name]

    def close(self) -> None:
        """Switch all hosts and the network off."""
        for host in self.hosts.values():
            host.kill()
        self._switch.kill()
        self._switch.wait()


@contextmanager
def lab(
    names: Sequence[str], *, shared: Path, hosts_files: Sequence[HostsFile] = ("real",), ipv6: bool = False
) -> Iterator[Lab]:
    """Yield hosts of these names, switched on, numbered from 10, with these variants of /etc/hosts in turn."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        made = Lab(Path(folder), shared, ipv6=ipv6)
        try:
            for number, name in enumerate(names):
                made.add(name, 10 + number, hosts_files[number % len(hosts_files)])
            for host in made.hosts.values():
                host.start()
            yield made
        finally:
            made.close()
