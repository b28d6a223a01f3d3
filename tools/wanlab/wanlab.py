#!/usr/bin/env python3
"""wanlab - a wide-area network in a box, for testing programs that train over the internet.

It makes network namespaces ("sites") on one Linux machine and joins them through a router
namespace in which every ordered pair of sites has its own one-way delay, jitter, loss and rate,
and every site its own uplink and downlink.  Links can be cut, slowed and healed while programs
run.  Nothing it makes is connected to the machine's real network, so nothing outside can ever be
reached from inside a site.

Why it does not use `tc netem`: many kernels built for small VMs lack it (and cannot load modules).
The path is emulated by `wanlinkd.c` next to this file, which holds packets in NFQUEUE and releases
them when they are due (its head comment says how).  Needed: root, iproute2, iptables, a C compiler
and the Linux headers.  Debian: apt-get install iproute2 iptables gcc libc6-dev

    wanlab.py presets                       list the ready-made networks
    wanlab.py up PRESET|FILE.json           build one (a lab of the same name is taken down first)
    wanlab.py status [--json]               sites, links, counters, health of the emulator
    wanlab.py run [-t SEC] SITE CMD...      run a command at a site ("eu", or "eu.1" for its second host)
    wanlab.py cut SITE [OTHER]              silent black hole; --oneway: only SITE -> OTHER; --reject: RST/ICMP
    wanlab.py unplug SITE | plug SITE       the site's own interface down / up (a pulled cable)
    wanlab.py slow SITE RATE[/DOWN]         new uplink[/downlink] rate;  slow A B RATE  for one pair
    wanlab.py link A B key=value...         rtt_ms delay_ms jitter_ms loss burst rate queue_ms, while it runs
    wanlab.py natflush SITE                 the site's NAT forgets all its mappings (a rebooted router)
    wanlab.py heal [SITE [OTHER]]           undo cut / slow / link: back to what `up` set
    wanlab.py check [--rate]                measure what a program gets: RTT, loss (and TCP rate) per pair
    wanlab.py down                          remove everything this lab made, and only that
    wanlab.py down --stale                  the same for each lab whose Python program is gone without cleaning up
    wanlab.py selftest                      the emulator's own test (about 15 s); closes on "N passed, N failed"

Every verb takes --name NAME (default "lab"): labs of different names do not see each other.

A network file is JSON:
    {"sites":   {"us": {"up": "1gbit", "down": "1gbit", "hosts": 2},
                 "me": {"up": "10mbit", "down": "50mbit", "nat": "cone", "queue_ms": 200}},
     "default": {"rtt_ms": 80, "jitter_ms": 1, "loss": 0.0001, "rate": "500mbit"},
     "links":   [{"a": "us", "b": "me", "rtt_ms": 30}]}
  site keys:  up, down (0 or absent: no limit), queue_ms (longest queueing wait, 50), hosts (1),
              nat: none | cone (port-restricted, keeps ports) | fullcone | symmetric
  link keys:  rtt_ms or delay_ms (one way), jitter_ms, loss (0..1), burst (mean packets a loss burst),
              rate, queue_ms; "oneway": true sets a -> b only.

From Python:
    with Lab(preset("two-continents")) as lab:
        p = lab.popen("us", [sys.executable, "train.py"]); lab.cut("eu"); ...
"""
import argparse
import atexit
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
STATE = os.environ.get("WANLAB_STATE", "/run/wanlab")   # one JSON file a lab, the built daemon, sockets
MTU = 1500


# ------------------------------------------------------------------------------------ networks

def _full(names, **default):
    return {"sites": {n: {} for n in names}, "default": default, "links": []}


def preset(name):
    """A ready-made network as a dict (see the module's text for its keys)."""
    if name not in PRESETS:
        raise SystemExit(f"no preset {name!r}; there are: {', '.join(PRESETS)}")
    return json.loads(json.dumps(PRESETS[name][1]))


def _us_eu_asia():
    # Eight sites on three continents.  Rates span the 0.5 to 4 Gbit/s reported for runs like INTELLECT-1
    # (arXiv 2412.01152), lower to Asia; they, the losses and the round trips are plausible, not measured.
    # The full rates add up to more than packet mode carries on two cores: use `--gso`, or fewer flows at once.
    net = _full(["us1", "us2", "us3", "us4", "eu1", "eu2", "eu3", "as1"])
    rtt = {("us", "us"): 35, ("eu", "eu"): 20, ("eu", "us"): 95, ("as", "us"): 170, ("as", "eu"): 220}
    rate = {("us", "us"): "4gbit", ("eu", "eu"): "2gbit", ("eu", "us"): "800mbit",
            ("as", "us"): "500mbit", ("as", "eu"): "300mbit"}
    loss = {("us", "us"): 0.00001, ("eu", "eu"): 0.00001, ("eu", "us"): 0.0001,
            ("as", "us"): 0.0003, ("as", "eu"): 0.0005}
    names = list(net["sites"])
    for i, a in enumerate(names):
        for b in names[i + 1:]:
            k = tuple(sorted((a[:2], b[:2])))
            net["links"].append({"a": a, "b": b, "rtt_ms": rtt[k], "rate": rate[k], "loss": loss[k], "jitter_ms": 1})
    return net


def _home():
    # Three homes (30 ms to each other and to a public server, asymmetric, a deep modem queue, NAT).
    net = _full(["h1", "h2", "h3", "srv"], rtt_ms=30, jitter_ms=2, loss=0.0002)
    for h, nat in (("h1", "cone"), ("h2", "cone"), ("h3", "symmetric")):
        net["sites"][h] = {"up": "10mbit", "down": "50mbit", "queue_ms": 200, "nat": nat}
    net["sites"]["srv"] = {"up": "1gbit", "down": "1gbit"}
    return net


