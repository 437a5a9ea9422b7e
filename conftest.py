"""Devices, what is available, the header of the report, and the table of the benchmark."""

import contextlib
import ctypes
import datetime
import functools
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil

# Several CPU devices, for shard_map and pmap; must be set before jax makes its backend.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import pytest


def finds_gpu():
    """Whether JAX will find an NVIDIA GPU: it has a plugin for it, and CUDA's driver lists one."""
    plugins = [entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")]
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value > 0 and any("cuda" in name for name in plugins)


# Here and in processes that tests start, the CPU is JAX's default also beside a GPU, which tests that need one choose.
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if finds_gpu() else "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # many processes share the GPU's memory
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
FAKE_DRIVER = "XLA_KERNELS_FAKE_CUDA" in os.environ


@functools.cache
def gpu():
    """The first GPU, or None."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


BACKENDS = ("numba", "numba_parallel", "numba_cuda", "numba_cuda_callable", "warp", "warp_gpu", "pallas")
PACKAGES = {"warp": "warp", "warp_gpu": "warp", "pallas": "jax.experimental.pallas"}
PACKAGES |= {name: name for name in ("flatbuffers", "scipy", "numpyro", "diffrax", "equinox", "optax")}
NO_GPU = "JAX has no GPU here"
NO_DEVICE = f"{NO_GPU}, or nothing that compiles for it (test_cuda_simulator runs it on the simulator)"


def runs_cuda():
    """Whether Numba CUDA kernels run here: on a GPU, with a package that compiles them, or on the simulator."""
    import xla_kernels as xk

    return SIMULATOR or (gpu() and any(package.is_installed() for package in xk._CUDA_PACKAGES.values()))


def runs_warp_on_cpu():
    """Whether Warp has its compiler for CPUs, a library of its own that its package may be without."""
    import xla_kernels as xk

    with xk._warp_session() as wp:
        return wp.is_cpu_available()


CONDITIONS = {  # requirement: (whether it is met, the reason of the skip); for other names a package is all it takes
    "gpu": (gpu, NO_GPU),
    "no gpu": (lambda: not gpu(), "shows what can be done without a GPU"),
    **dict.fromkeys(("cuda", "numba_cuda", "numba_cuda_callable"), (runs_cuda, NO_DEVICE)),
    "warp": (runs_warp_on_cpu, "Warp has no compiler for CPUs here"),
    "warp_gpu": (gpu, NO_GPU),
    "simulator": (lambda: SIMULATOR, "needs NUMBA_ENABLE_CUDASIM=1 (test_cuda_simulator runs it)"),
    "compiler": (lambda: not SIMULATOR, "the simulator compiles nothing"),
    "fake driver": (lambda: FAKE_DRIVER, "test_cuda_fake_driver runs it"),
    "real driver": (lambda: not FAKE_DRIVER, "runs once, without the fake driver"),
    "gcc": (lambda: shutil.which("gcc"), "no C compiler"),
}
ON_GPU = {"gpu", "cuda", "numba_cuda", "numba_cuda_callable", "warp_gpu"}  # what computes on the GPU if there is one


def platform_of(requirements):
    """ "gpu" or "cpu": where a test with these requirements computes."""
    return "gpu" if gpu() and ON_GPU & set(requirements) else "cpu"


@contextlib.contextmanager
def configured(option, value):
    """Set an option of JAX for a while, in all threads and in every version of JAX."""
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        yield
    finally:
        jax.config.update(option, before)


@contextlib.contextmanager
def computing_for(requirements):
    """Make the platform of a test JAX's default."""
    if platform_of(requirements) == "cpu":
        yield
    else:  # XLA would multiply matrices of float32 in TF32, of three digits
        with configured("jax_default_device", gpu()), configured("jax_default_matmul_precision", "highest"):
            yield


def x64(on=True):
    return configured("jax_enable_x64", on)


@functools.cache
def missing(requirement):
    """Why something cannot be tested here, or None."""
    package = PACKAGES.get(requirement, "numba")
    try:
        importlib.import_module(package)
    except ImportError as error:
        return f"{package} cannot be imported ({error})"
    met, reason = CONDITIONS.get(requirement, (lambda: True, ""))
    return None if met() else reason


def pytest_addoption(parser):
    parser.addoption("--require", default="", help="comma-separated: fail where one of these is missing, do not skip")
    parser.addoption("--bench-out", metavar="PREFIX", help="write the benchmark to PREFIX.json and PREFIX.md")


def pytest_report_header(config):
    packages = ("jax", "jaxlib", "numpy", "numba", "warp-lang", "numba-cuda", "numba-cuda-mlir", "brainevent")
    installed = {d.name.lower().replace("_", "-") for d in importlib.metadata.distributions() if d.name}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages if name in installed]
    found = [name for name in (*BACKENDS, "gpu") if missing(name) is None]
    skipped = [f"skipped: {name} ({missing(name)})" for name in (*BACKENDS, "gpu") if missing(name)]
    simulator = ", Numba CUDA simulator" if SIMULATOR else ""
    devices = f"{jax.device_count('cpu')} CPU devices, {len(jax.devices('cuda')) if gpu() else 0} GPUs{simulator}"
    return [", ".join(versions), f"{devices}; testing: {', '.join(found)}", *skipped]


