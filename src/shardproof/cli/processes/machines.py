"""Several machines: the same command runs on each, through torch's elastic launcher, with the rendezvous on the first.

[Note: the address of a machine]
gloo listens at the address that the machine's own name resolves to. On Debian and Ubuntu that is 127.0.1.1, where no
other machine can reach it, and all ranks wait for each other. The others can reach the address from which this machine
connects to the rendezvous; only on the rendezvous machine itself, if its name resolves to a loopback address, another
address has to be found.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from shardproof.cli.main import FAILURE
from shardproof.cli.processes.alike import Machine, difference
from shardproof.cli.processes.launch import FINAL, OF_LAUNCHER, OWN_STORE, cores, quiet_launcher
from shardproof.cli.processes.roll_call import RollCall
from shardproof.errors import ConfigError, ShardproofError
from shardproof.interrupts import asking_to_end
from shardproof.train.model.loading import TINY
from shardproof.train.options.config import RunConfig

INTERFACE = "GLOO_SOCKET_IFNAME"
LAST_CALL = 15  # seconds in which more machines may join once there are enough
TOLD_WITHIN = 60  # seconds within which all machines learn of a mistake
# Ranks that a signal has asked to end finish their step, and save. By default torch kills them after 30 s; 2.13 can be
# configured, 2.11 cannot.
PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(24 * 3600)
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_NOWHERE = "198.51.100.1"  # an address for documentation; nothing is sent to it


class Machines(NamedTuple):
    """Several machines, as given by --nnodes, --node-rank, --master-addr and --master-port, or by the variables NNODES,
    NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Attributes:
        fewest: how many of the `nodes` the run needs to continue.
    """

    fewest: int
    nodes: int
    rank: int
    address: str
    port: int

    @staticmethod
    def of(told: Mapping[str, str], max_restarts: int = 0) -> Machines | None:
        """None for one machine.

        Raises:
            ConfigError: something is missing, or is not a number.
        """

        def number(name: str, default: str) -> int:
            try:
                return int(told.get(name) or default)
            except ValueError:
                raise ConfigError(f"{name}={told[name]} is not a number.") from None

        nodes = told.get("NNODES") or "1"
        fewest, _, most = nodes.partition(":")
        try:
            low, high = int(fewest), int(most or fewest)
        except ValueError:
            raise ConfigError(f"NNODES={nodes} is neither a number nor a range like 2:4.") from None
        if not 1 <= low <= high:
            raise ConfigError(f"NNODES={nodes}: the range begins with the minimum, which is at least 1.")
        rank = number("NODE_RANK", "0")
        if high == 1:
            return None
        if low != high and not max_restarts:
            raise ConfigError(f"NNODES={nodes} asks to continue without lost machines: add --max-restarts.")
        if not told.get("MASTER_ADDR"):
            raise ConfigError(
                f"NNODES={nodes} needs MASTER_ADDR too (--master-addr): the name or address of machine 0."
            )
        if not 0 <= rank < high:
            raise ConfigError(f"NODE_RANK={rank}: with NNODES={nodes} it must be from 0 to {high - 1}.")
        return Machines(low, high, rank, told["MASTER_ADDR"], number("MASTER_PORT", "29500"))

    def launch(self, argv: Sequence[str], nproc: int, max_restarts: int = 0) -> int:
        """Run our command `argv` on `nproc` ranks of this machine, through torchrun; returns the exit code."""
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        os.environ.setdefault(*PATIENCE)  # read by a config of torch
        # The agents must meet again after a restart; torch's static rendezvous would find the previous store.
        again = {"is_host": self.rank == 0, "last_call_timeout": LAST_CALL}
        config = LaunchConfig(
            min_nodes=self.fewest,
            max_nodes=self.nodes,
            nproc_per_node=nproc,
            run_id="shardproof",
            rdzv_backend="c10d" if max_restarts else "static",
            rdzv_endpoint=f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}",
            rdzv_configs=again if max_restarts else {"rank": self.rank},
            local_addr=own_address(self.address),
            max_restarts=max_restarts,
            signals_to_handle=",".join([*(each.name for each in asking_to_end()), "SIGQUIT"]),
        )
        quiet_launcher()
        os.environ |= OWN_STORE
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // nproc)))
        done = Event()
        # With restarts, machines may join later, and leave: torch's launchers handle that.
        met = None if max_restarts else RollCall(self.nodes, self.rank, self.address, self.port)
        if met is not None:
            met.watch(partial(_end_without, done))
        Thread(target=_mind_the_others, args=(done,), daemon=True).start()
        final: dict[str, int] = {}
        try:
            with _final_words(done, max_restarts, final):
                elastic_launch(config, sys.executable)("-u", "-m", "shardproof", *argv)
            if met is not None:
                met.close()
        except ChildFailedError as failed:
            codes = [failure.exitcode for failure in failed.failures.values() if failure.exitcode > 0]
            return codes[0] if codes else FAILURE
        except SignalException as ended:
            return final.get("code", 128 + int(ended.sigval))
        except (RendezvousError, DistError) as problem:
            what = f"{socket.gethostname()} cannot meet the other machines at {self.address}:{self.port}: {problem}"
            hint = "The machine there (NODE_RANK=0) must be running and reachable; the others depend on it."
            if "EADDRINUSE" in str(problem):
                what = f"MASTER_PORT={self.port} is in use on {socket.gethostname()} by another job or program."
                hint = "Choose another one on all machines: --master-port."
            print(f"error: {what}\n{hint}", file=sys.stderr)
            return FAILURE
        finally:
            done.set()
        return 0


@contextlib.contextmanager
def _final_words(done: Event, max_restarts: int, found: dict[str, int]) -> Iterator[None]:
    """Inside, ranks that ended in a way that would repeat (a mistake, or a request to end) are not restarted: this
    launcher ends, too, and puts their exit code into `found` as `code`."""
    if not max_restarts:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="shardproof-") as folder:
        file = Path(folder) / FINAL
        os.environ[OF_LAUNCHER] = str(file)

        def look() -> None:
            while not done.wait(0.1):
                if file.exists() and (code := file.read_text()):
                    found["code"] = int(code)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return

        Thread(target=look, daemon=True).start()
        try:
            yield
        finally:
            del os.environ[OF_LAUNCHER]  # it is meant for ranks


def _has_children() -> bool:
    """Whether this process has children; True if that cannot be determined."""
    try:
        return any(file.read_text().strip() for file in Path("/proc/self/task").glob("*/children"))
    except OSError:
        return True


def _end_without(done: Event, host: str) -> None:
    """End after a machine is gone, if the ranks here cannot notice it: they have not met yet, or never will."""
    if done.is_set():
        return
    print(
        f"error: {host} is gone: its processes have ended, or the machine or the network is down. See its output.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    if not done.wait(10.0) and not _has_children():  # it waits inside torch, which does not handle signals
        os._exit(FAILURE)


def _mind_the_others(done: Event) -> None:
    """Close the launcher's connections to machines that fall silent, so that it does not wait for them."""
    from shardproof.zero.comm.connections import tcp_keepalive_everywhere

    while not done.wait(1.0):
        tcp_keepalive_everywhere()