PRESETS = {
    "lan": ("2 sites, 0.2 ms, 1 Gbit/s, no loss: the control", _full(["a", "b"], rtt_ms=0.2, rate="1gbit")),
    "two-continents": ("2 sites, 80 ms, 200 Mbit/s, no loss",
                       _full(["us", "eu"], rtt_ms=80, rate="200mbit")),
    "four-continents": ("4 sites, 80 ms, 200 Mbit/s per pair, no loss",
                        _full(["s0", "s1", "s2", "s3"], rtt_ms=80, rate="200mbit")),
    "us-eu-asia": ("8 sites, 20-220 ms, 0.3-4 Gbit/s, light loss (like INTELLECT-1; use --gso)", _us_eu_asia()),
    "home": ("3 homes 50/10 Mbit/s behind NAT + a public server, 30 ms", _home()),
    "lossy": ("2 sites, 150 ms, 200 Mbit/s, 1 % loss", _full(["a", "b"], rtt_ms=150, rate="200mbit", loss=0.01, jitter_ms=2)),
    "satellite": ("2 sites, 40 ms, 100/15 Mbit/s at b, bursty loss, jitter",
                  {"sites": {"a": {"up": "1gbit", "down": "1gbit"}, "b": {"up": "15mbit", "down": "100mbit", "queue_ms": 100}},
                   "default": {"rtt_ms": 40, "jitter_ms": 5, "loss": 0.003, "burst": 8}, "links": []}),
}


