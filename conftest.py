"""pytest's configuration: devices, conditions for skips, the report header, outcomes, and the grid of the matrix."""

import collections
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import typing

# shard_map and pmap need several devices.  JAX reads the flag when it creates its backend.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import numpy
import pytest

pytest_plugins = ("pytester",)  # the tests of this file use it


def finds_gpu():
    """Return whether JAX will find an NVIDIA GPU: a JAX plugin for CUDA is installed, and the driver lists a GPU."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value > 0 and any("cuda" in plugin.name for plugin in plugins)


# The CPU is JAX's default, in this process and in those that tests start.  Tests that need a GPU make it the default.
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if finds_gpu() else "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
if SIMULATOR:  # the simulator polls its threads, and each of them waits for the interpreter lock
    sys.setswitchinterval(1e-4)
HAS_FAKE_DRIVER = "XLA_KERNELS_FAKE_CUDA" in os.environ  # test_cuda_fake_driver sets it
PREFERS_SUCCESSOR = "XLA_KERNELS_CUDA_SUCCESSOR" in os.environ  # test numba-cuda-mlir even if numba-cuda is installed


@functools.cache
def devices(platform):
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def gpu():
    """Return the first GPU, or None."""
    return next(iter(devices("cuda")), None)


def installed(package):
    return importlib.util.find_spec(package) is not None


@functools.cache
def distributions():
    """Return the versions of the installed distributions by name."""
    return {found.name: found.version for found in reversed([*importlib.metadata.distributions()])}


def runs_cuda():
    """Return whether Numba CUDA kernels run: in the simulator, or on a GPU with a package that compiles them."""
    return SIMULATOR or (gpu() and (installed("numba_cuda_mlir") or installed("numba_cuda")))


def imports_cuda():
    """Return whether a package provides `cuda.jit`, which decorates kernels, also without a GPU."""
    for package in ("numba.cuda", "numba_cuda_mlir"):
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
            return True
    return False


def warp():
    return importlib.import_module("warp")


def runs_warp_on_cpu():
    """Return whether Warp has its compiler for CPUs.  Some builds of the package lack this library."""
    with contextlib.redirect_stdout(io.StringIO()):  # Warp prints its version and devices
        return warp().is_cpu_available()


def numba_version():
    return tuple(map(int, distributions()["numba"].split(".")[:2]))


class Condition(typing.NamedTuple):
    """A condition under which tests run.  If it is not met, they are skipped, or fail with --require."""

    is_met: typing.Any = True  # a bool, or a function that returns one
    reason: str = ""  # of the skip if the condition is not met
    package: str = "numba"  # must be installed, too
    tested: bool = False  # listed in the report header and accepted by --require
    on_gpu: bool = False  # if there is a GPU, tests with this condition compute on it


NO_GPU = "JAX has no GPU here"
CONDITIONS = {  # the arguments of the mark `needs`
    "numba": Condition(tested=True),
    "cuda": Condition(runs_cuda, f"{NO_GPU}, or nothing compiles for it", tested=True, on_gpu=True),
    "warp": Condition(runs_warp_on_cpu, "Warp has no compiler for CPUs here", "warp", tested=True),
    "warp_gpu": Condition(gpu, NO_GPU, "warp", tested=True, on_gpu=True),
    "pallas": Condition(package="jax.experimental.pallas", tested=True),
    "jax": Condition(package="jax"),
    "gpu": Condition(gpu, NO_GPU, tested=True, on_gpu=True),
    "no gpu": Condition(lambda: not gpu(), "tests the behaviour without a GPU"),
    "four devices": Condition(lambda: len(devices("cpu")) >= 4, "JAX has fewer than four CPU devices here"),
    "four gpus": Condition(lambda: len(devices("cuda")) >= 4, "JAX has fewer than four GPUs here", tested=True),
    "warp 1.15": Condition(lambda: "grid_stride" in inspect.signature(warp().kernel).parameters, "older Warp", "warp"),
    "warp 1.19": Condition(lambda: hasattr(warp(), "ref"), "older Warp", "warp"),
    "numba-cuda": Condition(installed("numba_cuda"), "numba-cuda is not installed"),
    "numba-cuda-mlir": Condition(installed("numba_cuda_mlir"), "numba-cuda-mlir is not installed"),
    "cuda.jit": Condition(imports_cuda, "no package provides numba.cuda"),
    "cuda package": Condition(installed("numba_cuda") or installed("numba_cuda_mlir"), "no Numba CUDA", tested=True),
    "simulator": Condition(SIMULATOR, "test_cuda_simulator starts a process for it", tested=True),
    "jax 0.11.2": Condition(jax.__version_info__ >= (0, 11, 2), "older XLA drops the barrier before it removes copies"),
    "numba 0.64": Condition(
        lambda: numba_version() >= (0, 64), "older Numba types the copy by np.ascontiguousarray as read-only"
    ),
    "compiler": Condition(not SIMULATOR, "the simulator compiles nothing"),
    "fake driver": Condition(HAS_FAKE_DRIVER, "test_cuda_fake_driver runs it"),
    "real driver": Condition(not HAS_FAKE_DRIVER, "runs once, without the fake driver"),
    "linux": Condition(sys.platform == "linux", "CUDA's driver and threads have other names on other systems"),
    "glibc": Condition(hasattr(ctypes.pythonapi, "gnu_get_libc_version"), "needs its float modes, Numba's omp, fork"),
    "cores": Condition(os.cpu_count() > 1 and sys.platform != "win32", "needs two cores and POSIX threads"),
    "gcc": Condition(shutil.which("gcc"), "no C compiler", tested=True),
    "brainevent": Condition(installed("brainevent"), "brainevent is not installed", tested=True),
    "scipy": Condition(package="scipy"),
    "float128": Condition(hasattr(numpy, "float128"), "NumPy's long double has another size here"),
    "tbb": Condition(lambda: "tbb" in distributions(), "tbb is not installed"),
}
TESTED = [name for name, condition in CONDITIONS.items() if condition.tested]


@functools.cache
def missing(requirement):
    """Return why a condition is not met, or None.  An installed package that cannot be imported is an error."""
    is_met, reason, package, *_ = CONDITIONS[requirement]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        return f"{package} is not installed"
    return None if (is_met() if callable(is_met) else is_met) else reason


def requirements_of(item):
    """Return the names of the conditions of a test, from its marks `needs(...)`."""
    needed = [requirement for mark in item.iter_markers("needs") for requirement in mark.args]
    if platform_of(needed) == "gpu":
        needed = ["four gpus" if requirement == "four devices" else requirement for requirement in needed]
    return needed


def pytest_runtest_setup(item):
    """Skip a test if one of its conditions is not met, or fail with --require.  No test skips itself."""
    for requirement in requirements_of(item):
        if reason := missing(requirement):
            if requirement in item.config.getoption("--require"):
                pytest.fail(f"--require={requirement}: {reason}")
            pytest.skip(f"{requirement}: {reason}")


def platform_of(requirements):
    """Return the platform on which a test with these conditions computes, "gpu" or "cpu"."""
    return "gpu" if gpu() and any(CONDITIONS[name].on_gpu for name in requirements) else "cpu"


@contextlib.contextmanager
def configured(option, value):
    """Set an option of JAX in all threads, and restore it.  The context managers of JAX set it in one thread only."""
    before = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        yield
    finally:
        jax.config.update(option, before)


def x64(on=True):
    return configured("jax_enable_x64", on)


@contextlib.contextmanager
def computing_for(requirements):
    """Make the platform on which a test computes the default of JAX."""
    if platform_of(requirements) == "cpu":
        yield
    else:  # by default, XLA multiplies float32 matrices in TF32, which has three digits
        with configured("jax_default_device", gpu()), configured("jax_default_matmul_precision", "highest"):
            yield


@pytest.fixture(autouse=True)
def default_device(request):
    """Run tests that need a GPU on the GPU, and all others on the CPU."""
    with computing_for(requirements_of(request.node)):
        yield


# The library logs this text before the reason (`_log_per_slice_fallback`).
PER_SLICE_FALLBACK = "falls back to one launch per slice: "


def check_fallbacks(texts):
    """Fail if one of these logged texts has the type of an exception as the reason for per-slice launches."""
    assert not [text for text in texts if re.search(rf"{PER_SLICE_FALLBACK}\w+: ", text)]


@pytest.fixture(autouse=True)
def no_exception_is_taken_for_a_fallback(caplog):
    """Fail if an unexpected exception turned a batch on a GPU into per-slice launches.

    The library catches it and logs its type.  Tests that expect one clear the log.
    """
    caplog.set_level("DEBUG", "xla_kernels")
    yield
    check_fallbacks(record.getMessage() for record in caplog.get_records("call"))


def pytest_addoption(parser):
    names = {"default": [], "type": lambda names: names.split(",")}
    parser.addoption("--require", metavar="NAMES", help="fail instead of skipping if one of these is missing", **names)
    parser.addoption("--needing", metavar="NAMES", help="select the tests that need one of these conditions", **names)
    parser.addoption("--warnings-are-errors", action="store_true", help="except those that pyproject.toml ignores")
    parser.addoption("--outcomes-out", metavar="PATH", help="write the outcome of each test as JSON")
    parser.addoption("--grid-out", metavar="PATH", help="append the grid of the matrix, as Markdown")


def pytest_configure(config):
    """Reject unknown names, which would require or select nothing, and filter warnings."""
    for option, known in (("--require", TESTED), ("--needing", CONDITIONS)):
        for name in config.getoption(option):
            if name not in known:
                raise pytest.UsageError(f"{option}={name}: unknown; choose from {', '.join(known)}")
    if config.getoption("--warnings-are-errors"):
        config.getini("filterwarnings").insert(0, "error")


def pytest_report_header(config):
    tested, others = [], []
    for name in TESTED:
        try:
            reason = missing(name)
        except ImportError as error:
            reason = f"BROKEN: {error}"
        others += [f"skipped: {name} ({reason})"] if reason else []
        tested += [] if reason else [name]
    where = f"{len(devices('cpu'))} CPU devices, {len(devices('cuda'))} GPUs"
    return [versions(), f"{where}; testing: {', '.join(tested)}", *others]


def versions():
    packages = "jax jaxlib numpy numba warp-lang numba-cuda numba-cuda-mlir brainevent".split()
    return ", ".join(f"{name} {version}" for name, version in distributions().items() if name in packages)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Start four workers beside a GPU, because each has a CUDA context there."""
    if finds_gpu() and "PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ:
        return 4
    return None  # the default of xdist


