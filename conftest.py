"""Devices, what is available, the head of the report, outcomes and the grid of the matrix."""

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
import shutil
import string
import sys
import typing

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
def devices(platform):
    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def gpu():
    """The first GPU, or None."""
    return next(iter(devices("cuda")), None)


def installed(package):
    return importlib.util.find_spec(package) is not None


@functools.cache
def distributions():
    """The version of each that is installed, by its name."""
    return {found.name: found.version for found in reversed([*importlib.metadata.distributions()])}


def runs_cuda():
    """Whether Numba CUDA kernels run here: on a GPU, with a package that compiles them, or on the simulator."""
    return SIMULATOR or (gpu() and (installed("numba_cuda_mlir") or installed("numba_cuda")))


def warp():
    return importlib.import_module("warp")


def runs_warp_on_cpu():
    """Whether Warp has its compiler for CPUs, a library of its own that its package may be without."""
    with contextlib.redirect_stdout(io.StringIO()):  # Warp's first words
        return warp().is_cpu_available()


class Condition(typing.NamedTuple):
    is_met: typing.Any = True  # or a function that tells
    reason: str = ""  # of the skip where it is not
    package: str = "numba"  # which has to be there as well
    tested: bool = False  # the report's head names it, and --require takes it
    on_gpu: bool = False  # a test with it computes on the GPU, where there is one


NO_GPU = "JAX has no GPU here"
CONDITIONS = {  # by the names that the mark `needs` takes
    "numba": Condition(tested=True),
    "cuda": Condition(runs_cuda, f"{NO_GPU}, or nothing compiles for it", tested=True, on_gpu=True),
    "warp": Condition(runs_warp_on_cpu, "Warp has no compiler for CPUs here", "warp", tested=True),
    "warp_gpu": Condition(gpu, NO_GPU, "warp", tested=True, on_gpu=True),
    "pallas": Condition(package="jax.experimental.pallas", tested=True),
    "jax": Condition(package="jax"),
    "gpu": Condition(gpu, NO_GPU, tested=True, on_gpu=True),
    "no gpu": Condition(lambda: not gpu(), "shows what can be done without a GPU"),
    "four devices": Condition(lambda: len(devices("cpu")) >= 4, "JAX has fewer than four CPU devices here"),
    "four gpus": Condition(lambda: len(devices("cuda")) >= 4, "JAX has fewer than four GPUs here", tested=True),
    "warp 1.15": Condition(lambda: "grid_stride" in inspect.signature(warp().kernel).parameters, "older Warp", "warp"),
    "warp 1.19": Condition(lambda: hasattr(warp(), "ref"), "older Warp", "warp"),
    "numba-cuda": Condition(installed("numba_cuda"), "numba-cuda is not installed"),
    "numba-cuda-mlir": Condition(installed("numba_cuda_mlir"), "numba-cuda-mlir is not installed"),
    "cuda package": Condition(installed("numba_cuda") or installed("numba_cuda_mlir"), "no Numba CUDA", tested=True),
    "simulator": Condition(SIMULATOR, "other tests start such a process", tested=True),
    "compiler": Condition(not SIMULATOR, "the simulator compiles nothing"),
    "fake driver": Condition(FAKE_DRIVER, "test_cuda_fake_driver runs it"),
    "real driver": Condition(not FAKE_DRIVER, "runs once, without the fake driver"),
    "linux": Condition(sys.platform == "linux", "CUDA's driver and threads have other names on another system"),
    "glibc": Condition(hasattr(ctypes.pythonapi, "gnu_get_libc_version"), "its modes of floats, and Numba's omp"),
    "cores": Condition(os.cpu_count() > 1 and sys.platform != "win32", "threads share slices on two cores"),
    "gcc": Condition(shutil.which("gcc"), "no C compiler", tested=True),
    "brainevent": Condition(installed("brainevent"), "brainevent is not installed", tested=True),
    "tbb": Condition(lambda: "tbb" in distributions(), "tbb is not installed"),
}
TESTED = [name for name, condition in CONDITIONS.items() if condition.tested]


@functools.cache
def missing(requirement):
    """Why something cannot be tested here, or None; that an installed package cannot be imported is an error."""
    is_met, reason, package, *_ = CONDITIONS[requirement]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        return f"{package} is not installed"
    return None if (is_met() if callable(is_met) else is_met) else reason


def requirements_of(item):
    """What a test needs, by its marks `needs(...)`."""
    needed = [requirement for mark in item.iter_markers("needs") for requirement in mark.args]
    if platform_of(needed) == "gpu":
        needed = ["four gpus" if requirement == "four devices" else requirement for requirement in needed]
    return needed


