"""Devices, what is available, the head of the report, outcomes and the grid of the matrix, and the benchmark."""

import collections
import contextlib
import ctypes.util
import datetime
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import pathlib
import platform
import shutil
import string
import subprocess
import sys

# Several CPU devices, for shard_map and pmap; must be set before jax makes its backend.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import pytest

pytest_plugins = ("pytester",)  # for the tests of this file


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
if SIMULATOR:  # it polls its threads, and each waits that long for its turn
    sys.setswitchinterval(1e-4)
FAKE_DRIVER = "XLA_KERNELS_FAKE_CUDA" in os.environ
SUCCESSOR = "XLA_KERNELS_CUDA_SUCCESSOR" in os.environ  # test numba-cuda-mlir where numba-cuda is installed, too


@functools.cache
def gpu():
    """The first GPU, or None."""
    try:
        return jax.devices("cuda")[0]
    except RuntimeError:
        return None


NO_GPU = "JAX has no GPU here"
NO_DEVICE = f"{NO_GPU}, or nothing that compiles for it (other tests run it on the simulator)"


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


def has_four(platform):
    """Whether JAX has four devices, for shard_map and pmap."""
    try:
        return jax.device_count(platform) >= 4
    except RuntimeError:
        return False


def cores():
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def installed(package):
    return importlib.util.find_spec(package) is not None


def warp_has_grid_stride():
    import warp as wp

    return "grid_stride" in inspect.signature(wp.kernel).parameters


def warp_functions_take_functions():
    import warp as wp

    return hasattr(wp, "ref")


CONDITIONS = {  # requirement: (is it met?, the reason of the skip); others are packages
    "gpu": (gpu, NO_GPU),
    "no gpu": (has_no_gpu, "shows what can be done without a GPU"),
    "four devices": (functools.partial(has_four, "cpu"), "JAX has fewer than four CPU devices here"),
    "four gpus": (functools.partial(has_four, "cuda"), "JAX has fewer than four GPUs here"),
    "cuda": (runs_cuda, NO_DEVICE),
    "warp": (runs_warp_on_cpu, "Warp has no compiler for CPUs here"),
    "warp_gpu": (gpu, NO_GPU),
    "warp 1.15": (warp_has_grid_stride, "Warp 1.15 brought kernels without a grid stride"),
    "warp 1.19": (warp_functions_take_functions, "Warp 1.19 brought functions that take functions"),
    "simulator": (SIMULATOR, "needs NUMBA_ENABLE_CUDASIM=1 (other tests start such a process)"),
    "compiler": (not SIMULATOR, "the simulator compiles nothing"),
    "numba-cuda": (installed("numba_cuda"), "numba-cuda is not installed"),
    "numba-cuda-mlir": (installed("numba_cuda_mlir"), "numba-cuda-mlir is not installed"),
    "cuda package": (
        installed("numba_cuda") or installed("numba_cuda_mlir"), "neither numba-cuda nor numba-cuda-mlir is installed",
    ),
    "fake driver": (FAKE_DRIVER, "test_cuda_fake_driver runs it"),
    "real driver": (not FAKE_DRIVER, "runs once, without the fake driver"),
    "linux": (sys.platform == "linux", "CUDA's driver and threads have other names on another system"),
    "glibc": (hasattr(ctypes.pythonapi, "gnu_get_libc_version"), "its modes of floats, and Numba's omp for it"),
    "cores": (cores() > 1 and sys.platform != "win32", "needs two cores that share the slices of a batch"),
    "gcc": (shutil.which("gcc"), "no C compiler"),
    "brainevent": (installed("brainevent"), "brainevent is not installed"),
    "tbb": (lambda: versions_of(["tbb"]), "tbb is not installed"),
    "libm": (ctypes.util.find_library("m"), "C's functions of numbers are in no library of their own"),
}  # fmt: skip
PACKAGES = dict.fromkeys(CONDITIONS, "numba")  # requirement: the package that it is imported from
PACKAGES |= dict.fromkeys(("warp", "warp_gpu", "warp 1.15", "warp 1.19"), "warp")
PACKAGES |= {"pallas": "jax.experimental.pallas", "jax": "jax", "numba": "numba"}
# What the report's head and --require know.
TESTED = (
    "numba", "cuda", "warp", "warp_gpu", "pallas", "gpu", "four gpus", "cuda package", "gcc", "simulator", "brainevent",
)  # fmt: skip
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
    """Why something cannot be tested here, or None; that an installed package cannot be imported is an error."""
    if requirement not in PACKAGES:
        raise ValueError(f"needs({requirement!r}): unknown; choose from {', '.join(PACKAGES)}, or add it to PACKAGES")
    package = PACKAGES[requirement]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        return f"{package} is not installed"
    condition, reason = CONDITIONS.get(requirement, (True, ""))
    if callable(condition):
        condition = condition()
    return None if condition else reason