def pytest_collection_modifyitems(config, items):
    """Select tests for --needing.  Run the tests that start processes first, because they take longest."""
    if needing := {*config.getoption("--needing")}:
        config.hook.pytest_deselected(items=[item for item in items if not needing & {*requirements_of(item)}])
        items[:] = [item for item in items if needing & {*requirements_of(item)}]
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    matrix = next((item.module for item in items if item.originalname == "test_matrix"), None)
    if matrix:
        combinations = [(cell, matrix.reason_left_out(*cell)) for cell in matrix.possible_cells()]
        getattr(config, "workeroutput", {})["combinations"] = config.stash[COMBINATIONS] = combinations


def pytest_collection_finish(session):
    """Exclude modules and collected tests from garbage collection, which would traverse them again and again."""
    gc.freeze()


# -- the outcomes of all tests (--outcomes-out), and the grid of the matrix ---------------------------------

COMBINATIONS = pytest.StashKey[list]()  # all combinations of the matrix, each with why it has no cell, or None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Take the combinations from a worker of xdist, because the process that prints the report collects no tests."""
    if combinations := getattr(node, "workeroutput", {}).get("combinations"):
        node.config.stash[COMBINATIONS] = combinations


def pytest_terminal_summary(terminalreporter, config):
    outcomes, simulated = {}, []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            reason = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else ""
            outcomes[report.nodeid.partition("::")[2]] = reason or outcome
            simulated += dict(getattr(report, "user_properties", [])).get("simulated", [])
    if path := config.getoption("--outcomes-out"):
        pathlib.Path(path).write_text(json.dumps(outcomes), encoding="utf-8")
    if simulated or any(name.startswith("test_matrix[") for name in outcomes):
        text = grid_text(config.stash.get(COMBINATIONS, []), outcomes, {"-".join(cell) for cell in simulated})
        title = "matrix: how many cells passed"
        terminalreporter.section(title)
        terminalreporter.write(text)
        if path := config.getoption("--grid-out"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"### {title}\n\nPython {platform.python_version()}, {versions()}\n\n```\n{text}```\n\n")


