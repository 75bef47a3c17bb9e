"""Several hosts on one machine: network namespaces, joined by a bridge in one more.

Processes on different hosts share no interface, address, loopback or shared memory (enter_host.sh). A test
can delay, drop or cut off traffic to a host. Requires root, `ip` and `tc` (Debian's iproute2).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import ranks
from unisono.bench.mpis import find_mpiexec

ENTER = str(Path(__file__).with_name("enter_host.sh"))
_PORT = 29500


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@cache
def missing() -> str | None:
    """Returns why this machine cannot have such hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}: install iproute2"
    try:
        with hosts(1):
            return None
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces are not allowed here ({error})"


class Hosts:
    """`count` hosts, numbered from 1, each with the interface e0 and the address 10.77.0.number."""

    def __init__(self, count: int) -> None:
        self.prefix = f"un{secrets.token_hex(3)}h"
        self.switch, self.numbers = self.name(0), range(1, count + 1)
        try:
            _ip("netns", "add", self.switch)
            _ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "br0", "up")
            for number in self.numbers:
                self._add(number)
        except BaseException:
            self.close()
            raise

    def _add(self, number: int) -> None:
        name, port = self.name(number), f"p{number}"
        _ip("netns", "add", name)
        _ip(*f"link add e0 netns {name} type veth peer name {port} netns {self.switch}".split())
        _ip(*f"-n {self.switch} link set {port} master br0 up".split())
        _ip(*f"-n {name} addr add {self.address(number)}/24 dev e0".split())
        for interface in ("lo", "e0"):
            _ip("-n", name, "link", "set", interface, "up")

    def name(self, number: int) -> str:
        return f"{self.prefix}{number}"

    def address(self, number: int) -> str:
        return f"10.77.0.{number}"

    def add_bridge(self, number: int) -> None:
        """Adds a bridge as Docker does, with the same address on every host."""
        name = self.name(number)
        _ip(*f"-n {name} link add docker0 type veth peer name inside".split())
        for interface in ("inside", "docker0"):
            _ip("-n", name, "link", "set", interface, "up")
        _ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "docker0")

    def add_route(self, number: int) -> None:
        """Adds the default route, over the network between the hosts."""
        _ip("-n", self.name(number), "route", "add", "default", "via", self.address(254))

    def cut(self, number: int) -> None:
        """Cuts the host off: nothing reaches or leaves it."""
        _ip("-n", self.switch, "link", "set", f"p{number}", "down")

    def mend(self, number: int) -> None:
        """Undoes `cut`."""
        _ip("-n", self.switch, "link", "set", f"p{number}", "up")

    def disturb(self, number: int, how: str) -> None:
        """Puts a queue of tc before the host, at the switch.

        Args:
            how: for example "netem delay 5ms loss 1%", or "tbf rate 100mbit burst 32k limit 20k", which
                delays, and drops on overflow.

        Raises:
            OSError: the kernel lacks such a queue.
        """
        self._tc(f"qdisc add dev p{number} root {how}")

    def dropped(self, number: int) -> int:
        """Returns the number of packets that the queue has dropped."""
        output = self._tc(f"-s qdisc show dev p{number} root")
        return int(output.partition("dropped ")[2].split()[0].rstrip(","))

    def _tc(self, words: str) -> str:
        line = ["tc", "-n", self.switch, *words.split()]
        done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode:
            raise OSError(f"tc {words}: {done.stderr.strip()}")
        return done.stdout

    def mpiexec(
        self, each: int, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> ranks.Ended:
        """Runs `argv` as `each` ranks on every host, by MPICH's hydra."""
        places = ",".join(f"{self.address(number)}:{each}" for number in self.numbers)
        hydra = [str(find_mpiexec()), "-launcher", "ssh", "-launcher-exec", ENTER, "-iface", "e0"]
        hydra += ["-hosts", places, "-n", str(each * len(self.numbers))]
        known = {**(env or {}), "UNISONO_TEST_HOSTS": self.prefix}
        inside = ["ip", "netns", "exec", self.name(1)]
        return ranks.run([*inside, *hydra, *argv], known, timeout_s)

    def torchrun(
        self, each: int, argv: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 90
    ) -> ranks.Ended:
        """Does the same by torchrun, with an agent on each host. Returns how the first host's agent ended."""
        agents = []
        for number in self.numbers:
            agent = [ENTER, self.address(number), sys.executable, "-m", "torch.distributed.run"]
            agent += [
                f"--nnodes={len(self.numbers)}",
                f"--node-rank={number - 1}",
                f"--nproc-per-node={each}",
            ]
            agent += [f"--master-addr={self.address(1)}", f"--master-port={_PORT}"]
            agent += map(shlex.quote, argv[1:])
            agents.append(agent)
        known = {**(env or {}), "UNISONO_TEST_HOSTS": self.prefix}
        others = [
            subprocess.Popen(
                agent, env={**os.environ, **known}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for agent in agents[1:]
        ]
        try:
            return ranks.run(agents[0], known, timeout_s)
        finally:
            for other in others:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    other.wait(20)
                other.kill()
                other.wait()

    def close(self) -> None:
        """Ends all processes on the hosts, and removes the hosts."""
        for number in (0, *self.numbers):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                for process in _ip("netns", "pids", self.name(number)).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                _ip("netns", "del", self.name(number))


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    made = Hosts(count)
    try:
        yield made
    finally:
        made.close()
