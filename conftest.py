"""Devices, what is available, the head of the report, the grid of the matrix, and the table of the benchmark."""

import contextlib
import ctypes
import datetime
import functools
import importlib
import importlib.metadata
import io
import json
import os
import pathlib
import platform
import shutil
import string

# Several CPU devices, for shard_map and pmap; must be set before jax makes its backend.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import pytest


def finds_gpu():
    """Whether JAX will find an NVIDIA GPU: it has a plugin for it, and CUDA's driver lists one."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value > 0 and any("cuda" in plugin.name for plugin in plugins)


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


NO_GPU = "JAX has no GPU here"
NO_DEVICE = f"{NO_GPU}, or nothing that compiles for it (test_cuda_simulator runs it on the simulator)"


def has_no_gpu():
    return gpu() is None


def can_import(module):
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def runs_cuda():
    """Whether Numba CUDA kernels run here: on a GPU, with a package that compiles them, or on the simulator."""
    return SIMULATOR or (gpu() and (can_import("numba_cuda_mlir.cuda") or can_import("numba.cuda")))


def runs_warp_on_cpu():
    """Whether Warp has its compiler for CPUs, a library of its own that its package may be without."""
    import warp as wp

    with contextlib.redirect_stdout(io.StringIO()):  # Warp's first words
        return wp.is_cpu_available()


TESTED = ("numba", "cuda", "warp", "warp_gpu", "pallas", "gpu")  # what the report's head and --require know
CONDITIONS = {  # requirement: (is it met?, the reason of the skip); others are packages
    "gpu": (gpu, NO_GPU),
    "no gpu": (has_no_gpu, "shows what can be done without a GPU"),
    "cuda": (runs_cuda, NO_DEVICE),
    "warp": (runs_warp_on_cpu, "Warp has no compiler for CPUs here"),
    "warp_gpu": (gpu, NO_GPU),
    "simulator": (SIMULATOR, "needs NUMBA_ENABLE_CUDASIM=1 (test_cuda_simulator runs it)"),
    "compiler": (not SIMULATOR, "the simulator compiles nothing"),
    "fake driver": (FAKE_DRIVER, "test_cuda_fake_driver runs it"),
    "real driver": (not FAKE_DRIVER, "runs once, without the fake driver"),
    "gcc": (shutil.which("gcc"), "no C compiler"),
}
PACKAGES = dict.fromkeys(CONDITIONS, "numba")  # requirement: its package, if that has another name
PACKAGES |= {"warp": "warp", "warp_gpu": "warp", "pallas": "jax.experimental.pallas"}
ON_GPU = {"gpu", "cuda", "warp_gpu"}  # what computes on the GPU if there is one


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
    package = PACKAGES.get(requirement, requirement)
    try:
        importlib.import_module(package)
    except ImportError as error:
        return f"{package} cannot be imported ({error})"
    condition, reason = CONDITIONS.get(requirement, (True, ""))
    if callable(condition):
        condition = condition()
    return None if condition else reason


def pytest_addoption(parser):
    parser.addoption("--require", default="", help="comma-separated: fail where one of these is missing, do not skip")
    parser.addoption("--bench-out", metavar="PREFIX", help="write the benchmark to PREFIX.json and PREFIX.md")


def pytest_report_header(config):
    packages = ("jax", "jaxlib", "numpy", "numba", "warp-lang", "numba-cuda", "numba-cuda-mlir", "brainevent")
    devices = f"{jax.device_count('cpu')} CPU devices"
    if gpu():
        devices += f", {jax.device_count('cuda')} GPUs"
    if SIMULATOR:
        devices += ", Numba CUDA simulator"
    tested, skipped = [], []
    for requirement in TESTED:
        if reason := missing(requirement):
            skipped.append(f"skipped: {requirement} ({reason})")
        else:
            tested.append(requirement)
    return [names_and_versions(versions_of(packages)), f"{devices}; testing: {', '.join(tested)}", *skipped]


def names_and_versions(versions):
    return ", ".join(map(" ".join, versions.items()))


def versions_of(packages):
    """{package: version} of those that are installed."""
    installed = {}
    for distribution in importlib.metadata.distributions():
        if distribution.name:
            name = distribution.name.lower().replace("_", "-")
            installed.setdefault(name, distribution.version)  # of two, the first is imported
    return {name: installed[name] for name in packages if name in installed}


def requirements_of(item):
    """What a test needs: the marks `gpu` and `needs(...)`, and of a cell of the matrix what the backend needs."""
    needed = []
    for mark in item.iter_markers("needs"):
        needed += mark.args
    if item.get_closest_marker("gpu"):
        needed.append("gpu")
    if cell := cell_of(item):
        _, backend = cell
        needed.append(item.module.BACKENDS[backend].needs)
    return needed


def pytest_runtest_setup(item):
    """The one place where something that is missing becomes a skip, or with --require a failure."""
    required = names_in(item.config.getoption("--require"))
    if "cuda" in required:
        required.add("gpu")
    if required >= {"warp", "gpu"}:
        required.add("warp_gpu")
    for requirement in requirements_of(item):
        if reason := missing(requirement):
            if requirement in required:
                pytest.fail(f"--require={requirement}: {reason}")
            pytest.skip(f"{requirement}: {reason}")


def names_in(text):
    return {name.strip() for name in text.split(",")} - {""}


def pytest_configure(config):
    """Refuse names that --require does not know, which would require nothing; and compile in less time."""
    for name in names_in(config.getoption("--require")):
        if name not in TESTED:
            raise pytest.UsageError(f"--require={name}: unknown; choose from {', '.join(TESTED)}")
    may_measure = "not bench" not in config.getoption("markexpr")
    wanted = os.environ.get("XLA_KERNELS_TESTS_OPTIMIZED") == "1"
    if not (may_measure or wanted or finds_gpu()):  # on a GPU, XLA's fusions are part of what is tested
        compile_fast()


def compile_fast():
    """Few optimizations, here and in processes that tests start, as code runs for microseconds: a third of the time."""
    os.environ.setdefault("NUMBA_OPT", "1")  # read when Numba is imported
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """With -n but no --dist, let workers that are done take over tests from others."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(items):
    """Run tests that start processes first, as they take longest; and say in each report which cell it is of."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    for item in items:
        if cell_of(item):
            item.user_properties.append(("place in grid", place_in_grid(item)))


@pytest.fixture(autouse=True)
def computing(request):
    """Tests that need a GPU compute there, all others on the CPU."""
    with computing_for(requirements_of(request.node)):
        yield


# ======================================================================================================
# The grid of the matrix: printed at the end of a run that had cells of it
# ======================================================================================================


def cell_of(item):
    """The transformation and the backend of a test of the matrix, or None."""
    if item.originalname != "test_matrix":
        return None
    params = item.callspec.params
    return params["transformation"], params["backend"]


def place_in_grid(item):
    """Line, transformation, column and backend: what a report carries, also from a worker of xdist."""
    transformation, backend = cell_of(item)
    line = list(item.module.TRANSFORMS).index(transformation)
    column = list(item.module.BACKENDS).index(backend)
    return line, transformation, column, backend


def pytest_terminal_summary(terminalreporter, config):
    lines, reasons = lines_of_grid(terminalreporter.stats)
    if lines:
        terminalreporter.section("matrix: cells that passed")
        terminalreporter.write(grid_text(lines, reasons))
    if tables := config.stash.get(TABLES, {}):
        terminalreporter.section("benchmark")
        terminalreporter.write(benchmark_report(tables, config.getoption("--bench-out")))


def lines_of_grid(stats):
    """{line: {column: outcomes}}, where letters stand for skips, and the reasons that the letters mean."""
    lines, reasons = {}, []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, []):
            place = dict(getattr(report, "user_properties", [])).get("place in grid")
            if place is None:
                continue
            line, transformation, column, backend = place
            cells = lines.setdefault((line, transformation), {})
            outcomes = cells.setdefault((column, backend), [])
            if outcome == "skipped":
                reason = report.longrepr[2].removeprefix("Skipped: ")
                if reason not in reasons:
                    reasons.append(reason)
                outcomes.append(string.ascii_lowercase[reasons.index(reason)])
            else:
                outcomes.append(outcome)
    return lines, reasons


def grid_text(lines, reasons):
    """A line for each transformation, a column for each backend, and below what the letters of skips mean."""
    columns = sorted(set().union(*lines.values()))
    rows = [["", *[backend for _, backend in columns]]]
    for (_, transformation), cells in sorted(lines.items()):
        rows.append([transformation, *[cell_text(cells.get(column, [])) for column in columns]])
    text = ""
    for row in aligned(rows):
        text += "  ".join(row).rstrip() + "\n"
    for letter, reason in zip(string.ascii_lowercase, reasons):
        text += f"{letter}: skipped: {reason}\n"
    return text


def aligned(rows):
    """The rows, with spaces that make each cell as wide as its column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [list(map(str.ljust, row, widths)) for row in rows]