LEGEND = """\
8: all 8 cells passed
5/8: 5 of 8 cells passed; the others failed, were skipped or were not selected
5s/8: 5 of 8 cells passed, in Numba's simulator of CUDA
.: no cells
"""


def grid_text(combinations, outcomes, simulated):
    """Return three tables by backend, their legend, the failures, and why cells were skipped or do not exist."""
    cells, failed = {}, []
    skipped, no_cell = collections.Counter(), collections.Counter()
    for cell, reason in combinations:
        if reason:
            no_cell[reason] += 1
            continue
        name = "-".join(cell)
        outcome = outcomes.get(f"test_matrix[{name}]", "not selected")
        if outcome in ("failed", "error"):
            failed.append(name)
        elif outcome != "passed" and name in simulated:
            outcome = "simulated"
        elif outcome != "passed":
            skipped[outcome] += 1
        cells[tuple(cell)] = outcome
    tables = [table_text(title, axis, cells) for title, axis in (("operation", 0), ("transformation", 2), ("dtype", 3))]
    lines = [f"FAILED {name}" for name in failed]
    lines += [f"{count} cells skipped: {reason}" for reason, count in skipped.items()]
    lines += [f"{count} combinations without a cell: {reason}" for reason, count in sorted(no_cell.items())]
    return "\n".join([*tables, LEGEND, *lines, ""])


def table_text(title, axis, cells):
    """Return a table of the cells that passed, with a row per name on this axis and a column per backend."""
    counts = collections.defaultdict(collections.Counter)
    for cell, outcome in cells.items():
        counts[cell[axis], cell[1]][outcome] += 1
    rows, columns = [list(dict.fromkeys(names)) for names in zip(*counts)]
    lines = [[title, *columns], *[[row, *[count_text(counts[row, column]) for column in columns]] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines)


def count_text(count):
    """Return a count of cells as text, as LEGEND explains it."""
    passed, simulated, total = count["passed"], count["simulated"], count.total()
    if not total:
        return "."
    text = "+".join([str(passed)] * bool(passed or not simulated) + [f"{simulated}s"] * bool(simulated))
    return text if passed + simulated == total else f"{text}/{total}"
