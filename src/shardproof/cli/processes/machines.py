"""Several machines: the same command runs on each, through torch's elastic launcher, and they meet at the first.

[Note: by which address the others see a machine]
gloo listens at the address that the machine's own name stands for. Debian and Ubuntu write 127.0.1.1 there, at
which nobody else finds it, and all ranks wait for each other. What the others can reach is the address from which this
machine talks to the one where all meet; only of that one itself, when its own name is such, another has to be found.
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
LAST_CALL = 15  # seconds in which more machines may come when there are enough
TOLD_WITHIN = 60  # seconds in which machines come to hear of a mistake
# Ranks that a signal has asked to end take their step to the end, and save. torch kills them after 30 s, unless it is
# told otherwise: 2.13 can be, 2.11 cannot.
PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(24 * 3600)
_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_NOWHERE = "198.51.100.1"  # an address for documentation; nothing is sent to it


class Machines(NamedTuple):
    """Several machines, as --nnodes, --node-rank, --master-addr and --master-port name them, or the variables NNODES,
    NODE_RANK, MASTER_ADDR and MASTER_PORT.

    Attributes:
        fewest: on how many of the `nodes` the run may go on.
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
            raise ConfigError(f"NNODES={nodes}: the fewest machines stand first, and there is one at least.")
        rank = number("NODE_RANK", "0")
        if high == 1:
            return None
        if low != high and not max_restarts:
            raise ConfigError(f"NNODES={nodes} means to go on without machines that are lost: add --max-restarts.")
        if not told.get("MASTER_ADDR"):
            raise ConfigError(
                f"NNODES={nodes} needs MASTER_ADDR too (--master-addr): the name or address of machine 0."
            )
        if not 0 <= rank < high:
            raise ConfigError(f"NODE_RANK={rank}: with NNODES={nodes} it goes from 0 to {high - 1}.")
        return Machines(low, high, rank, told["MASTER_ADDR"], number("MASTER_PORT", "29500"))

    def launch(self, argv: Sequence[str], nproc: int, max_restarts: int = 0) -> int:
        """Run the command `argv` of ours on `nproc` ranks of this machine, by torchrun; returns the exit code."""
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        os.environ.setdefault(*PATIENCE)  # a config of torch's looks for it
        # The agents must meet again after a restart; torch's static rendezvous would find the store of before.
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
        # Where ranks are started again, machines may come later, and go: torch's launchers see to that.
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
            hint = "The machine there (NODE_RANK=0) must run and be reached; without it no others go on."
            if "EADDRINUSE" in str(problem):
                what = f"MASTER_PORT={self.port} is taken on {socket.gethostname()}: another job or program is there."
                hint = "Name another one on all machines: --master-port."
            print(f"error: {what}\n{hint}", file=sys.stderr)
            return FAILURE
        finally:
            done.set()
        return 0


@contextlib.contextmanager
def _final_words(done: Event, max_restarts: int, found: dict[str, int]) -> Iterator[None]:
    """Inside, ranks that end and would end so again (a mistake, or they were asked to) are not started again: this
    launcher ends, too, and their exit code is put into `found` as `code`."""
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
            del os.environ[OF_LAUNCHER]  # it is for ranks


def _has_children() -> bool:
    """Whether this process has started others; True where nobody says so."""
    try:
        return any(file.read_text().strip() for file in Path("/proc/self/task").glob("*/children"))
    except OSError:
        return True