def pytest_runtest_setup(item):
    """The one place where something that is missing becomes a skip, or with --require a failure."""
    for requirement in requirements_of(item):
        if reason := missing(requirement):
            if requirement in item.config.getoption("--require"):
                pytest.fail(f"--require={requirement}: {reason}")
            pytest.skip(f"{requirement}: {reason}")


def platform_of(requirements):
    """ "gpu" or "cpu": where a test with these requirements computes."""
    return "gpu" if gpu() and any(CONDITIONS[name].on_gpu for name in requirements) else "cpu"


@contextlib.contextmanager
def configured(option, value):
    """Set an option of JAX for a while, in all threads and in every version of JAX."""
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
    """Make the platform of a test JAX's default."""
    if platform_of(requirements) == "cpu":
        yield
    else:  # XLA would multiply matrices of float32 in TF32, of three digits
        with configured("jax_default_device", gpu()), configured("jax_default_matmul_precision", "highest"):
            yield


@pytest.fixture(autouse=True)
def computing(request):
    """Tests that need a GPU compute there, all others on the CPU."""
    with computing_for(requirements_of(request.node)):
        yield


def pytest_addoption(parser):
    names = {"default": [], "type": lambda names: names.split(",")}
    parser.addoption("--require", metavar="NAMES", help="fail where one of these is missing, do not skip", **names)
    parser.addoption("--warnings-are-errors", action="store_true", help="but for those that pyproject.toml ignores")
    parser.addoption("--outcomes-out", metavar="PATH", help="write which tests passed, and why others were skipped")
    parser.addoption("--grid-out", metavar="PATH", help="append the grid of the matrix, as Markdown")


def pytest_configure(config):
    """Refuse names that --require does not know, which would require nothing, and filter warnings."""
    for name in config.getoption("--require"):
        if name not in TESTED:
            raise pytest.UsageError(f"--require={name}: unknown; choose from {', '.join(TESTED)}")
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
    """Beside a GPU a few, as each has a CUDA context there."""
    if finds_gpu() and "PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ:
        return 4
    return None  # xdist's own number


def pytest_collection_modifyitems(config, items):
    """First the tests that start processes, as they take longest."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    matrix = next((item.module for item in items if item.originalname == "test_matrix"), None)
    if matrix:
        left_out = [(cell, matrix.reason_left_out(*cell)) for cell in matrix.possible_cells()]
        getattr(config, "workeroutput", {})["left out"] = config.stash[LEFT_OUT] = left_out


def pytest_collection_finish(session):
    """What was imported and collected stays: Python's collector need not look through it again and again."""
    gc.freeze()


# -- what came out: of all tests with --outcomes-out, and the grid of the matrix at the end of a run --------

LEFT_OUT = pytest.StashKey[list]()  # all cells that there could be, each with why it is left out, or None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """A worker of xdist is done; the process that prints the report collects no tests itself."""
    if left_out := getattr(node, "workeroutput", {}).get("left out"):
        node.config.stash[LEFT_OUT] = left_out


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
        text = grid_text(config.stash.get(LEFT_OUT, []), outcomes, ["-".join(cell) for cell in simulated])
        title = "matrix: how many cells passed"
        terminalreporter.section(title)
        terminalreporter.write(text)
        if path := config.getoption("--grid-out"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"### {title}\n\nPython {platform.python_version()}, {versions()}\n\n```\n{text}```\n\n")


def grid_text(all_cells, outcomes, simulated):
    """Tables of operations, transformations and dtypes by backend; what failed, by name; and what the marks mean."""
    marks = {"passed": "", "failed": " FAILED", "error": " FAILED", "simulated": "s", None: "-"}
    letters = iter(string.ascii_lowercase.replace("s", ""))
    cells, failed = {}, ""
    for cell, reason in all_cells:
        name = "-".join(cell)
        outcome = outcomes.get(f"test_matrix[{name}]")
        if name in simulated and outcome not in ("passed", "failed", "error"):
            outcome = "simulated"
        if outcome not in marks:  # the reason of a skip
            marks[outcome] = next(letters)
        cells[tuple(cell)] = "." if reason else marks[outcome]
        if marks[outcome] == " FAILED":
            failed += f"FAILED: {name}\n"
    float32 = {cell: mark for cell, mark in cells.items() if cell[3] == "float32"}
    text = table_text("float32", 0, float32) + table_text("float32", 2, float32) + table_text("dtype", 3, cells)
    text += f"{failed}3: passed; 3s: on Numba's simulator of CUDA; 3-: not run\n"
    for outcome, mark in list(marks.items())[5:]:
        text += f"3{mark}: skipped: {outcome}\n"
    reasons = collections.Counter(reason for _, reason in all_cells if reason)
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
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines) + "\n"
