"""Measures what the README cites:  pip install -e ".[bench]" && python .ci/bench.py --out=figures

Each comparison runs in a process of its own.  Its paths are prepared and what they compute is checked (but Brian2's
network, which draws its own numbers).  Then they take turns, round by round, so that what else the machine does meets
all of them alike.  Where JAX finds a GPU, comparisons for it run as well: `-k gpu` runs these alone, and `-k cpu` the
others.
"""

import argparse
import contextlib
import ctypes
import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import operator
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import jax
import jax.numpy as jnp
import numba
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout, whatever is installed

import xla_kernels as xk  # noqa: E402

# ======================================================================================================
# Measuring
# ======================================================================================================


def compare(paths):
    """Rows of a table: `paths` maps a name to a function that prepares it, and returns one that measures once."""
    rows, running = [], []
    for name, prepare in paths.items():
        row = {"path": name, "unit": "µs"}
        rows.append(row)
        try:
            measure = prepare()
        except Exception as error:
            row["note"] = f"{error!r:.150}"
        else:
            running.append((row, measure, []))
    for _ in range(1 + ROUNDS):
        for _, measure, samples in running:
            samples.append(measure())
    for row, _, (_, *samples) in running:  # without the first: JAX compiles anew if an import changed a setting of it
        row.update(value=statistics.median(samples), min=min(samples), max=max(samples), rounds=ROUNDS)
        if "value" in rows[0]:
            row["ratio"] = row["value"] / rows[0]["value"]
    return rows


def seconds(work, n):
    """How long work(n) and what it returns take."""
    start = time.perf_counter()
    jax.block_until_ready(work(n))
    return time.perf_counter() - start


def averaged(repeat, first, right):
    """A function that measures one of the n calls that repeat(n) makes, in µs, with an n that takes about 20 ms.

    `right` is what repeat(first) has to return.
    """
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), repeat(first), right)
    n = max(1, int(0.02 * first / seconds(repeat, first)))
    repeat(n)
    return lambda: seconds(repeat, n) / n * 1e6


def timed(function, *args, right):
    """A function that measures one call of `function` from Python, in µs."""

    def repeat(n):
        for _ in range(n):
            result = function(*args)
        return result

    return averaged(repeat, 2, right)


def run_python(*args, timeout=None, cwd=ROOT, **environment):
    """What a process prints that imports this checkout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", **environment}
    command = [sys.executable, "-W", "ignore", *map(str, args)]
    process = subprocess.run(command, env=environment, cwd=cwd, timeout=timeout, check=True, stdout=subprocess.PIPE)
    return process.stdout.decode()


# ======================================================================================================
# One addition, along every path
# ======================================================================================================


def add(x, y, out):
    for i in range(x.size):
        out[i] = x[i] + y[i]


def add_in_place(x, y):
    for i in range(x.size):
        x[i] += y[i]


@functools.cache
def cuda_kernels():
    """The same two, with the package that the tests take."""
    predecessor = importlib.util.find_spec("numba_cuda") and "XLA_KERNELS_CUDA_SUCCESSOR" not in os.environ
    cuda = importlib.import_module("numba.cuda" if predecessor else "numba_cuda_mlir.cuda")

    @cuda.jit
    def add(x, y, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = x[i] + y[i]

    @cuda.jit
    def add_in_place(x, y):
        i = cuda.grid(1)
        if i < x.size:
            x[i] += y[i]

    return add, add_in_place


@functools.cache
def warp_add():
    import warp as wp

    @wp.kernel
    def add(x: wp.array(dtype=float), y: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = x[i] + y[i]

    return add


def by_warp_itself(out):
    import warp as wp

    call = wp.jax_kernel(warp_add())
    return lambda x, y: call(x, y)[0]


def brainevent():
    return importlib.import_module("brainevent")


CPP = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
using Array = ffi::Buffer<ffi::F32>;
static ffi::Error Add(Array x, Array y, ffi::Result<Array> out) {
  const float *a = x.typed_data(), *b = y.typed_data();
  float *c = out->typed_data();
  for (size_t i = 0, n = x.element_count(); i < n; ++i) c[i] = a[i] + b[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(handler, Add, ffi::Ffi::Bind().Arg<Array>().Arg<Array>().Ret<Array>());
"""