def requirements_of(item):
    """What a test needs: its parameter `backend`, the marks `gpu` and `needs(...)`."""
    needed = [arg for mark in item.iter_markers("needs") for arg in mark.args]
    if item.get_closest_marker("gpu"):
        needed.append("gpu")
    if hasattr(item, "callspec") and item.callspec.params.get("backend") in BACKENDS:
        needed.append(item.callspec.params["backend"])
    return needed


def pytest_runtest_setup(item):
    """The one place where something that is missing becomes a skip, or with --require a failure."""
    required = {name.strip() for name in item.config.getoption("--require").split(",")} - {""}
    if "cuda" in required:
        required |= {"numba_cuda", "numba_cuda_callable", "gpu"}
    if required >= {"warp", "gpu"}:
        required.add("warp_gpu")
    for requirement in requirements_of(item):
        if reason := missing(requirement):
            if requirement in required:
                pytest.fail(f"--require={requirement}: {reason}")
            pytest.skip(f"{requirement}: {reason}")


def pytest_configure(config):
    """Refuse names that --require does not know, which would require nothing."""
    for name in config.getoption("--require").split(","):
        if name and name.strip() not in (*BACKENDS, "cuda", "gpu"):
            raise pytest.UsageError(f"--require={name}: unknown; choose from {', '.join((*BACKENDS, 'cuda', 'gpu'))}")


@pytest.fixture(autouse=True)
def computing(request):
    """Tests that need a GPU compute there, all others on the CPU."""
    with computing_for(requirements_of(request.node)):
        yield


# ======================================================================================================
# The benchmark's report: printed at the end of `pytest -m bench`, written with --bench-out=PREFIX
# ======================================================================================================

TABLES = pytest.StashKey[dict]()


@pytest.fixture
def bench_table(request):
    """A function that adds a table to the report: its title and its rows."""
    return request.config.stash.setdefault(TABLES, {}).__setitem__


def pytest_terminal_summary(terminalreporter, config):
    if not (tables := config.stash.get(TABLES, {})):
        return
    report = {**machine(), "tables": tables}
    text = markdown(report)
    terminalreporter.section("benchmark")
    terminalreporter.write(text)
    if prefix := config.getoption("--bench-out"):
        pathlib.Path(f"{prefix}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        pathlib.Path(f"{prefix}.md").write_text(text, encoding="utf-8")


def machine():
    """Where and with what the figures were measured."""
    cpu, info = platform.machine(), pathlib.Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(": ")[1] for line in info.read_text().splitlines() if line.startswith("model n")), cpu)
    kind = f", {gpu().device_kind}" if gpu() else ""
    names = "jax jaxlib numba numba-cuda numba-cuda-mlir warp-lang numpy scipy brainevent brian2".split()
    found = reversed([*importlib.metadata.distributions()])  # of two installed versions, the first is imported
    installed = {d.name.lower().replace("_", "-"): d.version for d in found if d.name}
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{cpu}, {os.cpu_count()} cores{kind}",
        "load": f"{os.getloadavg()[2]:.1f}",
        "versions": {"python": platform.python_version(), **{n: installed[n] for n in names if n in installed}},
    }


def markdown(report):
    """One table of all comparisons: medians, smallest and largest, and the ratio to the first row of each."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    rows = [("path", "median", "range", "ratio")]
    for title, measured in report["tables"].items():
        rows.append((f"**{title}**", "", "", ""))
        rows += [(f"{row['case']}: {row['path']}".removeprefix(": "), *figures(row)) for row in measured]
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, tuple("-" * width for width in widths))
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    header = f"{report['date']}; {report['machine']}, mean load {report['load']}; {versions}"
    return "\n".join([header, "", *lines]) + "\n"


def figures(row):
    """Median with unit, range and ratio of one row, or why there is none."""
    if "value" not in row:
        return row["note"], "", ""
    extent = f"{row['min']:.3g} - {row['max']:.3g}" if "min" in row else ""
    return f"{row['value']:.3g} {row['unit']}", extent, f"{row['ratio']:.3g}" if "ratio" in row else ""
