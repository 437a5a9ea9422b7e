"""Devices, what is available, the head of the report, the grid of the matrix, and the table of the benchmark."""

import contextlib
import ctypes.util
import datetime
import functools
import html
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
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


# What the report's head and --require know.
TESTED = ("numba", "cuda", "warp", "warp_gpu", "pallas", "gpu", "cuda package", "gcc", "simulator")
CONDITIONS = {  # requirement: (is it met?, the reason of the skip); others are packages
    "gpu": (gpu, NO_GPU),
    "no gpu": (has_no_gpu, "shows what can be done without a GPU"),
    "cuda": (runs_cuda, NO_DEVICE),
    "warp": (runs_warp_on_cpu, "Warp has no compiler for CPUs here"),
    "warp_gpu": (gpu, NO_GPU),
    "simulator": (SIMULATOR, "needs NUMBA_ENABLE_CUDASIM=1 (other tests start such a process)"),
    "compiler": (not SIMULATOR, "the simulator compiles nothing"),
    "cuda package": (
        any(map(importlib.util.find_spec, ("numba_cuda", "numba_cuda_mlir"))),
        "neither numba-cuda nor numba-cuda-mlir is installed",
    ),
    "fake driver": (FAKE_DRIVER, "test_cuda_fake_driver runs it"),
    "real driver": (not FAKE_DRIVER, "runs once, without the fake driver"),
    "gcc": (shutil.which("gcc"), "no C compiler"),
    "libm": (ctypes.util.find_library("m"), "C's functions of numbers are in no library of their own"),
}
PACKAGES = dict.fromkeys(CONDITIONS, "numba")  # requirement: the package that it is imported from
PACKAGES |= {"warp": "warp", "warp_gpu": "warp", "pallas": "jax.experimental.pallas"}
PACKAGES |= {name: name for name in ("jax", "numba")}
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
    """What a test needs: the marks `gpu` and `needs(...)`, and of a cell of the matrix what the backend needs."""
    needed = []
    for mark in item.iter_markers("needs"):
        needed += mark.args
    if item.get_closest_marker("gpu"):
        needed.append("gpu")
    if is_cell(item):
        needed.append(item.module.BACKENDS[item.callspec.params["backend"]].needs)
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


def cores():
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    for number, item in enumerate(items):
        if is_cell(item):
            item.user_properties.append(("cell", [number, *cell_of(item)]))


@pytest.fixture(autouse=True)
def computing(request):
    """Tests that need a GPU compute there, all others on the CPU."""
    with computing_for(requirements_of(request.node)):
        yield


# ======================================================================================================
# The grid of the matrix: printed at the end of a run that had cells of it
# ======================================================================================================


def is_cell(item):
    return item.originalname == "test_matrix"


def cell_of(item):
    """Operation, backend, transformation and dtype: what a report carries, also from a worker of xdist."""
    return [item.callspec.params[name] for name in ("op", "backend", "transformation", "dtype")]


def pytest_terminal_summary(terminalreporter, config):
    cells, simulated = cells_of(terminalreporter.stats)
    if path := config.getoption("--cells-out"):
        pathlib.Path(path).write_text(json.dumps(cells), encoding="utf-8")
    if cells or simulated:
        title, text = "matrix: transformations that passed, and operations by dtype", grids(cells, simulated)
        terminalreporter.section(title)
        terminalreporter.write(text)
        if path := config.getoption("--grid-out"):
            head = names_and_versions(versions_of(PACKAGES_OF_HEAD))
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"### {title}\n\nPython {platform.python_version()}, {head}\n\n```\n{text}```\n\n")
    if tables := config.stash.get(TABLES, {}):
        terminalreporter.section("benchmark")
        terminalreporter.write(benchmark_report(tables, config.getoption("--bench-out")))


def cells_of(stats):
    """(cell, outcome) of those that ran here, whose outcome may be the reason of a skip; and those that passed in the
    simulator."""
    cells, simulated = [], []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in stats.get(outcome, []):
            properties = dict(getattr(report, "user_properties", []))
            simulated += properties.get("simulated", [])
            if "cell" in properties:
                reason = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else outcome
                cells.append((properties["cell"], reason))
    return [(cell, outcome) for (_, *cell), outcome in sorted(cells)], simulated


def grids(cells, simulated):
    """A table of operations, one of dtypes, and what the letters of skips mean."""
    simulated = [(cell, "simulator" if not SIMULATOR else "passed") for cell in simulated]
    by_op, by_dtype = {}, {}
    for (op, backend, transformation, dtype), outcome in cells + simulated:
        by_op.setdefault((op, backend), {}).setdefault(outcome, set()).add(transformation)
        by_dtype.setdefault((dtype, backend), {}).setdefault(outcome, set()).add(op)
    reasons = []
    text = grid_text(by_op, reasons) + "\n" + grid_text(by_dtype, reasons)
    for letter, reason in zip(string.ascii_lowercase, reasons):
        text += f"{letter}: skipped: {reason}\n"
    return text + "sim: on Numba's simulator of CUDA\n" * bool(simulated)