@functools.cache
def register_cpp():
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}"]
    with tempfile.TemporaryDirectory() as folder:
        source, path = pathlib.Path(folder, "library.cc"), pathlib.Path(folder, "library.so")
        source.write_text(CPP)
        subprocess.run(["g++", *flags, source, "-o", path], check=True)
        library = ctypes.CDLL(str(path))
    jax.ffi.register_ffi_target("bench_add", jax.ffi.pycapsule(library.handler), platform="cpu")


def by_cpp(out, vmap_method="sequential"):
    register_cpp()
    return jax.ffi.ffi_call("bench_add", out, vmap_method=vmap_method)


ADD = {  # by the name of a path: the platform that it is for, and a function of the output's spec
    "numba_kernel": ("cpu", lambda out: xk.numba_kernel(add, out)),
    "numba_cuda_kernel": ("gpu", lambda out: xk.numba_cuda_kernel(cuda_kernels()[0], out, launch_dims=out.size)),
    "warp_kernel": (None, lambda out: xk.warp_kernel(warp_add(), out)),
    "C++ for XLA": ("cpu", by_cpp),
    "brainevent.numba_kernel": (
        "cpu", lambda out: brainevent().numba_kernel(numba.njit(add), outs=out, vmap_method="sequential"),
    ),
    "brainevent.numba_cuda_kernel": (
        "gpu", lambda out: brainevent().numba_cuda_kernel(cuda_kernels()[0], outs=out, launch_dims=out.size),
    ),
    "warp.jax_kernel": (None, by_warp_itself),
    "jax.pure_callback": (None, lambda out: partial(jax.pure_callback, np.add, out, vmap_method="sequential")),
    "x + y of jnp": (None, lambda out: operator.add),
}  # fmt: skip
IN_A_LOOP = ADD | {
    "x + y of jnp": ("gpu", lambda out: operator.add),  # on CPUs XLA makes one addition of all
    "numba_kernel, in place": ("cpu", lambda out: xk.numba_kernel(add_in_place, out, in_out_argnames=["x"])),
    "numba_cuda_kernel, in place": (
        "gpu", lambda out: xk.numba_cuda_kernel(cuda_kernels()[1], out, launch_dims=out.size, in_out_argnames=["x"]),
    ),
}  # fmt: skip
UNDER_VMAP = ADD | {'C++ for XLA, "broadcast_all"': ("cpu", partial(by_cpp, vmap_method="broadcast_all"))}


def adders(table, measure, *args):
    """{name: a function that prepares it, and returns one that measures once}: the paths of this platform."""
    chosen = {name: make for name, (on, make) in table.items() if on in (None, jax.default_backend())}
    return {name: partial(measure, make, *args) for name, make in chosen.items()}


def vector(size):
    return jax.ShapeDtypeStruct((size,), np.float32)


def in_loop(make, size):
    """One addition inside `lax.fori_loop`."""
    call, x, y = make(vector(size)), jnp.ones(size), jnp.full(size, 1e-3)

    @partial(jax.jit, static_argnums=0)
    def repeat(steps, x):
        return jax.lax.fori_loop(0, steps, lambda _, x: call(x, y), x)

    first = max(1, min(100, int(2e6 / size)))
    return averaged(lambda steps: repeat(steps, x), first, 1 + first * np.asarray(y))


def from_python(make, transform, *shape):
    """One addition of arrays of this shape, each row by `transform(path)`."""
    x, y = jnp.ones(shape), jnp.full(shape, 1e-3)
    return timed(transform(make(vector(shape[-1]))), x, y, right=1 + np.asarray(y))


