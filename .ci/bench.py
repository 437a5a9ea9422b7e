"""Measure the figures of the README:  pip install -e ".[bench]" && python .ci/bench.py --out=figures

Each comparison runs in its own process.  The process checks the results of all implementations, except those of Brian2,
which draws its own random numbers.  Then it measures the implementations in turns, round by round, so that other load
on the machine affects all of them alike.  If JAX finds a GPU, GPU comparisons run, too.  `-k gpu` and `-k cpu` select
one kind.
"""

import argparse
import ast
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


# -- Measuring -----------------------------------------------------------------------------------------
def compare(paths):
    """Return the rows of a table.

    `paths` maps the name of an implementation to a function that prepares it, and returns a function to measure once.
    """
    rows, running = [], []
    for name, prepare in paths.items():
        rows.append({"path": name})
        try:
            running.append((rows[-1], prepare(), []))
        except Exception as error:
            rows[-1]["note"] = f"{error!r:.150}"
    for _ in range(1 + ROUNDS):
        for _, measure, samples in running:
            samples.append(measure())
    for row, _, (_, *samples) in running:  # skip the first: JAX recompiles if an import changed its configuration
        row.update(value=statistics.median(samples), min=min(samples), max=max(samples))
        if "value" in rows[0]:
            row["ratio"] = row["value"] / rows[0]["value"]
    return rows


def averaged(repeat, first, right):
    """Return a function that measures `repeat(n)`, and returns the time per call in µs.  n is chosen to take 20 ms.

    `right` is the expected result of `repeat(first)`.
    """

    def seconds(n):
        start = time.perf_counter()
        jax.block_until_ready(repeat(n))
        return time.perf_counter() - start

    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), repeat(first), right)
    n = max(1, int(0.02 * first / seconds(first)))
    repeat(n)
    return lambda: seconds(n) / n * 1e6


def timed(function, *args, right):
    """Return a function that measures one call of `function` from Python, in µs."""

    def repeat(n):
        for _ in range(n):
            result = function(*args)
        return result

    return averaged(repeat, 2, right)