def several() -> bool:
    """Whether this is a rank of a run on several machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 0) < int(os.environ.get("WORLD_SIZE") or 0)


class Start(NamedTuple):
    """A run as a rank would start it, and the problem that prevents it."""

    config: RunConfig
    problem: ShardproofError | None = None


def meet(first_time: Start, resumed: Start | None = None, restarts: int = 0) -> RunConfig:
    """Make the process group, and let every rank know what prevents another one from starting. Returns the run to
    start.

    If any rank has been restarted, all have, and they resume: torch counts restarts per machine, and not on machines
    whose own ranks were fine.

    Raises:
        ShardproofError: the problem of this rank, or of the first other rank that has one, with its machine.
        ConfigError: on all ranks; a machine differs from the first.
    """
    import torch.distributed as dist

    from shardproof.zero.comm.world import may_take_long, start_group

    use_own_interface(os.environ)
    resumed = resumed or first_time
    problem = (resumed if restarts else first_time).problem
    try:
        # Do not wait forever for a rank just to report a mistake.
        start_group(**({} if problem is None else {"timeout": timedelta(seconds=TOLD_WITHIN)}))
    except dist.DistError:
        if problem is None:
            raise
        raise problem from None
    config, refused = resumed if any(everyone(restarts)) else first_time
    # One rank of each machine checks it for all.
    looks = refused is None and os.environ.get("LOCAL_RANK", "0") == "0"
    mine = Machine.here(config, own_copies(config)) if looks else None
    hosts, said = names(), everyone((refused, mine))
    for host, (theirs, _) in zip(hosts, said, strict=True):
        if refused is None and theirs is not None:
            refused = type(theirs)(f"{host}: {theirs}")
    machines = [machine._replace(host=host) for host, (_, machine) in zip(hosts, said, strict=True) if machine]
    differences = (difference(machines[0], other) for other in machines[1:])
    if refused is None and (found := next(filter(None, differences), "")):
        refused = ConfigError(found)
    if refused is not None:
        dist.destroy_process_group()
        raise refused
    may_take_long(dist.group.WORLD)  # shortened above, if a rank had a problem before it knew that it resumes
    return config


def own_copies(config: RunConfig) -> list[str]:
    """The files and folders that each machine reads for itself."""
    named = [name for option in ("reward_funcs", "tools", "environments") for name in getattr(config, option, [])]
    files = [name.rpartition(":")[0] for name in named]
    return [*config.models, *config.external_plugins, *filter(None, files)]


def names() -> list[str]:
    """The machine name of each rank, with the rank if several launchers run on that machine. Collective."""
    places = everyone((socket.gethostname(), os.environ.get("GROUP_RANK")))
    launchers = Counter(host for host, _ in set(places))
    return [f"{host} (rank {rank})" if launchers[host] > 1 else host for rank, (host, _) in enumerate(places)]


def everyone(value: Any) -> list[Any]:
    """The values that all ranks passed, in order."""
    from shardproof.zero.comm.groups import all_gather_object

    return all_gather_object(None, value)


def check_shared(folder: Path, config: RunConfig) -> None:
    """Called by all ranks once rank 0 has made the folder of a run. If another machine does not see it, the ranks there
    send the data they hold to rank 0; their own records (a timeline, errors) go into a local folder of the same name.

    Raises:
        ConfigError: on all ranks; names a machine that does not see the folder although the run needs it.
    """
    import torch.distributed as dist

    from shardproof.checkpoint.elsewhere import blind

    hosts, without = names(), blind(folder.absolute(), dist.get_rank(), everyone)
    if not without:
        return
    restarts = config.max_restarts or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    needs = {
        "--max-restarts may bring rank 0 to another machine": restarts,
        f"shardproof {config.command} keeps rows there": config.command != "sft",
        f"--model {TINY} is created there": config.model == TINY,
    }
    if why := next((why for why, holds in needs.items() if holds), ""):
        dist.destroy_process_group()
        raise ConfigError(
            f"{hosts[without[0]]} does not see the folder {folder.absolute()} of {hosts[0]}, and {why}: choose an "
            "--output-dir on a file system that all machines share."
        )
    problem = ""
    if dist.get_rank() in without:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{hosts[dist.get_rank()]} cannot create the folder {folder}: {error.strerror or error}."
    if problem := next(filter(None, everyone(problem)), ""):
        dist.destroy_process_group()
        raise ConfigError(
            f"{problem} Ranks there write their errors into it: choose an --output-dir that every machine can create."
        )


def use_own_interface(environment: MutableMapping[str, str]) -> None:
    """Called by a rank with peers on other machines: have gloo listen at an address that they can reach."""
    if INTERFACE not in environment and environment.get("MASTER_ADDR"):
        name = _interface_of(own_address(environment["MASTER_ADDR"]))
        if name:
            environment[INTERFACE] = name


def own_address(master: str) -> str:
    """The address at which the machines that meet at `master` can reach this one.

    Raises:
        ConfigError: `master` cannot be resolved, or is this machine and has several addresses.
    """
    try:
        found = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={master}: {socket.gethostname()} cannot resolve this name ({error.strerror}).\n"
            "Give an address, or add the name to /etc/hosts."
        ) from None
    here = next((address for family, _, _, _, to in found if (address := _towards(family, to))), "")
    if not here:
        raise ConfigError(f"MASTER_ADDR={master}: there is no route from {socket.gethostname()} to {found[0][4][0]}.")
    if not ipaddress.ip_address(here).is_loopback or _means_loopback(master):
        return here
    others = [address for _, address in _interfaces() if not ipaddress.ip_address(address).is_loopback]
    default = _towards(socket.AF_INET, (_NOWHERE, 1))
    if default in others:
        return default
    if len(others) == 1:
        return others[0]
    raise ConfigError(
        f"MASTER_ADDR={master} is {here} on {socket.gethostname()}, which other machines cannot reach, and it is "
        f"unclear which of its addresses they can ({', '.join(others) or 'it has none'}). Set MASTER_ADDR to one of "
        "these."
    )


def _means_loopback(master: str) -> bool:
    try:
        return ipaddress.ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def _towards(family: int, to: tuple[object, ...]) -> str:
    """The address from which this machine connects to another one; empty if it cannot."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(to)
        return str(probe.getsockname()[0])
    return ""


def _interface_of(address: str) -> str:
    """The name of the interface with this IPv4 address; empty if there is none."""
    return next((name for name, its in _interfaces() if its == address), "")


def _interfaces() -> Iterator[tuple[str, str]]:
    """The interfaces with an IPv4 address, on Linux."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