def cell_text(outcomes):
    """How many passed, how many did not, and letters for those skipped: "28", "26 a", "27 1 FAILED"."""
    passed, failed = outcomes.count("passed"), outcomes.count("failed") + outcomes.count("error")
    parts = sorted(set(outcomes) - {"passed", "failed", "error"})
    if failed:
        parts.insert(0, f"{failed} FAILED")
    if passed:
        parts.insert(0, str(passed))
    return " ".join(parts) or "-"


# ======================================================================================================
# The benchmark's report: printed at the end of `pytest -m bench`, written with --bench-out=PREFIX
# ======================================================================================================

TABLES = pytest.StashKey[dict]()


@pytest.fixture
def bench_table(request):
    """A function that adds a table to the report: its title and its rows."""
    return request.config.stash.setdefault(TABLES, {}).__setitem__


def benchmark_report(tables, prefix):
    """The report as text; with a prefix also written to files."""
    report = {**machine(), "tables": tables}
    text = markdown(report)
    if prefix:
        pathlib.Path(f"{prefix}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        pathlib.Path(f"{prefix}.md").write_text(text, encoding="utf-8")
    return text


def machine():
    """Where and with what the figures were measured."""
    packages = "jax jaxlib numba numba-cuda numba-cuda-mlir warp-lang numpy scipy brainevent brian2".split()
    where = f"{processor()}, {os.cpu_count()} cores"
    if gpu():
        where += f", {gpu().device_kind}"
    return {
        "date": datetime.date.today().isoformat(),
        "machine": where,
        "load": f"{os.getloadavg()[2]:.1f}",
        "versions": {"python": platform.python_version(), **versions_of(packages)},
    }


def processor():
    """Its name where Linux says it, or its architecture."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(": ")[1]
    return platform.machine()


def markdown(report):
    """One table of all comparisons: medians, smallest and largest, and the ratio to the first row of each."""
    versions = names_and_versions(report["versions"])
    text = f"{report['date']}; {report['machine']}, mean load {report['load']}; {versions}\n\n"
    rows = [("path", "median", "range", "ratio")]
    for title, measured in report["tables"].items():
        rows.append((f"**{title}**", "", "", ""))
        for row in measured:
            path = f"{row['case']}: {row['path']}".removeprefix(": ")
            rows.append((path, *figures(row)))
    header, *others = aligned(rows)
    for row in header, ["-" * len(cell) for cell in header], *others:
        text += "| " + " | ".join(row) + " |\n"
    return text


def figures(row):
    """Median with unit, range and ratio of one row, or why there is none."""
    if "value" not in row:
        return row["note"], "", ""
    extent = f"{row['min']:.3g} - {row['max']:.3g}" if "min" in row else ""
    ratio = f"{row['ratio']:.3g}" if "ratio" in row else ""
    return f"{row['value']:.3g} {row['unit']}", extent, ratio