def python():
    not_jitted = adders(ADD, from_python, lambda call: call, 16)
    not_jitted = {f"{name}, not jitted": path for name, path in not_jitted.items()}
    return compare(adders(ADD, from_python, jax.jit, 16) | not_jitted)


# ======================================================================================================
# State in place, and the start of a process
# ======================================================================================================


def change_by_brainevent(v):
    """Its kernels get the input, and an output that starts from it."""

    @numba.njit
    def change(_, v):
        v[1] += 1

    return brainevent().numba_kernel(change, outs=vector(v.size), input_output_aliases={0: 0})(v)


def set_and_change(change):
    """One step that sets an element of 20 MB and hands them to `change`."""

    @partial(jax.jit, static_argnums=1, donate_argnums=0)
    def run(v, steps):
        return jax.lax.fori_loop(0, steps, lambda _, v: change(v.at[0].set(2.0)), v)

    v = jnp.zeros(5_000_000)

    def repeat(steps):
        nonlocal v
        v = run(v, steps)
        return v

    right = np.zeros(v.size)
    right[:2] = 2, 100
    return averaged(repeat, 100, right)


def state():
    def change(v):
        v[1] += 1

    paths = {
        "numba_kernel": xk.numba_kernel(change, lambda v: v, in_out_argnames=["v"]),
        "brainevent.numba_kernel": change_by_brainevent,
        "jnp alone": lambda v: v.at[1].add(1),
    }
    return compare({name: partial(set_and_change, path) for name, path in paths.items()})


START = """
import math, time
import jax, numba, numpy as np

start = time.perf_counter()
import xla_kernels as xk
kernels = []
"""
KERNEL = """
@kernels.append
@numba.njit(cache=True)
def kernel_{0}(x, y, out):
    for i in range(x.size):
        out[i] = math.sin(x[i]) ** {0} + y[i]
"""
FIRST_RESULT = """
x = np.ones(16, np.float32)
calls = [xk.numba_kernel(kernel, lambda x, y: x) for kernel in kernels]
results = jax.block_until_ready(jax.jit(lambda x: [call(x, x) for call in calls])(x))
took = time.perf_counter() - start
for i, result in enumerate(results):
    np.testing.assert_allclose(result, math.sin(1) ** i + 1, rtol=1e-5)
print(1e3 * took)
"""


def start():
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "kernels.py")
        file.write_text(START + "".join(map(KERNEL.format, range(20))) + FIRST_RESULT)
        took = {path: float(run_python(file)) for path in ("the first process", "the next")}
    return [{"path": path, "value": value, "unit": "ms"} for path, value in took.items()]


# ======================================================================================================
# The network of spiking neurons: CUBA, benchmark 2 of Brette et al. (2007), 5,000 steps of 4,000 neurons
# ======================================================================================================


def documented_network():
    """What the program in the documentation defines."""
    text = (ROOT / ".github" / "EXAMPLES.md").read_text(encoding="utf-8")
    code = re.search(r"## A network of spiking neurons\n.*?```python\n(.*?)```", text, re.DOTALL)[1]
    network = {}
    exec(code, network)
    return network


def network_by_brainevent():
    """The same with a kernel of its."""
    network = documented_network()
    step = numba.njit(network["step"].__wrapped__)

    @numba.njit
    def in_place(_v, _ge, _gi, _wait, indptr, indices, v, ge, gi, wait):
        step(v, ge, gi, wait, indptr, indices)

    aliases = {0: 0, 1: 1, 2: 2, 3: 3}
    numba_kernel = brainevent().numba_kernel
    network["step"] = lambda *args: numba_kernel(in_place, outs=args[:4], input_output_aliases=aliases)(*args)
    return network