def _end_without(done: Event, host: str) -> None:
    """A machine is gone, and the ranks here have not found out: they do not know each other yet, or never will."""
    if done.is_set():
        return
    print(
        f"error: {host} is gone: its processes have ended, or the machine or the network is down. See what it says.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
    if not done.wait(10.0) and not _has_children():  # it waits inside of torch, which hears no signals
        os._exit(FAILURE)


def _mind_the_others(done: Event) -> None:
    """The launcher's connections to other machines end when these fall silent, so that it does not wait for them."""
    from shardproof.zero.comm.connections import tcp_keepalive_everywhere

    while not done.wait(1.0):
        tcp_keepalive_everywhere()


def several() -> bool:
    """Whether this is a rank of a run on several machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 0) < int(os.environ.get("WORLD_SIZE") or 0)


class Start(NamedTuple):
    """A run as a rank would begin it, and what keeps it from that."""

    config: RunConfig
    problem: ShardproofError | None = None


def meet(first_time: Start, resumed: Start | None = None, restarts: int = 0) -> RunConfig:
    """Make the process group, and let every rank know what keeps another one from starting. Returns what they begin.

    Where any rank has been started again they all have, and resume: torch counts that by machine, and not on those
    whose own ranks were in order.

    Raises:
        ShardproofError: that of this rank, or of the first other one that has one, with its machine.
        ConfigError: on all ranks; a machine is not like the first.
    """
    import torch.distributed as dist

    from shardproof.zero.comm.world import may_take_long, start_group

    use_own_interface(os.environ)
    resumed = resumed or first_time
    problem = (resumed if restarts else first_time).problem
    try:
        # Nobody is waited for without end only to be told of a mistake.
        start_group(**({} if problem is None else {"timeout": timedelta(seconds=TOLD_WITHIN)}))
    except dist.DistError:
        if problem is None:
            raise
        raise problem from None
    config, refused = resumed if any(everyone(restarts)) else first_time
    # One rank of a machine looks at it for all.
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
    may_take_long(dist.group.WORLD)  # a problem of who does not know yet that it resumes has made the limit short
    return config


def own_copies(config: RunConfig) -> list[str]:
    """What each machine reads by itself, where it is a file or a folder."""
    named = [name for option in ("reward_funcs", "tools", "environments") for name in getattr(config, option, [])]
    files = [name.rpartition(":")[0] for name in named]
    return [*config.models, *config.external_plugins, *filter(None, files)]


def names() -> list[str]:
    """Of each rank the name of its machine; where several launchers are at work on one, with the rank. Collective."""
    places = everyone((socket.gethostname(), os.environ.get("GROUP_RANK")))
    launchers = Counter(host for host, _ in set(places))
    return [f"{host} (rank {rank})" if launchers[host] > 1 else host for rank, (host, _) in enumerate(places)]


def everyone(value: Any) -> list[Any]:
    """What each rank passed, in order."""
    from shardproof.zero.comm.groups import all_gather_object

    return all_gather_object(None, value)


def check_shared(folder: Path, config: RunConfig) -> None:
    """Of all ranks, when rank 0 has made the folder of a run. Where another machine does not see it, its ranks send
    what they hold to rank 0; what they say of themselves (a timeline, errors) lies in a folder of that name there.

    Raises:
        ConfigError: on all ranks; names a machine that does not see it where the run needs that.
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
        f"--model {TINY} is made there": config.model == TINY,
    }
    if why := next((why for why, holds in needs.items() if holds), ""):
        dist.destroy_process_group()
        raise ConfigError(
            f"{hosts[without[0]]} does not see the folder {folder.absolute()} of {hosts[0]}, and {why}: name an "
            "--output-dir on a file system that all machines share."
        )
    problem = ""
    if dist.get_rank() in without:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            problem = f"{hosts[dist.get_rank()]} cannot make the folder {folder}: {error.strerror or error}."
    if problem := next(filter(None, everyone(problem)), ""):
        dist.destroy_process_group()
        raise ConfigError(f"{problem} Ranks there write their errors into it: name an --output-dir that all can make.")


def use_own_interface(environment: MutableMapping[str, str]) -> None:
    """Of a rank that others on other machines wait for: have gloo listen where they find it."""
    if INTERFACE not in environment and environment.get("MASTER_ADDR"):
        name = _interface_of(own_address(environment["MASTER_ADDR"]))
        if name:
            environment[INTERFACE] = name


def own_address(master: str) -> str:
    """By which this machine is found by those that meet at `master`.

    Raises:
        ConfigError: nobody knows `master`, or it is this machine and has several addresses.
    """
    try:
        found = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR={master}: {socket.gethostname()} knows no machine of that name ({error.strerror}).\n"
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
        f"MASTER_ADDR={master} is {here} on {socket.gethostname()}, at which no other machine finds it, and which of "
        f"its addresses they use cannot be told ({', '.join(others) or 'it has none'}). Give MASTER_ADDR one of these."
    )


def _means_loopback(master: str) -> bool:
    try:
        return ipaddress.ip_address(master).is_loopback
    except ValueError:
        return master == "localhost"


def _towards(family: int, to: tuple[object, ...]) -> str:
    """The address from which this machine talks to another one; nothing where it cannot."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(to)
        return str(probe.getsockname()[0])
    return ""


def _interface_of(address: str) -> str:
    """The name of the interface that has an address of version 4; nothing if none is found."""
    return next((name for name, its in _interfaces() if its == address), "")


def _interfaces() -> Iterator[tuple[str, str]]:
    """The interfaces with an address of version 4, on Linux."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])
