"""The provenance of a run: machine, libraries, environment and commit. Names no host, user or path."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path, PurePath

from unisono.records import Machine

PACKAGES = ("numpy", "ml_dtypes", "mpi4py", "mpich", "torch")
# Settings that change how a library communicates or computes. Their values are kept unless they hold a path.
VARIABLES = frozenset(
    {
        *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
        *("UNISONO_TIMEOUT_S", "UNISONO_CHECK", "UNISONO_PLAN", "UNISONO_SPINS", "UNISONO_ISA"),
        *("UNISONO_FAR", "UNISONO_CHUNK_BYTES", "UNISONO_STREAM_BYTES", "UNISONO_STREAM_CHUNKS"),
        *("UNISONO_NODE", "UNISONO_TRANSPORT", "UNISONO_LANE"),
        *("UNISONO_FABRIC_PROVIDER", "UNISONO_FABRIC_CHANNELS", "UNISONO_FABRIC_SHARE"),
        *("UNISONO_FABRIC_COMPLETIONS", "UNISONO_LIBFABRIC", "UNISONO_NCCL"),
        *("UNISONO_PEER_ACCESS", "UNISONO_CUDA_MEMORY", "UNISONO_MAX_SMS", "UNISONO_SHARE_DEVICE"),
        "UNISONO_MOE_LOW_LATENCY",
        *("MPI4PY_RC_THREAD_LEVEL", "OMPI_MCA_btl", "OMPI_MCA_pml", "OMPI_MCA_coll", "I_MPI_FABRICS"),
        *("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"),
        *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_CTA_POLICY", "NCCL_WIN_ENABLE"),
        *("NCCL_BUFFSIZE", "NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_NTHREADS"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING"),
        *("CCL_ATL_TRANSPORT", "CCL_ATL_SHM", "CCL_WORKER_OFFLOAD", "CCL_ALLREDUCE"),
        *("NCCL_RUNTIME_CONNECT", "NCCL_DEBUG", "NCCL_GRAPH_REGISTER"),
        *("FI_PROVIDER", "UCX_TLS", "UCX_NET_DEVICES", "GLOO_SOCKET_IFNAME", "TORCH_NUM_THREADS"),
        *("MALLOC_ARENA_MAX", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "SLURM_CPU_BIND", "KMP_AFFINITY"),
    }
)
_PREFIXES = ("MPIR_CVAR_",)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def caches() -> dict[str, int]:
    """Returns the bytes of each cache of the first core, like {"L1d": 32768, "L3": 33554432}."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KM]?)", _text(index / "size"))
        if size:
            kind = {"Data": "d", "Instruction": "i"}.get(_text(index / "type"), "")
            found[f"L{_text(index / 'level')}{kind}"] = int(size[1]) << {"": 0, "K": 10, "M": 20}[size[2]]
    return found


def usable_cores() -> int:
    """Returns on how many cores this process may run."""
    return len(os.sched_getaffinity(0))


def memory_bytes(field: str = "MemTotal") -> int:
    """Returns a field of /proc/meminfo in bytes; 0 if the system does not say."""
    match = re.search(rf"^{field}:\s+(\d+) kB", _text(Path("/proc/meminfo")), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def free_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes of memory that this process can still get; 0 if the system does not say. The
    machine's available memory, or what a cgroup (v2 or v1) of this process leaves of its limit."""
    free = [memory_bytes("MemAvailable")]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top / path.lstrip("/")  # missing in a container that sees only its own cgroup, as `top`
        for folder in (group, *group.parents):
            limit, used = (_text(folder / name) for name in names)
            if limit.isdecimal() and used.isdecimal():  # not "max"
                free.append(max(0, int(limit) - int(used) + _reclaimable(folder)))
            if folder == top:
                break
    return min(free)


def _reclaimable(cgroup: Path) -> int:
    """Returns the cgroup's bytes of inactive file cache, which the kernel frees first (see MemAvailable)."""
    found = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(cgroup / "memory.stat"), re.MULTILINE)
    return max(map(int, found), default=0)  # v1 has the cgroup's own bytes, and a total


def driver() -> str | None:
    """Returns the version of the NVIDIA kernel driver, or None."""
    found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _text(Path("/proc/driver/nvidia/version")))
    return found[1] if found else None


def lacks_avx512() -> bool:
    """Returns whether this is an x86-64 processor without AVX-512."""
    return platform.machine() == "x86_64" and "avx512bw" not in _text(Path("/proc/cpuinfo")).split()


def machine(cores: int | None = None, gpus: Sequence[str] = (), gpu_state: Sequence[str] = ()) -> Machine:
    """Returns this machine, without a host name. `cores`: of the run, if this process is bound to fewer."""
    model = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return Machine(
        cpu=model[1].strip() if model else platform.machine(),
        cores=usable_cores() if cores is None else cores,
        memory_bytes=memory_bytes(),
        numa_nodes=max(1, len(nodes)),
        kernel=f"{platform.system()} {platform.release()}",
        caches=caches(),
        gpus=list(gpus),
        driver=driver() if gpus else None,
        gpu_state=list(gpu_state),
    )


def libraries(backends: Mapping[str, str]) -> dict[str, str]:
    """Returns the versions of Python, of PACKAGES, and of every usable backend."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {f"backend {name}": version for name, version in backends.items() if version}


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the allow-list that are set. A value with a path in it becomes "set"."""
    chosen = {
        key: value for key, value in sorted(env.items()) if key in VARIABLES or key.startswith(_PREFIXES)
    }
    return {key: "set" if "/" in value or len(value) > 200 else value for key, value in chosen.items()}


def now() -> str:
    """Returns the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def command(argv: Sequence[str]) -> list[str]:
    """Returns the command with the program's name, and with each path cut to its last part."""
    return ["unisono", *(_without_path(word) for word in argv)]


def _without_path(word: str) -> str:
    word = re.sub(r"(?<=unisono@)[^,]+", lambda prefix: PurePath(prefix[0]).name, word)
    option, equals, value = word.partition("=")
    if word.startswith("-") and equals:
        return f"{option}={_without_path(value)}"
    return PurePath(word).name if word.startswith(("/", "~", "./", "../")) else word


def commit() -> str | None:
    """Returns the commit of the checkout that this package runs from or was built in, or None. The text ends
    in "-dirty" if files differ from the commit."""

    package = Path(__file__).resolve()

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(package.parent), *words],
                capture_output=True,
                text=True,
                timeout=5,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if not top or not (Path(top) / "python" / "unisono" / "bench" / package.name).is_file():
        return None
    revision = git("rev-parse", "HEAD")
    if not revision:
        return None
    return revision + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