def simulated(network):
    """A jitted function that returns the state after 5,000 steps, and the state to call it with."""

    @jax.jit
    def simulate(state):
        return jax.lax.scan(lambda state, _: (network["advance"](state, _)[0], None), state, length=5000)[0]

    zeros = network["zeros"]
    return simulate, (network["v"], zeros, zeros, zeros.astype(np.int32))


def one_step(make):
    """One step of a network, which has to end as the documented one does."""
    simulate, first = simulated(documented_network())
    once = timed(*simulated(make()), right=simulate(first))
    return lambda: once() / 5000


BRIAN2 = """
import sys
from brian2 import *
n, steps, folder = 4000, 5000, sys.argv[1]
set_device("cpp_standalone", build_on_run=False)
prefs.core.default_float_dtype = np.float32
equations = '''
dv/dt = (ge + gi - (v + 49*mV)) / (20*ms) : volt (unless refractory)
dge/dt = -ge / (5*ms) : volt
dgi/dt = -gi / (10*ms) : volt
'''
neurons = NeuronGroup(n, equations, threshold="v > -50*mV", reset="v = -60*mV", refractory=5*ms, method="exact")
neurons.v = "-60*mV + rand() * 10*mV"
excitatory = Synapses(neurons[:n * 4 // 5], neurons, on_pre="ge += 1.62*mV")
inhibitory = Synapses(neurons[n * 4 // 5:], neurons, on_pre="gi -= 9*mV")
excitatory.connect(p=80 / n)
inhibitory.connect(p=80 / n)
run(steps * 0.1*ms)
device.build(directory=folder, compile=True, run=False)
"""


def brian2_program():
    """A function that runs Brian2's compiled program and reads the time of a step that it reports."""
    folder = pathlib.Path(tempfile.mkdtemp())
    run_python("-c", BRIAN2, folder, cwd=folder)

    def once():
        subprocess.run([folder / "main"], check=True, capture_output=True, cwd=folder)
        return float((folder / "results" / "last_run_info.txt").read_text().split()[0]) / 5000 * 1e6

    return once


def network():
    networks = {"numba_kernel": documented_network, "brainevent.numba_kernel": network_by_brainevent}
    paths = {name: partial(one_step, make) for name, make in networks.items()}
    return compare(paths | {"Brian2 C++ standalone, float32": brian2_program})