def grid_text(outcomes, reasons):
    """The text of {(line, column): {outcome: names}}."""
    lines, columns = [list(dict.fromkeys(names)) for names in zip(*outcomes)]
    rows = [["", *columns]]
    for line in lines:
        rows.append([line, *[cell_text(outcomes.get((line, column), {}), reasons) for column in columns]])
    return "".join("  ".join(row).rstrip() + "\n" for row in aligned(rows))


def cell_text(outcomes, reasons):
    """How many passed, how many did not, and letters for those skipped: "28", "26 a", "27 1 FAILED", "27 sim"."""
    passed = set().union(*[outcomes.get(outcome, ()) for outcome in ("passed", "simulator")])
    failed = set().union(*[outcomes.get(outcome, ()) for outcome in ("failed", "error")])
    parts = [str(len(passed - failed))] * bool(passed - failed)
    parts += [f"{len(failed)} FAILED"] * bool(failed)
    parts += ["sim"] * ("simulator" in outcomes)
    for outcome, names in sorted(outcomes.items()):
        if outcome in ("passed", "failed", "error", "simulator") or names <= passed | failed:
            continue
        if outcome not in reasons:
            reasons.append(outcome)
        parts.append(string.ascii_lowercase[reasons.index(outcome)])
    return " ".join(parts) or "-"


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
            if draw := PICTURES.get(table["picture"]):
                picture = draw(title, table["rows"])
                pathlib.Path(f"{prefix}-{table['picture']}.svg").write_text(picture, encoding="utf-8")
    return text


def machine():
    """Where and with what the figures were measured."""
    packages = "jax jaxlib numba numba-cuda numba-cuda-mlir warp-lang numpy scipy brainevent brian2".split()
    where = f"{processor()}, {os.cpu_count()} cores"
    if gpu():
        where += f", {gpu().device_kind}"
    load = f"{os.getloadavg()[2]:.1f}" if hasattr(os, "getloadavg") else "unknown"  # Windows has none
    return {
        "date": datetime.date.today().isoformat(),
        "machine": where,
        "load": load,
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


# -- its pictures, for light and dark backgrounds ------------------------------------------------------

SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 {height}" font-family="sans-serif" font-size="14">
<style>
text {{ fill: #1f2328 }} .axis {{ fill: #59636e; font-size: 12px }} line {{ stroke: #d1d9e0 }}
.ours {{ fill: #0969da }} .other {{ fill: #818b98 }} path {{ stroke: #0969da }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #f0f6fc }} .axis {{ fill: #9198a1 }} line {{ stroke: #3d444d }}
.ours {{ fill: #4493f8 }} .other {{ fill: #656c76 }} path {{ stroke: #4493f8 }}
}}
</style>
<title>{title}</title>
{lines}
</svg>
"""
OURS = ("numba_kernel", "warp_kernel", "numba_cuda_kernel", "XLACustomKernel (Numba)")


def svg(title, height, lines):
    return SVG.format(title=html.escape(title), height=height, lines="\n".join(lines))


def svg_text(x, y, text, anchor="start", kind=""):
    return f'<text x="{x:.0f}" y="{y}" text-anchor="{anchor}" class="{kind}">{html.escape(text)}</text>'


def speed_picture(title, rows):
    """Horizontal bars with values, on a logarithmic scale from a decade below the smallest."""
    rows = sorted([row for row in rows if "value" in row], key=lambda row: row["value"])
    values, unit = [row["value"] for row in rows], rows[0]["unit"]
    first, last = math.floor(math.log10(min(values)) - 0.5), math.ceil(math.log10(max(values)))
    decade = 400 / (last - first)
    bottom = 40 + 28 * len(rows)
    lines = [svg_text(220, 20, f"{title}, in {unit} on a logarithmic scale", kind="axis")]
    for power in range(first, last + 1):
        x = 220 + decade * (power - first)
        lines.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="32" y2="{bottom}"/>')
        lines.append(svg_text(x, bottom + 18, f"{10.0**power:,g}", "middle", "axis"))
    for number, row in enumerate(rows):
        y, width = 36 + 28 * number, decade * (math.log10(row["value"]) - first)
        kind = "ours" if row["path"] in OURS else "other"
        lines.append(svg_text(210, y + 16, row["path"], "end"))
        lines.append(f'<rect x="220" y="{y}" width="{width:.1f}" height="22" rx="3" class="{kind}"/>')
        lines.append(svg_text(228 + width, y + 16, f"{row['value']:.3g} {unit}"))
    return svg(title, bottom + 28, lines)


def raster_picture(title, rows):
    """A dot for each spike: time to the right, a line for each neuron."""
    spikes = rows[0]["raster"]
    end, n_neurons = max(time for time, _ in spikes), 1 + max(neuron for _, neuron in spikes)
    dots = "".join(f"M{40 + 660 * time / end:.1f} {32 + 240 * neuron / n_neurons:.1f}h0" for time, neuron in spikes)
    lines = [
        svg_text(40, 20, f"{title}: {n_neurons} of the neurons", kind="axis"),
        f'<path d="{dots}" stroke-width="2" stroke-linecap="round"/>',
        svg_text(40, 292, "0", "middle", "axis"),
        svg_text(700, 292, f"{end:.0f} ms", "end", "axis"),
    ]
    return svg(title, 300, lines)


PICTURES = {"speed": speed_picture, "raster": raster_picture}