def run_python(*args, timeout=None, cwd=ROOT, **environment):
    """Run Python in a process that imports this checkout, and return its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", **environment}
    command = [sys.executable, "-W", "ignore", *map(str, args)]
    return subprocess.check_output(command, env=environment, cwd=cwd, timeout=timeout, encoding="utf-8")


# -- One addition, by every implementation -------------------------------------------------------------
def add(x, y, out):
    for i in range(x.size):
        out[i] = x[i] + y[i]


def add_in_place(x, y):
    for i in range(x.size):
        x[i] += y[i]


@functools.cache
def cuda_add():
    """Return `add` as a CUDA kernel of the package that the tests use."""
    predecessor = importlib.util.find_spec("numba_cuda") and "XLA_KERNELS_CUDA_SUCCESSOR" not in os.environ
    cuda = importlib.import_module("numba.cuda" if predecessor else "numba_cuda_mlir.cuda")

    @cuda.jit
    def add(x, y, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = x[i] + y[i]

    return add


@functools.cache
def warp_add():
    import warp as wp

    @wp.kernel
    def add(x: wp.array(dtype=float), y: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = x[i] + y[i]

    return add


def by_warp_itself(out):
    call = importlib.import_module("warp").jax_kernel(warp_add())
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
def cpp_library():
    flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}"]
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "add.cc").write_text(CPP)
        subprocess.run(["g++", *flags, "add.cc", "-o", "add.so"], check=True, cwd=folder)
        return ctypes.CDLL(f"{folder}/add.so")


def by_cpp(out, vmap_method="sequential"):
    jax.ffi.register_ffi_target("bench_add", jax.ffi.pycapsule(cpp_library().handler), platform="cpu")
    return jax.ffi.ffi_call("bench_add", out, vmap_method=vmap_method)


ADD = {  # the name of an implementation -> its platform, and a function of the output's spec
    "numba_kernel": ("cpu", lambda out: xk.numba_kernel(add, out)),
    "numba_cuda_kernel": ("gpu", lambda out: xk.numba_cuda_kernel(cuda_add(), out, launch_dims=out.size)),
    "warp_kernel": (None, lambda out: xk.warp_kernel(warp_add(), out)),
    "C++ for XLA": ("cpu", by_cpp),
    "brainevent.numba_kernel": (
        "cpu", lambda out: brainevent().numba_kernel(numba.njit(add), outs=out, vmap_method="sequential"),
    ),
    "brainevent.numba_cuda_kernel": (
        "gpu", lambda out: brainevent().numba_cuda_kernel(cuda_add(), outs=out, launch_dims=out.size),
    ),
    "warp.jax_kernel": (None, by_warp_itself),
    "jax.pure_callback": (None, lambda out: partial(jax.pure_callback, np.add, out, vmap_method="sequential")),
    "x + y of jnp": (None, lambda out: operator.add),
}  # fmt: skip
IN_A_LOOP = ADD | {
    "x + y of jnp": ("gpu", lambda out: operator.add),  # on CPUs, XLA merges all additions into one
    "numba_kernel, in place": ("cpu", lambda out: xk.numba_kernel(add_in_place, out, in_out_argnames=["x"])),
    "numba_cuda_kernel, in place": (
        "gpu",
        lambda out: xk.numba_cuda_kernel(cuda_add(), out, launch_dims=out.size, input_output_aliases={"x": 0}),
    ),
}  # fmt: skip
UNDER_VMAP = ADD | {'C++ for XLA, "broadcast_all"': ("cpu", partial(by_cpp, vmap_method="broadcast_all"))}


def adders(table, measure, *args):
    """Return the implementations for this platform, as `compare` takes them."""
    chosen = {name: make for name, (on, make) in table.items() if on in (None, jax.default_backend())}
    return {name: partial(measure, make, *args) for name, make in chosen.items()}


def vector(size):
    return jax.ShapeDtypeStruct((size,), np.float32)


def in_loop(make, size):
    """Measure one addition inside `lax.fori_loop`."""
    call, x, y = make(vector(size)), jnp.ones(size), jnp.full(size, 1e-3)

    @partial(jax.jit, static_argnums=0)
    def repeat(steps, x):
        return jax.lax.fori_loop(0, steps, lambda _, x: call(x, y), x)

    first = max(1, min(100, int(2e6 / size)))
    return averaged(lambda steps: repeat(steps, x), first, 1 + first * np.asarray(y))


def from_python(make, transform, *shape):
    """Measure one addition of arrays of this shape, called from Python."""
    x, y = jnp.ones(shape), jnp.full(shape, 1e-3)
    return timed(transform(make(vector(shape[-1]))), x, y, right=1 + np.asarray(y))


def python():
    not_jitted = adders(ADD, from_python, lambda call: call, 16)
    not_jitted = {f"{name}, not jitted": path for name, path in not_jitted.items()}
    return compare(adders(ADD, from_python, jax.jit, 16) | not_jitted)


# -- Zeroed outputs ------------------------------------------------------------------------------------
def zeros():
    """Compare uninitialized outputs, which come first, with zeroed outputs."""
    uninitialized = lambda out: xk.numba_kernel(numba.njit(add), out, zero_outputs=False)
    zeroed = lambda out: xk.numba_kernel(numba.njit(add), out)
    batched = lambda call: jax.jit(jax.vmap(call))
    cases = {f"loop over {size:,}": partial(in_loop, size=size) for size in (16, 1000, 100_000, 1_000_000)}
    for shape in ((1000, 16), (64, 100_000)):
        cases[f"vmap over {shape[0]:,} x {shape[1]:,}"] = lambda make, shape=shape: from_python(make, batched, *shape)
    cases["eager, 10,000,000"] = lambda make: from_python(make, lambda call: call, 10_000_000)
    rows = []
    for name, measure in cases.items():
        pair = {"uninitialized": partial(measure, uninitialized), "zeroed": partial(measure, zeroed)}
        rows += compare({f"numba_kernel, {name}, {kind}": prepare for kind, prepare in pair.items()})
    return rows


# -- State in place ------------------------------------------------------------------------------------
def set_and_change(change):
    """Measure a step that sets one element of a state of 20 MB, and passes the state to `change`."""

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
    @numba.njit
    def change(v):
        v[1] += 1

    def by_brainevent(v):  # its kernels get the input, and an output that is aliased to it
        kernel = numba.njit(lambda _, v: change(v))
        return brainevent().numba_kernel(kernel, outs=vector(v.size), input_output_aliases={0: 0})(v)

    paths = {
        "numba_kernel": xk.numba_kernel(change, lambda v: v, in_out_argnames=["v"]),
        "brainevent.numba_kernel": by_brainevent,
        "jnp alone": lambda v: v.at[1].add(1),
    }
    return compare({name: partial(set_and_change, path) for name, path in paths.items()})


# -- The network of spiking neurons: CUBA of Brette et al. (2007), 5,000 steps of 4,000 neurons ----------
def documented_network():
    """Return the variables of the example in the documentation."""
    text = (ROOT / ".github" / "EXAMPLES.md").read_text(encoding="utf-8")
    network = {}
    exec(re.search(r"## A network of spiking neurons\n.*?```python\n(.*?)```", text, re.DOTALL)[1], network)
    return network


def network_by_brainevent():
    """Return the variables of the example, with a kernel of BrainEvent."""
    network = documented_network()
    step = numba.njit(network["step"].__wrapped__)

    @numba.njit
    def in_place(_v, _ge, _gi, _wait, indptr, indices, v, ge, gi, wait):
        step(v, ge, gi, wait, indptr, indices)

    aliases = {0: 0, 1: 1, 2: 2, 3: 3}
    numba_kernel = brainevent().numba_kernel
    network["step"] = lambda *args: numba_kernel(in_place, outs=args[:4], input_output_aliases=aliases)(*args)
    return network


def simulated(make):
    """Return a jitted function that runs 5,000 steps, and the initial state."""
    network = make()
    step, zeros = network["advance"], network["zeros"]
    simulate = jax.jit(lambda state: jax.lax.fori_loop(0, 5000, lambda _, state: step(state, _)[0], state))
    return simulate, (network["v"], zeros, zeros, zeros.astype(np.int32))


def one_step(make):
    """Measure one step of a network, whose final state must equal that of the documented example."""
    documented, first = simulated(documented_network)
    once = timed(*simulated(make), right=documented(first))
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
    """Return a function that runs Brian2's compiled program, and returns the time per step that it reports."""
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