def spikes(every=16, bar=5):
    """What the picture shows: (ms, neuron) of the spikes of some neurons, and the rate of all in each bar, in ms."""
    network = documented_network()
    n, milliseconds, neurons = network["n"], network["steps"] * 0.1, network["neurons"]
    shown = np.stack([milliseconds, neurons], axis=1)[neurons % every == 0].round(1)
    counts, _ = np.histogram(network["steps"], np.arange(0, 5001, 10 * bar))
    rates = counts / n / (bar / 1000)
    row = {"path": "rate", "value": float(rates.mean()), "unit": "Hz", "rates": rates.round(2).tolist()}
    row |= {"spikes": shown.tolist(), "bar": bar, "every": every, "neurons": n, "excitatory": n * 4 // 5}
    return [row]


# ======================================================================================================
# What is measured, each in a process
# ======================================================================================================

CUBA = "CUBA network (Brette et al. 2007) of 4,000 neurons, 80 synapses a neuron: one step of 0.1 ms"
COMPARISONS = {  # a title, the rows, whether it is for GPUs too, the picture (of what a CPU does)
    "call": (
        "One call on 16 elements inside fori_loop",
        lambda: compare(adders(IN_A_LOOP, in_loop, 16)), True, "speed",
    ),
    "large": (
        "One call on 1,000,000 elements inside fori_loop",
        lambda: compare(adders(IN_A_LOOP, in_loop, 1_000_000)), True, None,
    ),
    "python": ("One call on 16 elements from Python", python, True, None),
    "vmap": (
        "vmap over 1,000 slices of 16 elements",
        lambda: compare(adders(UNDER_VMAP, from_python, lambda call: jax.jit(jax.vmap(call)), 1000, 16)), True, None,
    ),
    "state": ("State of 20 MB that is set and then changed in place, in fori_loop", state, False, None),
    "start": ("From importing this library to the first result of 20 kernels with cache=True", start, False, None),
    "network": (CUBA, network, False, None),
    "spikes": ("Spikes of the CUBA network in half a second", spikes, False, "raster"),
}  # fmt: skip


def measured(name, on):
    """The rows of a comparison; a crash or a hang costs no other one."""
    platforms, limit = ("cuda,cpu", 150) if on == "gpu" else ("cpu", 600)  # on a GPU, pure_callback needs both
    arguments = __file__, f"--one={name}", f"--rounds={ROUNDS}"
    try:
        output = run_python(*arguments, timeout=limit, JAX_PLATFORMS=platforms)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return [{"path": "the process", "note": f"{type(error).__name__}, after at most {limit} s"}]
    return json.loads(output.splitlines()[-1])


def is_failure(row):
    """Whether a process, or a path of this library whose packages are there, gave no figure."""
    ours = row["path"].split(",")[0] in (*PATHS_OF_OURS, "the process")
    return ours and not row.get("note", "ModuleNotFoundError").startswith("ModuleNotFoundError")


# ======================================================================================================
# The report and its pictures
# ======================================================================================================


def machine(gpu):
    """Where and with what the figures are measured."""
    processor, commit, load = platform.machine(), "unknown", "unknown"
    with contextlib.suppress(OSError, TypeError):  # Linux says it
        processor = re.search("model name.*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # a copy of the files has none
        describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.check_output(describe, cwd=ROOT, encoding="utf-8").strip()
    with contextlib.suppress(AttributeError):  # Windows has none
        load = f"{os.getloadavg()[2]:.1f}"
    versions = {"python": platform.python_version()}
    for package in "jax jaxlib numba numba-cuda numba-cuda-mlir warp-lang numpy scipy brainevent brian2".split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    where = ", ".join(filter(None, (processor, f"{cores} cores", gpu)))
    date = datetime.date.today().isoformat()
    return {"date": date, "commit": commit, "machine": where, "load": load, "versions": versions}


def markdown(report):
    """One table of all comparisons: medians, smallest and largest, and the ratio to the first row of each."""
    versions = ", ".join(map(" ".join, report["versions"].items()))
    text = f"{report['date']}, commit {report['commit']}; {report['machine']}, load {report['load']}; {versions}\n\n"
    text += "| path | median | range | ratio |\n| --- | --- | --- | --- |\n"
    for title, table in report["tables"].items():
        text += f"| **{title}** | | | |\n"
        for row in table["rows"]:
            median = f"{row['value']:.3g} {row['unit']}" if "value" in row else row["note"].replace("|", "/")
            extent = f"{row['min']:.3g} - {row['max']:.3g}" if "min" in row else ""
            ratio = f"{row['ratio']:.3g}" if "ratio" in row else ""
            text += f"| {row['path']} | {median} | {extent} | {ratio} |\n"
    return text


def write(report, prefix):
    """PREFIX.json, PREFIX.md, and the pictures of what was measured."""
    pathlib.Path(f"{prefix}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    pathlib.Path(f"{prefix}.md").write_text(markdown(report), encoding="utf-8")
    for title, table in report["tables"].items():
        picture = table["picture"]
        if picture and not any(map(is_failure, table["rows"])):
            draw(f"{prefix}-{picture}.svg", *PICTURES[picture], title, table["rows"], report["date"])


# Of their own white background, so that they read alike on light and dark pages.

OURS, OTHERS, SECOND = "#0969da", "#818b98", "#cf222e"
PATHS_OF_OURS = ("numba_kernel", "warp_kernel", "numba_cuda_kernel")


def draw(path, height, draw_in, *args):
    """Write an SVG of what `draw_in(figure, ...)` draws: the same file for the same figures, and with text as text."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "xla_kernels", "font.size": 10, "axes.titlesize": 10}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure((7.4, height), layout="constrained", facecolor="white")
        draw_in(figure, *args)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def draw_speed(figure, title, rows, date):
    """A dot for each path on a logarithmic axis, the fastest on top."""
    rows = sorted([row for row in rows if "value" in row], key=lambda row: row["value"], reverse=True)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    for number, row in enumerate(rows):
        axes.plot(row["value"], number, "o", color=OURS if row["path"].split(",")[0] in PATHS_OF_OURS else OTHERS)
        text = f"{row['value']:.3g}"
        axes.annotate(text, (row["value"], number), (8, 0), textcoords="offset points", verticalalignment="center")
    axes.set_yticks(range(len(rows)), [row["path"] for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#d1d9e0")
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    axes.set_xlabel(f"{rows[0]['unit']}, logarithmic; lower is better")
    axes.set_title(f"{title}: CPU, {date}", loc="left")


def draw_raster(figure, title, rows, date):
    """A dot for each spike, of excitatory and of inhibitory neurons; below them the rate."""
    (row,) = rows
    spikes, bar, n_excitatory = np.array(row["spikes"]), row["bar"], row["excitatory"]  # spikes: (ms, neuron)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for name, color, chosen in (
        ("inhibitory", SECOND, spikes[:, 1] >= n_excitatory), ("excitatory", OURS, spikes[:, 1] < n_excitatory),
    ):  # fmt: skip
        above.plot(*spikes[chosen].T, ".", markersize=2, color=color, label=name, gid=name)
    above.legend(loc="upper right", bbox_to_anchor=(1, 1.22), ncols=2, frameon=False, markerscale=5)
    above.set(ylabel="neuron", ylim=(0, row["neurons"]), xlim=(0, 500))
    above.set_title(f"Spikes of every {row['every']}th of {row['neurons']:,} neurons, and the rate of all", loc="left")
    edges = bar * np.arange(len(row["rates"]) + 1)
    below.stairs(row["rates"], edges, color=OTHERS, fill=True)
    below.set(xlabel="ms", ylabel="rate, Hz", ylim=(0, None))


PICTURES = {"speed": (2.8, draw_speed), "raster": (3.6, draw_raster)}  # height in inches, function


def main():
    global ROUNDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="WORDS", default="", help=f"{', '.join(COMPARISONS)}, cpu, gpu: those with all")
    parser.add_argument("--out", metavar="PREFIX", help="write PREFIX.json, PREFIX.md and pictures")
    parser.add_argument("--rounds", type=int, default=15, help="how often each path is measured (15)")
    parser.add_argument("--one", choices=COMPARISONS, help="print the rows of this one, measured in this process")
    options = parser.parse_args()
    ROUNDS = options.rounds
    if options.one:
        print(json.dumps(COMPARISONS[options.one][1]()))
        return 0
    # In a process that gives its memory back.
    gpu = run_python("-c", "import jax; print(*[d.device_kind for d in jax.devices() if d.platform == 'gpu'][:1])")
    report = {**machine(gpu.strip()), "tables": {}}
    for on, name in itertools.product(["cpu", "gpu"] if gpu.strip() else ["cpu"], COMPARISONS):
        title, _, is_for_gpus, picture = COMPARISONS[name]
        if on == "gpu":
            title, picture = f"{title} (GPU)", None
        if all(word in f"{name} {on}" for word in options.k.split()) and (on == "cpu" or is_for_gpus):
            print(title, file=sys.stderr, flush=True)
            report["tables"][title] = {"rows": measured(name, on), "picture": picture}
            if options.out:
                write(report, options.out)  # after each, so that an early end leaves what there is
    print(markdown(report))
    rows = [row for table in report["tables"].values() for row in table["rows"]]
    return 0 if rows and not any(map(is_failure, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