def rate_bps(v):
    """'200mbit', '1.5gbit', '56kbit' or a number of bit/s; 0 is no limit."""
    if isinstance(v, (int, float)):
        return float(v)
    m = re.fullmatch(r"\s*([0-9.]+)\s*([kmg]?)(?:bit|bps|bit/s)?\s*", str(v).lower())
    if not m:
        raise ValueError(f"not a rate: {v!r} (try 200mbit)")
    return float(m[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[m[2]]


def show_rate(bps):
    if not bps:
        return "-"
    for unit, f in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bps >= f:
            return f"{bps / f:g}{unit}"
    return f"{bps:g}"


LINK_KEYS = ("delay_ms", "jitter_ms", "loss", "burst", "rate", "queue_ms")


def link_params(d):
    """The keys of one link as the numbers the emulator takes; unknown keys are an error."""
    out = {}
    for k, v in d.items():
        if k in ("a", "b", "oneway"):
            continue
        if k == "rtt_ms":
            out["delay_ms"] = float(v) / 2
        elif k == "rate":
            out["rate"] = rate_bps(v)
        elif k in LINK_KEYS:
            out[k] = float(v)
        else:
            raise ValueError(f"unknown link key {k!r}")
    if not 0 <= out.get("loss", 0) < 1:
        raise ValueError("loss is a probability from 0 to below 1")
    return out


# ------------------------------------------------------------------------------------ small helpers

def sh(*cmd, check=True, stdin=None):
    r = subprocess.run(cmd, text=True, input=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if check and r.returncode:
        raise RuntimeError(f"{' '.join(cmd)}: {r.stderr.strip() or r.returncode}")
    return r.stdout


def ip_batch(lines, ns=None):
    """Many `ip` commands in one process (a start of `ip` costs more than the command)."""
    sh("ip", *(["-n", ns] if ns else []), "-batch", "-", stdin="\n".join(lines) + "\n")


def own_cpu():
    """The processor that the emulator keeps to, if there is another for those it serves."""
    cpus = os.sched_getaffinity(0)
    return min(cpus) if len(cpus) > 1 else None


def cpu_mask(cpus):
    """As the kernel reads sets of processors: hexadecimal, a comma before each 32 bits."""
    bits = sum(1 << c for c in cpus)
    words = []
    while True:
        words.insert(0, f"{bits & 0xffffffff:08x}")
        bits >>= 32
        if not bits:
            return ",".join(words)


def build_daemon():
    src = os.path.join(HERE, "wanlinkd.c")
    with open(src, "rb") as f:
        tag = hashlib.sha256(f.read()).hexdigest()[:12]
    exe = os.path.join(STATE, f"wanlinkd-{tag}")
    if not os.path.exists(exe):
        tmp = f"{exe}.{os.getpid()}"
        sh(os.environ.get("CC", "cc"), "-O2", "-o", tmp, src, "-lm")
        os.replace(tmp, exe)
    return exe


def proc_is(pid, start):
    """Whether pid is still the process we started (same start time, so never a reused number)."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[19] == start
    except OSError:
        return False


def proc_start(pid):
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rsplit(")", 1)[1].split()[19]


@contextlib.contextmanager
def allow_cc(cc):
    """A child namespace may only default to an algorithm on the host's allowed list, which has just the
    host's own default and reno.  The list is put back: a namespace keeps what it was given."""
    f = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
    with open(os.path.join(STATE, "cc.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(f) as h:
            old = h.read().strip()
        if cc in old.split():
            yield
            return
        with open(f, "w") as h:
            h.write(f"{old} {cc}")
        try:
            yield
        finally:
            with open(f, "w") as h:
                h.write(old)


# Socket-buffer limits of a site's TCP.  "stock": what an untouched Linux server has; "tuned": room for
# the bandwidth-delay product of a long fast path; "keep": whatever this machine has.
BUFS = {"stock": ("4096 131072 6291456", "4096 16384 4194304"),
        "tuned": ("4096 131072 134217728", "4096 65536 134217728")}


# ------------------------------------------------------------------------------------ the lab

class Lab:
    """One emulated network.  `up()` builds it, `down()` removes all of it; also a context manager."""

    def __init__(self, net=None, name="lab", cc="cubic", bufs="stock", gso=False, tick_us=250, seed=1):
        if not re.fullmatch(r"[a-z0-9]{1,12}", name):
            raise ValueError("a lab's name is 1 to 12 of a-z and 0-9")
        self.name, self.net = name, net
        self.opt = {"cc": cc, "bufs": bufs, "gso": gso, "tick_us": tick_us, "seed": seed}
        self.pre = f"wl-{name}-"
        self.file = os.path.join(STATE, f"{name}.json")
        self.sock = os.path.join(STATE, f"{name}.sock")
        self.st = None
        self.owner = None          # [pid, start] of the process whose end is the lab's end
        self._ctl = None
        self._daemon = None        # the emulator, if this program started it

    # ---- life cycle

    def __enter__(self):
        # A test runner that is told to stop should still clean up; and whatever is left by one that was
        # killed outright is found by its owner's absence (`wanlab.py down --stale`).
        self.owner = [os.getpid(), proc_start(os.getpid())]
        with contextlib.suppress(ValueError):               # only the main thread may set handlers
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            return self.up()
        except BaseException:
            self.down()
            raise

    def __exit__(self, *exc):
        self.down()

    @contextlib.contextmanager
    def _locked(self):
        os.makedirs(STATE, exist_ok=True)
        with open(os.path.join(STATE, f"{self.name}.lock"), "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield

    def _save(self):
        tmp = self.file + ".tmp"
        with open(tmp, "w") as f:
            json.dump(self.st, f)
        os.replace(tmp, self.file)

    def load(self):
        """Attach to a lab that an earlier command built."""
        try:
            with open(self.file) as f:
                self.st = json.load(f)
        except FileNotFoundError:
            raise SystemExit(f"no lab {self.name!r} is up (wanlab.py up PRESET)") from None
        self.opt = self.st["opt"]
        return self

    def up(self):
        if os.geteuid():
            raise SystemExit("wanlab needs root")
        for tool in ("ip", "iptables-restore", os.environ.get("CC", "cc")):
            if not shutil.which(tool):
                raise SystemExit(f"wanlab needs {tool}: apt-get install iproute2 iptables gcc libc6-dev")
        names = list(self.net["sites"])
        if not 2 <= len(names) <= 64 or any(not re.fullmatch(r"[a-z][a-z0-9]{0,9}", n) for n in names):
            raise SystemExit("2 to 64 sites, each named with a letter then letters and digits")
        # the whole matrix as numbers, before anything is made
        blank = {"delay_ms": 0.0, "jitter_ms": 0.0, "loss": 0.0, "burst": 1.0, "rate": 0.0, "queue_ms": 50.0}
        base = {**blank, **link_params(self.net.get("default", {}))}
        pairs = {(a, b): dict(base) for a in names for b in names if a != b}
        for ln in self.net.get("links", []):
            pairs[ln["a"], ln["b"]].update(link_params(ln))
            if not ln.get("oneway"):
                pairs[ln["b"], ln["a"]].update(link_params(ln))
        with self._locked():
            self._down()
            exe = build_daemon()
            sites = {}
            for i, n in enumerate(names):
                d = self.net["sites"][n]
                unknown = set(d) - {"up", "down", "queue_ms", "hosts", "nat"}
                if unknown:
                    raise SystemExit(f"unknown site key {unknown}")
                nat = d.get("nat", "none")
                sites[n] = {"i": i, "up": rate_bps(d.get("up", 0)), "down": rate_bps(d.get("down", 0)),
                            "queue_ms": float(d.get("queue_ms", 50)), "hosts": int(d.get("hosts", 1)), "nat": nat}
            self.st = {"opt": self.opt, "sites": sites, "pairs": {f"{a}>{b}": p for (a, b), p in pairs.items()},
                       "ns": [], "daemon": None, "reject": [], "owner": self.owner, "own_cpu": own_cpu()}
            self._save()                        # from here on `down` knows what to remove
            with allow_cc(self.opt["cc"]):
                self._build(exe)
            self._save()
        return self

    def _ns(self, site):
        name = self.pre + site
        self.st["ns"].append(name)
        self._save()
        sh("ip", "netns", "add", name)
        ip_batch(["link set lo up"], name)
        return name

    def _sysctl(self, ns, **kv):
        sh("ip", "netns", "exec", ns, "sysctl", "-qw", *[f"{k}={v}" for k, v in kv.items()])

    def _build(self, exe):
        r = self._ns("router")
        self._sysctl(r, **{"net.ipv4.ip_forward": 1, "net.ipv4.conf.all.rp_filter": 0, "net.ipv4.conf.default.rp_filter": 0})
        with contextlib.suppress(RuntimeError):       # bridged frames must not meet the FORWARD chain
            self._sysctl(r, **{"net.bridge.bridge-nf-call-iptables": 0})
        hosts_lines = ["127.0.0.1 localhost"]
        for n, s in self.st["sites"].items():
            for h in range(s["hosts"]):
                hosts_lines.append(f"{self.public(n, h)} {n if h == 0 else f'{n}.{h}'}")
        for n, s in self.st["sites"].items():
            self._build_site(n, s, r)
        # names of the other sites, and no DNS, for everything that runs at a site
        for ns in self.st["ns"]:
            d = f"/etc/netns/{ns}"
            os.makedirs(d, exist_ok=True)
            mine = ns[len(self.pre):]
            own = [f"{self.addr(mine)} {mine}"] if mine in self._all_hosts() else []
            with open(f"{d}/hosts", "w") as f:
                f.write("\n".join(own + hosts_lines) + "\n")
            with open(f"{d}/resolv.conf", "w") as f:
                f.write("# no name service in a lab\n")
        # one chain a source, one NFQUEUE number an ordered pair
        n = len(self.st["sites"])
        rules = ["*filter", ":FORWARD ACCEPT [0:0]"] + [f":from{s['i']} - [0:0]" for s in self.st["sites"].values()]
        for s in self.st["sites"].values():
            rules.append(f"-A FORWARD -i s{s['i']} -j from{s['i']}")
            for d in self.st["sites"].values():
                if d["i"] != s["i"]:
                    rules.append(f"-A from{s['i']} -d 10.77.{d['i'] + 1}.0/24 -j NFQUEUE --queue-num {s['i'] * n + d['i']}")
        sh("ip", "netns", "exec", r, "iptables-restore", "-w", stdin="\n".join(rules + ["COMMIT", ""]))
        log = os.path.join(STATE, f"{self.name}.log")
        args = [exe, "-t", str(self.opt["tick_us"]), "-s", str(self.opt["seed"])] + (["-g"] if self.opt["gso"] else [])
        with open(log, "w") as f:
            p = subprocess.Popen(["ip", "netns", "exec", r] + args + [str(n), self.sock], stdin=subprocess.DEVNULL,
                                 stdout=f, stderr=f, start_new_session=True)     # `ip netns exec` execs: same pid
        self._daemon = p
        if self.st["own_cpu"] is not None:
            os.sched_setaffinity(p.pid, {self.st["own_cpu"]})
        self.st["daemon"] = [p.pid, proc_start(p.pid)]
        self._save()
        for _ in range(60):
            if p.poll() is not None:
                with open(log) as f:
                    raise RuntimeError(f"wanlinkd ended: {f.read().strip()}")
            with contextlib.suppress(OSError):
                if self.ctl("ping") == "ok":
                    break
            time.sleep(0.05)
        else:
            raise RuntimeError("wanlinkd does not answer")
        self.heal()

    def _build_site(self, n, s, r):
        k, multi = s["i"] + 1, s["hosts"] > 1
        rif, net, gate = f"s{s['i']}", f"10.77.{k}", f"10.77.{k}.1"
        where, up_if = r, rif                                   # where the site's own LAN hangs
        if s["nat"] != "none":
            g = self._ns(f"{n}.gw")
            ip_batch([f"link add out0 netns {g} type veth peer name {rif} netns {r}"])
            ip_batch([f"addr add {net}.2/24 dev out0", "link set out0 up", f"route add default via {gate}"], g)
            ip_batch([f"addr add {gate}/24 dev {rif}", f"link set {rif} up"], r)
            self._nat(g, n, s)
            net = f"192.168.{k}"
            gate, where, up_if = f"{net}.1", g, "in0"
        if multi:
            ip_batch([f"link add {up_if} type bridge", f"addr add {gate}/24 dev {up_if}", f"link set {up_if} up"], where)
        for h in range(s["hosts"]):
            ns = self._ns(n if h == 0 else f"{n}.{h}")
            port = f"p{s['i']}h{h}" if multi else up_if
            ip_batch([f"link add wan0 netns {ns} type veth peer name {port} netns {where}"])
            if multi:
                ip_batch([f"link set {port} master {up_if} up"], where)
            else:
                ip_batch([f"addr add {gate}/24 dev {port}", f"link set {port} up"], where)
            ip_batch([f"addr add {self.addr(n, h)}/24 dev wan0", "link set wan0 up", f"route add default via {gate}"], ns)
            kv = {"net.ipv4.tcp_congestion_control": self.opt["cc"],
                  "net.ipv4.tcp_no_metrics_save": 1}       # or one run's ssthresh would shape the next
            if self.opt["bufs"] in BUFS:
                kv["net.ipv4.tcp_rmem"], kv["net.ipv4.tcp_wmem"] = BUFS[self.opt["bufs"]]
            self._sysctl(ns, **kv)
            self._receive_elsewhere(ns)

    def _receive_elsewhere(self, ns):
        """What is delivered to a site is received on the other processors (RPS), as a site of its own would.
        Otherwise the emulator's process does its TCP too, since delivery ends in the receiver's socket: at
        0.8 Gbit/s between four sites that alone made it 100 ms late."""
        own = self.st["own_cpu"]
        if own is None:
            return
        others = cpu_mask(c for c in os.sched_getaffinity(0) if c != own)
        try:
            sh("ip", "netns", "exec", ns, "sh", "-c", f"echo {others} > /sys/class/net/wan0/queues/rx-0/rps_cpus")
        except RuntimeError:                          # a kernel without RPS; `status` says so
            self.st["own_cpu"] = None

    def _nat(self, g, n, s):
        self._sysctl(g, **{"net.ipv4.ip_forward": 1})
        with contextlib.suppress(RuntimeError):
            self._sysctl(g, **{"net.bridge.bridge-nf-call-iptables": 0})
        inside = f"192.168.{s['i'] + 1}"
        nat, fil = ["*nat"], ["*filter"]
        if s["nat"] == "symmetric":     # a new outside port for every destination
            nat.append(f"-A POSTROUTING -o out0 -s {inside}.0/24 -j MASQUERADE --random-fully")
        elif s["nat"] in ("cone", "fullcone"):
            nat.append(f"-A POSTROUTING -o out0 -s {inside}.0/24 -j MASQUERADE")
            if s["nat"] == "fullcone":    # anyone outside may use a mapping: here simply forward all to host 0
                nat.append(f"-A PREROUTING -i out0 -p udp -j DNAT --to-destination {self.addr(n)}")
                nat.append(f"-A PREROUTING -i out0 -p tcp -j DNAT --to-destination {self.addr(n)}")
        else:
            raise SystemExit(f"unknown nat {s['nat']!r}")
        if s["nat"] != "fullcone":
            fil += ["-A FORWARD -i out0 -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", "-A FORWARD -i out0 -j DROP",
                    # An unexpected datagram must not become a conntrack entry of the gateway's own: it would
                    # take the very port pair that a hole-punching host inside is about to use.
                    "-A INPUT -i out0 -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", "-A INPUT -i out0 -j DROP"]
        sh("ip", "netns", "exec", g, "iptables-restore", "-w", stdin="\n".join(nat + ["COMMIT"] + fil + ["COMMIT", ""]))

    def down(self):
        with self._locked():
            self._down()

    def _down(self):
        self._ctl_close()
        self._remove()

    def _remove(self):
        """Removes exactly what the state file (or, if it was lost, the name's prefix) says is ours."""
        names = []
        with contextlib.suppress(FileNotFoundError, ValueError):
            with open(self.file) as f:
                st = json.load(f)
            names = st["ns"]
            if st.get("daemon") and proc_is(*st["daemon"]):
                os.kill(st["daemon"][0], signal.SIGTERM)
        if os.path.isdir("/run/netns"):
            names += [n for n in os.listdir("/run/netns") if n.startswith(self.pre) and n not in names]
        for sig in (signal.SIGTERM, signal.SIGKILL):      # whatever still runs inside our namespaces
            alive = [p for n in names if os.path.exists(f"/run/netns/{n}")
                     for p in sh("ip", "netns", "pids", n, check=False).split()]
            for p in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(p), sig)
            if not alive:
                break
            for _ in range(20):
                if not any(os.path.exists(f"/proc/{p}") for p in alive):
                    break
                time.sleep(0.05)
        for n in names:
            if os.path.exists(f"/run/netns/{n}"):
                sh("ip", "netns", "del", n)               # takes its veths, bridges and rules with it
            shutil.rmtree(f"/etc/netns/{n}", ignore_errors=True)
        if self._daemon is not None:
            self._daemon.wait(5)
            self._daemon = None
        with contextlib.suppress(OSError):
            os.rmdir("/etc/netns")                        # only if empty
        left = [f for f in os.listdir(STATE) if re.fullmatch(rf"{self.name}\.\d+\.[0-9a-f]+\.c", f)]   # of killed programs
        for f in (self.file, self.sock, os.path.join(STATE, f"{self.name}.log"), *[os.path.join(STATE, f) for f in left]):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f)
        self.st = None

    # ---- addresses, processes

    def _all_hosts(self):
        return [n if h == 0 else f"{n}.{h}" for n, s in self.st["sites"].items() for h in range(s["hosts"])]

    def _site(self, name, host=0):
        base, _, h = name.partition(".")
        if base not in self.st["sites"]:
            raise SystemExit(f"no site {name!r}; there are: {', '.join(self._all_hosts())}")
        return base, self.st["sites"][base], int(h) if h.isdigit() else host

    def addr(self, name, host=0):
        """The address a program at that host binds (a private one behind NAT)."""
        _, s, h = self._site(name, host)
        return f"10.77.{s['i'] + 1}.{2 + h}" if s["nat"] == "none" else f"192.168.{s['i'] + 1}.{10 + h}"

    def public(self, name, host=0):
        """The address the other sites see."""
        _, s, h = self._site(name, host)
        return f"10.77.{s['i'] + 1}.{2 + h if s['nat'] == 'none' else 2}"

    def command(self, site, cmd):
        base = site.partition(".")[0]
        self._site(base)
        if site not in self._all_hosts() and not site.endswith(".gw"):
            raise SystemExit(f"no host {site!r}; there are: {', '.join(self._all_hosts())}")
        return ["ip", "netns", "exec", self.pre + site] + list(cmd)

    def env(self, site):
        return {**os.environ, "WANLAB": self.name, "WANLAB_SITE": site, "WANLAB_ADDR": self.addr(site),
                "GLOO_SOCKET_IFNAME": "wan0", "TP_SOCKET_IFNAME": "wan0", "NCCL_SOCKET_IFNAME": "wan0"}

    def popen(self, site, cmd, **kw):
        return subprocess.Popen(self.command(site, cmd), env={**self.env(site), **kw.pop("env", {})}, **kw)

    def run(self, site, cmd, timeout=None, **kw):
        """Runs a command at a site to its end: (exit status, stdout + stderr); killed with its children at the timeout (124)."""
        with self.popen(site, cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, **kw) as p:
            try:
                out = p.communicate(timeout=timeout)[0]
                return p.returncode, out
            except subprocess.TimeoutExpired:
                os.killpg(p.pid, signal.SIGKILL)
                return 124, p.communicate()[0]

    # ---- faults and changes

    def ctl(self, line):
        if self._ctl is None:
            # A path, not an abstract name: those are private to a network namespace, and the daemon is in another.
            self._ctl = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._ctl_path = os.path.join(STATE, f"{self.name}.{os.getpid()}.{id(self):x}.c")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._ctl_path)
            self._ctl.bind(self._ctl_path)
            self._ctl.settimeout(2)
            atexit.register(self._ctl_close)
        self._ctl.sendto(line.encode(), self.sock)
        return self._ctl.recv(1 << 20).decode()

    def _ctl_close(self):
        if self._ctl is not None:
            self._ctl.close()
            self._ctl = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._ctl_path)

    def _ok(self, line):
        r = self.ctl(line)
        if r != "ok":
            raise RuntimeError(f"wanlinkd: {line!r}: {r}")

    def _set(self, a, b, p):
        i, j = self.st["sites"][a]["i"], self.st["sites"][b]["i"]
        kv = {}
        for k, v in p.items():
            kv[{"delay_ms": "delay_us", "jitter_ms": "jitter_us"}.get(k, k)] = v * 1000 if k in ("delay_ms", "jitter_ms") else v
        self._ok(f"pair {i} {j} " + " ".join(f"{k}={v:.10g}" for k, v in kv.items()))

    def _pairs(self, a=None, b=None, oneway=False):
        for x in (a, b):
            if x is not None:
                self._site(x)
        for k in self.st["pairs"]:
            s, d = k.split(">")
            if a is None or (b is None and (s == a or (d == a and not oneway))) or \
                    (b is not None and ((s, d) == (a, b) or (not oneway and (s, d) == (b, a)))):
                yield s, d

    def cut(self, a, b=None, oneway=False, reject=False):
        """Black hole: packets vanish, as when a path fails.  reject: they are refused with RST/ICMP."""
        if reject:
            i, j = f"s{self._site(a)[1]['i']}", f"s{self._site(b)[1]['i']}" if b else None
            ways = [(i, j)] if oneway else [(i, j), (j, i)]
            for x, y in ways:
                sel = (["-i", x] if x else []) + (["-o", y] if y else [])
                for tail in (["-p", "tcp", "-j", "REJECT", "--reject-with", "tcp-reset"],
                             ["!", "-p", "tcp", "-j", "REJECT", "--reject-with", "icmp-host-unreachable"]):
                    rule = sel + tail
                    sh("ip", "netns", "exec", self.pre + "router", "iptables", "-w", "-I", "FORWARD", *rule)
                    self.st["reject"].append([a, b, rule])
            self._save()
            return
        for s, d in self._pairs(a, b, oneway):
            self._set(s, d, {"cut": 1})

    def heal(self, a=None, b=None):
        """Back to the network as it was built (for all, one site, or one pair)."""
        for s, d in self._pairs(a, b):
            self._set(s, d, {**self.st["pairs"][f"{s}>{d}"], "cut": 0})
        for n, s in self.st["sites"].items():
            if b is None and a in (None, n):
                self._ok(f"site {s['i']} up={s['up']:.10g} down={s['down']:.10g} queue_ms={s['queue_ms']:.10g}")
        keep = []
        for x, y, rule in self.st["reject"]:
            if a is None or a in (x, y):
                sh("ip", "netns", "exec", self.pre + "router", "iptables", "-w", "-D", "FORWARD", *rule)
            else:
                keep.append([x, y, rule])
        self.st["reject"] = keep
        self._save()

    def slow(self, a, *rest):
        """slow(site, rate[/down])  or  slow(site, other, rate): 0 is no limit."""
        if len(rest) == 1:
            up, _, down = str(rest[0]).partition("/")
            self._ok(f"site {self._site(a)[1]['i']} up={rate_bps(up):.10g} down={rate_bps(down or up):.10g}")
        else:
            for s, d in self._pairs(a, rest[0]):
                self._set(s, d, {"rate": rate_bps(rest[1])})

    def link(self, a, b, oneway=False, **kv):
        for s, d in self._pairs(a, b, oneway):
            self._set(s, d, link_params(kv))

    def natflush(self, site):
        if self._site(site)[1]["nat"] == "none":
            raise SystemExit(f"{site} has no NAT")
        if not shutil.which("conntrack"):
            raise SystemExit("natflush needs conntrack: apt-get install conntrack")
        sh("ip", "netns", "exec", f"{self.pre}{site}.gw", "conntrack", "-F")

    def unplug(self, site):
        ip_batch(["link set wan0 down"], self.pre + site)

    def plug(self, site):
        base, s, _ = self._site(site)
        gate = f"10.77.{s['i'] + 1}.1" if s["nat"] == "none" else f"192.168.{s['i'] + 1}.1"
        ip_batch(["link set wan0 up", f"route replace default via {gate}"], self.pre + site)

    # ---- what is going on

    def stats(self):
        d = json.loads(self.ctl("stats"))
        names = list(self.st["sites"])
        keys = ("in_pkts", "in_bytes", "out_pkts", "out_bytes", "lost", "tail_dropped", "cut_dropped", "max_wait_ms", "cut")
        d["pairs"] = {f"{names[p[0]]}>{names[p[1]]}": dict(zip(keys, p[2:])) for p in d["pairs"]}
        drop = 0                                            # packets the kernel could not hand to the emulator
        for line in sh("ip", "netns", "exec", self.pre + "router", "cat", "/proc/net/netfilter/nfnetlink_queue", check=False).splitlines():
            f = line.split()
            drop += int(f[5]) + int(f[6])
        d["kernel_dropped"] = drop
        return d

    def alive(self):
        return bool(self.st and self.st["daemon"] and proc_is(*self.st["daemon"]))


# ------------------------------------------------------------------------------------ measuring

PROBE = r"""
import socket, sys, time, statistics, json, threading
mode, host, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
if mode == "serve":                                     # UDP echo and a TCP sink, until killed
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("0.0.0.0", port))
    t = socket.create_server(("0.0.0.0", port), backlog=64)
    def sink(c):                                        # bytes in the second half of the test, by this end's clock
        b = bytearray(1 << 18); n = 0; h = b""
        while len(h) < 16: h += c.recv(16 - len(h))
        secs = float(h); t0 = time.monotonic()
        while True:
            k = c.recv_into(b)
            if not k: break
            if secs / 2 <= time.monotonic() - t0 < secs: n += k
        c.sendall(str(n).encode()); c.close()
    def tcp():
        while True: threading.Thread(target=sink, args=(t.accept()[0],), daemon=True).start()
    threading.Thread(target=tcp, daemon=True).start()
    print("ready", flush=True)
    while True:
        d, a = u.recvfrom(2048); u.sendto(d, a)
elif mode == "ping":                                    # N datagrams, GAP apart
    n, gap = int(sys.argv[4]), float(sys.argv[5]); rtt = {}
    u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect((host, port)); u.settimeout(0.5)
    sent = {}
    def rx():
        while len(rtt) < n:
            try: k = int(u.recv(2048))
            except (OSError, ValueError): continue
            rtt[k] = time.monotonic() - sent[k]
    th = threading.Thread(target=rx, daemon=True); th.start()
    for k in range(n):
        sent[k] = time.monotonic()
        try: u.send(str(k).encode())
        except OSError: pass
        time.sleep(gap)
    th.join(1.0)
    v = sorted(x * 1e3 for x in rtt.values())
    print(json.dumps({"n": n, "got": len(v), "p50_ms": v[len(v) // 2] if v else None,
                      "p99_ms": v[int(len(v) * .99)] if v else None, "max_ms": v[-1] if v else None}))
else:                                                   # tcp: STREAMS for SECONDS; goodput over the second half
    streams, secs = int(sys.argv[4]), float(sys.argv[5]); got = [0] * streams
    def tx(i):
        c = socket.create_connection((host, port)); b = bytes(1 << 17); stop = time.monotonic() + secs
        c.sendall(b"%16.3f" % secs)
        while time.monotonic() < stop: c.send(b)
        c.shutdown(socket.SHUT_WR); got[i] = int(c.recv(64) or 0); c.close()
    ths = [threading.Thread(target=tx, args=(i,), daemon=True) for i in range(streams)]
    [t.start() for t in ths]; [t.join() for t in ths]
    print(json.dumps({"mbps": sum(got) * 8 / (secs / 2) / 1e6}))
"""


@contextlib.contextmanager
def probe_server(lab, site, port=47999):
    p = lab.popen(site, [sys.executable, "-c", PROBE, "serve", "0", str(port)], stdout=subprocess.PIPE, text=True)
    try:
        p.stdout.readline()
        yield port
    finally:
        p.kill()
        p.wait()


def probe(lab, site, mode, to, port, *args):
    rc, out = lab.run(site, [sys.executable, "-c", PROBE, mode, lab.public(to), str(port), *map(str, args)], timeout=120)
    return json.loads(out.splitlines()[-1])


def check(lab, rate=False):
    names = [n for n, s in lab.st["sites"].items() if s["nat"] in ("none", "fullcone")]
    print(f"{'link':<14}{'set RTT':>9}{'p50 ms':>9}{'p99 ms':>9}{'lost':>8}{'Mbit/s':>9}  (8 streams)" if rate else
          f"{'link':<14}{'set RTT':>9}{'p50 ms':>9}{'p99 ms':>9}{'lost':>8}")
    for b in names:
        with probe_server(lab, b) as port:
            for a in lab.st["sites"]:
                if a == b:
                    continue
                r = probe(lab, a, "ping", b, port, 100, 0.01)
                want = lab.st["pairs"][f"{a}>{b}"]["delay_ms"] + lab.st["pairs"][f"{b}>{a}"]["delay_ms"]
                row = f"{a + '>' + b:<14}{want:>9.1f}{r['p50_ms'] or 0:>9.2f}{r['p99_ms'] or 0:>9.2f}{1 - r['got'] / r['n']:>8.1%}"
                if rate:
                    row += f"{probe(lab, a, 'tcp', b, port, 8, 6)['mbps']:>9.1f}"
                print(row, flush=True)


def status(lab, as_json):
    d = lab.stats() if lab.alive() else None
    if as_json:
        print(json.dumps({"state": lab.st, "stats": d}))
        return
    print(f"lab {lab.name}: {len(lab.st['sites'])} sites, cc {lab.opt['cc']}, buffers {lab.opt['bufs']}, "
          f"{'whole super-packets' if lab.opt['gso'] else f'MTU {MTU} packets'}")
    for n, s in lab.st["sites"].items():
        print(f"  {n:<10} {lab.public(n):<12} up {show_rate(s['up']):<6} down {show_rate(s['down']):<6} "
              f"{'nat ' + s['nat'] if s['nat'] != 'none' else ''} {'hosts ' + str(s['hosts']) if s['hosts'] > 1 else ''}")
    if d is None:
        print("  EMULATOR NOT RUNNING: every packet between sites is dropped")
        return
    print(f"{'link':<14}{'ms':>7}{'jit':>6}{'loss':>9}{'rate':>7} {'packets':>10}{'MB':>10}{'lost':>8}{'tail':>8}{'cut':>8}{'wait ms':>9}")
    for k, p in lab.st["pairs"].items():
        s = d["pairs"][k]
        print(f"{k:<14}{p['delay_ms']:>7.1f}{p['jitter_ms']:>6.1f}{p['loss']:>9.5f}{show_rate(p['rate']):>7} {s['in_pkts']:>10}"
              f"{s['in_bytes'] / 1e6:>10.1f}{s['lost']:>8}{s['tail_dropped']:>8}{s['cut_dropped']:>8}{s['max_wait_ms']:>9.1f}"
              f"{'  CUT' if s['cut'] else ''}")
    print(f"emulator: {d['cpu_s']:.1f} s of CPU in {d['uptime_s']:.0f} s, {d['in_flight']} packets in flight, delivered late by "
          f"{d['late_avg_us']:.0f} us on average, {d['late_max_us']:.0f} at most; kernel drops {d['kernel_dropped']}; "
          + ("it receives for the sites too" if lab.st.get("own_cpu") is None else "the sites receive on other processors"))


# ------------------------------------------------------------------------------------ self-test

def selftest():
    passed = failed = 0

    def expect(name, ok, got=""):
        nonlocal passed, failed
        passed, failed = passed + bool(ok), failed + (not ok)
        print(f"{'ok  ' if ok else 'FAIL'} {name} {got}", flush=True)

    net = {"sites": {"a": {}, "b": {"hosts": 2}, "h": {"up": "10mbit", "down": "20mbit", "nat": "cone"}},
           "default": {"rtt_ms": 40, "rate": "100mbit"}, "links": [{"a": "a", "b": "b", "rtt_ms": 20}]}
    lab = Lab(net, name="selftest")
    t0 = time.monotonic()
    try:
        lab.up()
        expect("up", lab.alive(), f"{time.monotonic() - t0:.2f} s")
        with probe_server(lab, "b") as port:
            r = probe(lab, "a", "ping", "b", port, 100, 0.005)
            expect("round trip 20 ms", r["p50_ms"] and 19.9 <= r["p50_ms"] < 24, r)
            expect("no loss", r["got"] == r["n"])
            r = probe(lab, "h", "ping", "b", port, 50, 0.005)
            expect("out through NAT, 40 ms", r["p50_ms"] and 39.9 <= r["p50_ms"] < 45, r)
            r = probe(lab, "a", "tcp", "b", port, 4, 4)
            expect("100 Mbit/s pair", 75 < r["mbps"] < 98.5, r)
            r = probe(lab, "h", "tcp", "b", port, 4, 4)
            expect("10 Mbit/s uplink", 7.5 < r["mbps"] < 9.9, r)
            lab.link("a", "b", loss=0.2, oneway=True)
            r = probe(lab, "a", "ping", "b", port, 500, 0.001)
            expect("20 % loss one way", 0.13 < 1 - r["got"] / r["n"] < 0.27, r)
            lab.heal()
            lab.cut("a", "b")
            r = probe(lab, "a", "ping", "b", port, 20, 0.005)
            expect("cut", r["got"] == 0, r)
            lab.heal("a")
            r = probe(lab, "a", "ping", "b", port, 20, 0.005)
            expect("heal", r["got"] == 20, r)
            lab.cut("a", reject=True)
            rc, out = lab.run("a", [sys.executable, "-c", "import socket,sys\ntry: socket.create_connection((sys.argv[1],9),5)\n"
                                    "except ConnectionRefusedError: print('refused')", lab.public("b")], timeout=10)
            expect("cut --reject refuses", "refused" in out, out.strip())
            lab.heal()
        rc, out = lab.run("a", [sys.executable, "-c", "import socket;socket.create_connection(('1.1.1.1',80),1)"], timeout=10)
        expect("no way out of the lab", "Error" in out or "timed out" in out, out.strip().splitlines()[-1:] or "")
        expect("a command's status comes back", lab.run("b.1", ["sh", "-c", "exit 7"])[0] == 7 and lab.run("b", ["sleep", "9"], timeout=0.3)[0] == 124)
        expect("no packet the emulator did not see", lab.stats()["kernel_dropped"] == 0)
    finally:
        lab.down()
    left = [n for n in (os.listdir("/run/netns") if os.path.isdir("/run/netns") else []) if n.startswith("wl-selftest-")]
    expect("down leaves nothing", not left and not os.path.exists(lab.file), left)
    print(f"{passed} passed, {failed} failed")
    return failed


# ------------------------------------------------------------------------------------ command line

def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--name", default="lab", help="which lab")
    sub = ap.add_subparsers(dest="verb", required=True, metavar="VERB")
    p = sub.add_parser("up")
    p.add_argument("net", help="a preset, or a JSON file")
    p.add_argument("--cc", default="cubic", help="TCP congestion control at the sites (cubic, bbr, reno)")
    p.add_argument("--bufs", default="stock", choices=["stock", "tuned", "keep"], help="TCP buffer limits at the sites")
    p.add_argument("--gso", action="store_true", help="carry super-packets whole: for rates of several Gbit/s")
    p.add_argument("--tick-us", type=float, default=250, help="granularity of deliveries")
    p.add_argument("--seed", type=int, default=1, help="of the loss and jitter draws")
    for v in ("presets", "selftest"):
        sub.add_parser(v)
    sub.add_parser("down").add_argument("--stale", action="store_true")
    p = sub.add_parser("status")
    p.add_argument("--json", action="store_true")
    p = sub.add_parser("run")
    p.add_argument("-t", "--timeout", type=float, help="end the command after this many seconds (status 124)")
    p.add_argument("site")
    p.add_argument("cmd", nargs=argparse.REMAINDER)
    p = sub.add_parser("cut")
    p.add_argument("site")
    p.add_argument("other", nargs="?")
    p.add_argument("--oneway", action="store_true")
    p.add_argument("--reject", action="store_true")
    p = sub.add_parser("heal")
    p.add_argument("site", nargs="?")
    p.add_argument("other", nargs="?")
    p = sub.add_parser("slow")
    p.add_argument("site")
    p.add_argument("rest", nargs="+", metavar="[OTHER] RATE")
    p = sub.add_parser("link")
    p.add_argument("a")
    p.add_argument("b")
    p.add_argument("kv", nargs="+", metavar="key=value")
    p.add_argument("--oneway", action="store_true")
    for v in ("natflush", "unplug", "plug"):
        sub.add_parser(v).add_argument("site")
    p = sub.add_parser("check")
    p.add_argument("--rate", action="store_true", help="also a 6 s TCP test a pair")
    a = ap.parse_args()

    if a.verb == "presets":
        for n, (text, _) in PRESETS.items():
            print(f"{n:<16} {text}")
        return 0
    if a.verb == "selftest":
        return 1 if selftest() else 0
    if a.verb == "up":
        if os.path.exists(a.net):
            with open(a.net) as f:
                net = json.load(f)
        else:
            net = preset(a.net)
        lab = Lab(net, a.name, a.cc, a.bufs, a.gso, a.tick_us, a.seed)
        try:
            lab.up()
        except BaseException:
            lab.down()
            raise
        status(lab, False)
        return 0
    lab = Lab(name=a.name)
    if a.verb == "down":
        if not a.stale:
            lab.down()
        for f in sorted(os.listdir(STATE)) if a.stale and os.path.isdir(STATE) else []:
            if f.endswith(".json"):
                with open(os.path.join(STATE, f)) as h:
                    owner = json.load(h).get("owner")
                if owner and not proc_is(*owner):
                    print(f"removing {f[:-5]}: its owner (pid {owner[0]}) is gone")
                    Lab(name=f[:-5]).down()
        return 0
    lab.load()
    if a.verb == "status":
        status(lab, a.json)
    elif a.verb == "run":
        cmd = a.cmd[1:] if a.cmd[:1] == ["--"] else a.cmd
        p = lab.popen(a.site, cmd or ["bash"])
        try:
            return p.wait(a.timeout)
        except subprocess.TimeoutExpired:
            p.terminate()
            try:
                p.wait(5)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()
            return 124
    elif a.verb == "cut":
        lab.cut(a.site, a.other, a.oneway, a.reject)
    elif a.verb == "heal":
        lab.heal(a.site, a.other)
    elif a.verb == "slow":
        lab.slow(a.site, *a.rest)
    elif a.verb == "link":
        lab.link(a.a, a.b, a.oneway, **dict(x.split("=", 1) for x in a.kv))
    elif a.verb in ("natflush", "unplug", "plug"):
        getattr(lab, a.verb)(a.site)
    elif a.verb == "check":
        check(lab, a.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