# -- The report, and its picture -------------------------------------------------------------------------
def machine(gpu):
    """Return a line with the date, commit, machine and versions.  Needs Linux."""
    processor = re.search("model name.*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())[1]
    commit = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty --exclude=*").strip()
    found = {package.name: package.version for package in importlib.metadata.distributions()}
    packages = "jax numba numba-cuda numba-cuda-mlir warp-lang numpy brainevent Brian2".split()
    versions = [f"Python {platform.python_version()}", *(f"{x} {found[x]}" for x in packages if x in found)]
    parts = processor, f"{len(os.sched_getaffinity(0))} cores", *gpu, f"load {os.getloadavg()[2]:.1f}", *versions
    return f"{datetime.date.today()}, commit {commit}; {', '.join(parts)}"


def markdown(head, tables):
    """Return a table of all comparisons: medians, ranges, and ratios to the first row of a comparison."""
    text = f"{head}\n\n| path | median | range | ratio |\n| --- | --- | --- | --- |\n"
    for title, rows in tables.items():
        text += f"| **{title}** | | | |\n"
        for row in rows:
            median = f"{row['value']:.3g} µs" if "value" in row else row["note"].replace("|", "/")
            extent = f"{row['min']:.3g} - {row['max']:.3g}" if "min" in row else ""
            ratio = f"{row['ratio']:.3g}" if "ratio" in row else ""
            text += f"| {row['path']} | {median} | {extent} | {ratio} |\n"
    return text


def is_ours(row):
    return row["path"].split(",")[0] in ("numba_kernel", "warp_kernel", "numba_cuda_kernel")


def draw(path, title, rows):
    """Draw a dot for each implementation, the fastest at the top, on white for light and dark pages."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "xla_kernels", "font.size": 10, "axes.titlesize": 10}
    style |= {"axes.spines.top": False, "axes.spines.right": False, "font.family": "sans-serif"}
    rows = sorted([row for row in rows if "value" in row], key=lambda row: row["value"], reverse=True)
    with matplotlib.rc_context(style):
        figure = Figure((7.4, 2.8), layout="constrained", facecolor="white")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        for number, row in enumerate(rows):
            axes.plot(row["value"], number, "o", color="#0969da" if is_ours(row) else "#818b98")
            axes.annotate(f"{row['value']:.3g}", (row["value"], number), (8, -3), textcoords="offset points")
        axes.set_yticks(range(len(rows)), [row["path"] for row in rows])
        axes.grid(axis="x", color="#d1d9e0")
        axes.margins(x=0.12)
        axes.set_xlabel("µs, logarithmic; lower is better")
        axes.set_title(f"{title}: CPU, {datetime.date.today()}", loc="left")
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


# -- The comparisons -------------------------------------------------------------------------------------
CUBA = "CUBA network (Brette et al. 2007) of 4,000 neurons, 80 synapses a neuron: one step of 0.1 ms"
COMPARISONS = {  # name -> title, and a function that returns the rows
    "call": ("One call on 16 elements inside fori_loop", lambda: compare(adders(IN_A_LOOP, in_loop, 16))),
    "large": ("One call on 1,000,000 elements inside fori_loop", lambda: compare(adders(IN_A_LOOP, in_loop, 10**6))),
    "zeros": ("Zeroed outputs, compared with uninitialized outputs", zeros),
    "python": ("One call on 16 elements from Python", python),
    "vmap": (
        "vmap over 1,000 slices of 16 elements",
        lambda: compare(adders(UNDER_VMAP, from_python, lambda call: jax.jit(jax.vmap(call)), 1000, 16)),
    ),
    "state": ("State of 20 MB that is set, then updated in place, in fori_loop", state),
    "network": (CUBA, network),
}
ALSO_ON_GPUS = ("call", "large", "python", "vmap")


def measured(name, on):
    """Return the rows of a comparison.  A crash or a hang does not affect other comparisons."""
    platforms, limit = ("cuda,cpu", 150) if on == "gpu" else ("cpu", 600)  # on a GPU, pure_callback needs both
    try:
        arguments = __file__, f"--one={name}", f"--rounds={ROUNDS}"
        output = run_python(*arguments, timeout=limit, JAX_PLATFORMS=platforms)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return [{"path": "the process", "note": f"{type(error).__name__}, after at most {limit} s"}]
    return json.loads(output.splitlines()[-1])


def is_failure(row):
    """Return whether a process failed, or an implementation of this library whose packages are installed."""
    is_missing_package = row.get("note", "ModuleNotFoundError").startswith("ModuleNotFoundError")
    return not is_missing_package and (is_ours(row) or row["path"] == "the process")


def main():
    global ROUNDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "-k",
        metavar="WORDS",
        default="",
        help=f"run comparisons with all these words: {', '.join(COMPARISONS)}, cpu, gpu",
    )
    parser.add_argument("--out", metavar="PREFIX", help="write PREFIX.md and PREFIX-speed.svg")
    parser.add_argument("--rounds", type=int, default=15, help="number of measurements of each implementation (15)")
    parser.add_argument("--one", choices=COMPARISONS, help="run this comparison in this process, and print its rows")
    options = parser.parse_args()
    ROUNDS = options.rounds
    if options.one:
        print(json.dumps(COMPARISONS[options.one][1]()))
        return 0
    # In a separate process, which frees the GPU's memory when it exits.
    kinds = run_python("-c", "import jax; print([d.device_kind for d in jax.devices() if d.platform == 'gpu'])")
    gpus = ast.literal_eval(kinds)
    comparisons = [*itertools.product(COMPARISONS, ["cpu"]), *itertools.product(ALSO_ON_GPUS if gpus else [], ["gpu"])]
    head, tables = machine(gpus[:1]), {}
    for name, on in comparisons:
        if not all(word in f"{name} {on}" for word in options.k.split()):
            continue
        title = COMPARISONS[name][0] + " (GPU)" * (on == "gpu")
        print(title, file=sys.stderr, flush=True)
        tables[title] = measured(name, on)
        if options.out:  # after each comparison, so that an interrupted run keeps its figures
            pathlib.Path(f"{options.out}.md").write_text(markdown(head, tables), encoding="utf-8")
    if options.out and COMPARISONS["call"][0] in tables:
        draw(f"{options.out}-speed.svg", COMPARISONS["call"][0], tables[COMPARISONS["call"][0]])
    print(markdown(head, tables))
    rows = list(itertools.chain(*tables.values()))
    return 0 if rows and not any(map(is_failure, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