def pytest_addoption(parser):
    parser.addoption("--require", default="", help="comma-separated: fail where one of these is missing, do not skip")
    parser.addoption("--warnings-are-errors", action="store_true", help="but for those that pyproject.toml ignores")
    parser.addoption("--optimize", action="store_true", help="compile as users do, which takes longer")
    parser.addoption("--cells-out", metavar="PATH", help="write which cells of the matrix passed")
    parser.addoption("--outcomes-out", metavar="PATH", help="write which tests passed, and why others were skipped")
    parser.addoption("--grid-out", metavar="PATH", help="append the grid of the matrix, as Markdown")
    parser.addoption("--bench", action="store_true", help="run the benchmarks, and nothing else")
    parser.addoption("--bench-out", metavar="PREFIX", help="write the benchmark to PREFIX.json, .md and pictures")


PACKAGES_OF_HEAD = "jax jaxlib numpy numba warp-lang numba-cuda numba-cuda-mlir brainevent".split()


def pytest_report_header(config):
    devices = f"{jax.device_count('cpu')} CPU devices"
    if gpu():
        devices += f", {jax.device_count('cuda')} GPUs"
    if SIMULATOR:
        devices += ", Numba CUDA simulator"
    tested, others = [], []
    for requirement in TESTED:
        try:
            reason = missing(requirement)
        except ImportError as error:
            others.append(f"BROKEN: {requirement} ({error})")
            continue
        if reason:
            others.append(f"skipped: {requirement} ({reason})")
        else:
            tested.append(requirement)
    settings = [f"{name}={os.environ[name]}" for name in FAST if name in os.environ] or ["as users have them"]
    devices = f"{devices}; compilers' settings: {', '.join(settings)}; testing: {', '.join(tested)}"
    return [names_and_versions(versions_of(PACKAGES_OF_HEAD)), devices, *others]


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
    """What a test needs: the marks `gpu` and `needs(...)`."""
    needed = [requirement for mark in item.iter_markers("needs") for requirement in mark.args]
    if item.get_closest_marker("gpu"):
        needed.append("gpu")
    if platform_of(needed) == "gpu":
        needed = ["four gpus" if requirement == "four devices" else requirement for requirement in needed]
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
    """Refuse names that --require does not know, which would require nothing; filter warnings; compile in less time."""
    for name in names_in(config.getoption("--require")):
        if name not in TESTED:
            raise pytest.UsageError(f"--require={name}: unknown; choose from {', '.join(TESTED)}")
    if config.getoption("--warnings-are-errors"):
        config.getini("filterwarnings").insert(0, "error")
    as_users_do = config.getoption("--bench") or config.getoption("--optimize")
    if not (as_users_do or finds_gpu()):  # on a GPU, XLA's fusions are part of what is tested
        compile_fast()


FAST = {"NUMBA_OPT": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # Numba reads its own when it is imported


def compile_fast():
    """Few optimizations, here and in processes that tests start, as code runs for microseconds: a third of the time."""
    for name, value in FAST.items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_disable_most_optimizations", os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Beside a GPU a few, as each has a CUDA context there."""
    if finds_gpu() and "PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ:
        return min(4, cores())
    return None  # xdist's own number


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """With -n but no --dist, let workers that are done take over tests from others."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(config, items):
    """Benchmarks with --bench alone; first the tests that start processes, as they take longest."""
    chosen, others = [], []
    for item in items:
        is_benchmark = item.get_closest_marker("bench") is not None
        (chosen if is_benchmark == config.getoption("--bench") else others).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = sorted(chosen, key=lambda item: item.get_closest_marker("processes") is None)
    cells = [item for item in items if is_cell(item)]
    for number, item in enumerate(cells):
        item.user_properties.append(("cell", [number, *cell_of(item)]))
    if cells:
        matrix = cells[0].module
        left_out = [(cell, matrix.left_out(*cell)) for cell in matrix.possible_cells()]
        getattr(config, "workeroutput", {})["left out"] = config.stash[LEFT_OUT] = left_out


def pytest_collection_finish(session):
    """What was imported and collected stays: Python's collector need not look through it again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def computing(request):
    """Tests that need a GPU compute there, all others on the CPU."""
    with computing_for(requirements_of(request.node)):
        yield


# ======================================================================================================
# What came out: of all tests with --outcomes-out, and of the cells of the matrix as a grid at the end of a run
# ======================================================================================================

LEFT_OUT = pytest.StashKey[list]()  # all cells that there could be, each with why it is left out, or None


def is_cell(item):
    return item.originalname == "test_matrix"


def cell_of(item):
    """Operation, backend, transformation and dtype: what a report carries, also from a worker of xdist."""
    return [item.callspec.params[name] for name in ("op", "backend", "transformation", "dtype")]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A worker of xdist is done; the process that prints the report collects no tests itself."""
    if left_out := getattr(node, "workeroutput", {}).get("left out"):
        node.config.stash[LEFT_OUT] = left_out


def pytest_terminal_summary(terminalreporter, config):
    reports = terminalreporter.stats
    cells, simulated = cells_of(reports)
    if path := config.getoption("--cells-out"):
        pathlib.Path(path).write_text(json.dumps(cells), encoding="utf-8")
    if path := config.getoption("--outcomes-out"):
        outcomes = {report.nodeid.partition("::")[2]: outcome for report, outcome in outcomes_of(reports)}
        pathlib.Path(path).write_text(json.dumps(outcomes), encoding="utf-8")
    if cells or simulated:
        title = "matrix: how many cells passed"
        text = grid_text(cells, simulated, config.stash.get(LEFT_OUT, []))
        terminalreporter.section(title)
        terminalreporter.write(text)
        if path := config.getoption("--grid-out"):
            head = names_and_versions(versions_of(PACKAGES_OF_HEAD))
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"### {title}\n\nPython {platform.python_version()}, {head}\n\n```\n{text}```\n\n")
    if tables := config.stash.get(TABLES, {}):
        terminalreporter.section("benchmark")
        terminalreporter.write(benchmark_report(tables, config.getoption("--bench-out")))


def outcomes_of(reports):
    """(report, outcome) of each test: "passed", "failed", "error", or the reason of a skip."""
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in reports.get(outcome, []):
            yield report, report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else outcome


def cells_of(reports):
    """[(cell, outcome)] of those that ran here, in the order of the file; and those that passed in the simulator."""
    cells, simulated = [], []
    for report, outcome in outcomes_of(reports):
        properties = dict(getattr(report, "user_properties", []))
        simulated += properties.get("simulated", [])
        if "cell" in properties:
            cells.append((properties["cell"], outcome))
    return [(cell, outcome) for (_, *cell), outcome in sorted(cells)], simulated


def grid_text(cells, simulated, left_out):
    """Tables of operations, transformations and dtypes by backend; what failed, by name; and what the marks mean."""
    outcomes = dict.fromkeys(map(tuple, simulated), "simulated")
    for cell, outcome in cells:
        if outcome in ("passed", "failed", "error") or tuple(cell) not in outcomes:
            outcomes[tuple(cell)] = outcome
    marks = {"passed": "", "failed": " FAILED", "error": " FAILED", "simulated": "s", None: "-"}
    for outcome in outcomes.values():  # others are reasons of skips
        marks.setdefault(outcome, string.ascii_lowercase.replace("s", "")[len(marks) - 5])
    cells = {tuple(cell): "." if reason else marks[outcomes.get(tuple(cell))] for cell, reason in left_out}
    float32 = {cell: mark for cell, mark in cells.items() if cell[3] == "float32"}
    text = table_text("float32", 0, float32) + table_text("float32", 2, float32) + table_text("dtype", 3, cells)
    for cell, outcome in outcomes.items():
        text += f"FAILED: {'-'.join(cell)}\n" * (marks[outcome] == " FAILED")
    text += "3: passed; 3s: on Numba's simulator of CUDA; 3-: not run\n"
    for outcome, mark in list(marks.items())[5:]:
        text += f"3{mark}: skipped: {outcome}\n"
    reasons = collections.Counter(reason for _, reason in left_out if reason)
    return text + "".join(f"{count}.: left out: {reason}\n" for reason, count in reasons.items())


def table_text(title, axis, cells):
    """For each name on an axis and each backend, how many cells there are of each mark."""
    counts = collections.defaultdict(collections.Counter)
    for cell, mark in cells.items():
        counts[cell[axis], cell[1]][mark] += 1
    rows, columns = [list(dict.fromkeys(names)) for names in zip(*counts)]
    lines = [[title, *columns]]
    for row in rows:
        entries = [sorted(counts[row, column].items()) for column in columns]
        lines.append([row, *[" ".join(f"{count}{mark}" for mark, count in entry) for entry in entries]])
    return "".join("  ".join(line).rstrip() + "\n" for line in aligned(lines)) + "\n"


def aligned(rows):
    """The rows, with spaces that make each cell as wide as its column."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [list(map(str.ljust, row, widths)) for row in rows]


# ======================================================================================================
# The benchmark's report: printed at the end of `pytest --bench`, written with --bench-out=PREFIX
# ======================================================================================================

TABLES = pytest.StashKey[dict]()


@pytest.fixture
def bench_table(request):
    """A function that adds a table to the report: its title, and its rows with the name of its picture or None."""
    return request.config.stash.setdefault(TABLES, {}).__setitem__


def benchmark_report(tables, prefix):
    """The report as text; with a prefix also written to files."""
    report = {**machine(), "tables": tables}
    text = markdown(report)
    if prefix:
        pathlib.Path(f"{prefix}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        pathlib.Path(f"{prefix}.md").write_text(text, encoding="utf-8")
        for title, table in tables.items():
            if picture := table["picture"]:
                draw(f"{prefix}-{picture}.svg", *PICTURES[picture], title, table["rows"], report["date"])
    return text


def machine():
    """Where and with what the figures were measured."""
    packages = "jax jaxlib numba numba-cuda numba-cuda-mlir warp-lang numpy scipy brainevent brian2".split()
    where = f"{processor()}, {cores()} cores"
    if gpu():
        where += f", {gpu().device_kind}"
    load = f"{os.getloadavg()[2]:.1f}" if hasattr(os, "getloadavg") else "unknown"  # Windows has none
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": where,
        "load": load,
        "versions": {"python": platform.python_version(), **versions_of(packages)},
    }


def commit():
    """The commit of this checkout, "-dirty" with changes; a copy of the files has none."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.check_output(describe, cwd=pathlib.Path(__file__).parent, encoding="utf-8").strip()
    return "unknown"


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
    text = f"{report['date']}, commit {report['commit']}; {report['machine']}, load {report['load']}; {versions}\n\n"
    rows = [("path", "median", "range", "ratio")]
    for title, table in report["tables"].items():
        rows.append((f"**{title}**", "", "", ""))
        for row in table["rows"]:
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


# -- its pictures, by the matplotlib of the `bench` extra ----------------------------------------------
# Of their own white background, so that they read alike on light and dark pages.

OURS, OTHERS, SECOND = "#0969da", "#818b98", "#cf222e"
PATHS_OF_OURS = ("numba_kernel", "warp_kernel", "numba_cuda_kernel", "XLACustomKernel (Numba)")


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
    import numpy as np

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
