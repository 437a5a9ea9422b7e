"""pytest's configuration: devices, conditions for skips, the report header, outcomes, and fakes of a GPU."""

import collections
import contextlib
import copy
import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import io
import itertools
import json
import os
import pathlib
import platform
import re
import shutil
import sys
import threading
import types
import typing

# shard_map and pmap need several devices.  JAX reads the flag when it creates its backend.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jax
import numpy
import pytest
from jax import export

import xla_kernels as xk


def finds_gpu():
    """Return whether JAX will find an NVIDIA GPU: a JAX plugin for CUDA is installed, and the driver lists a GPU."""
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    count = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value > 0 and any("cuda" in plugin.name for plugin in plugins)


# The CPU is JAX's default, in this process and in those that tests start.  Tests that need a GPU make it the default.
os.environ.setdefault("JAX_PLATFORMS", "cpu,cuda" if finds_gpu() else "cpu")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes share the GPU
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
if SIMULATOR:  # the simulator polls its threads, and each of them waits for the interpreter lock
    sys.setswitchinterval(1e-4)
HAS_FAKE_DRIVER = "XLA_KERNELS_FAKE_CUDA" in os.environ  # test_cuda_tests_pass_with_fake_driver sets it
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


@functools.cache
def cuda_module():
    """Return the `cuda` module with which tests decorate kernels, also without a GPU, or None."""
    module = None
    with contextlib.suppress(ImportError):  # numba-cuda is too old for NumPy
        module = importlib.import_module("numba.cuda")
    has_numba_cuda = getattr(module, "implementation", "Built-in") != "Built-in"
    if not SIMULATOR and (PREFERS_SUCCESSOR or not has_numba_cuda):
        with contextlib.suppress(ImportError):
            return importlib.import_module("numba_cuda_mlir.cuda")
    return module


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
    "numba": Condition(tested=True),  # met where the tests run, because they import Numba and JAX
    # "cuda": kernels run; "cuda decorates": @cuda.jit works; "cuda installed": a package compiles for GPUs
    "cuda": Condition(runs_cuda, f"{NO_GPU}, or nothing compiles for it", tested=True, on_gpu=True),
    "warp": Condition(runs_warp_on_cpu, "Warp has no compiler for CPUs here", "warp", tested=True),
    "warp_gpu": Condition(gpu, NO_GPU, "warp", tested=True, on_gpu=True),
    "pallas": Condition(package="jax.experimental.pallas", tested=True),
    "jax": Condition(package="jax"),
    "gpu": Condition(gpu, NO_GPU, tested=True, on_gpu=True),
    "no gpu": Condition(lambda: not gpu(), "tests the behaviour without a GPU"),
    "four devices": Condition(lambda: len(devices("cpu")) >= 4, "JAX has fewer than four CPU devices", tested=True),
    "four gpus": Condition(lambda: len(devices("cuda")) >= 4, "JAX has fewer than four GPUs here", tested=True),
    "warp 1.15": Condition(lambda: "grid_stride" in inspect.signature(warp().kernel).parameters, "older Warp", "warp"),
    "warp 1.19": Condition(lambda: hasattr(warp(), "ref"), "older Warp", "warp"),
    "numba-cuda": Condition(installed("numba_cuda"), "numba-cuda is not installed"),
    "numba-cuda-mlir": Condition(installed("numba_cuda_mlir"), "numba-cuda-mlir is not installed"),
    "cuda decorates": Condition(cuda_module, "no package provides numba.cuda"),
    "cuda installed": Condition(installed("numba_cuda") or installed("numba_cuda_mlir"), "no package", tested=True),
    "simulator": Condition(SIMULATOR, "test_cuda_tests_pass_in_simulator starts a process for it", tested=True),
    "jax 0.11.2": Condition(jax.__version_info__ >= (0, 11, 2), "older XLA drops the barrier before it removes copies"),
    "numba 0.64": Condition(
        lambda: numba_version() >= (0, 64), "older Numba types the copy by np.ascontiguousarray as read-only"
    ),
    "outside simulator": Condition(not SIMULATOR, "the simulator compiles nothing"),
    "fake driver": Condition(HAS_FAKE_DRIVER, "test_cuda_tests_pass_with_fake_driver runs it"),
    "outside fake driver": Condition(not HAS_FAKE_DRIVER, "runs once, without the fake driver"),
    "linux": Condition(sys.platform == "linux", "CUDA's driver and threads have other names on other systems"),
    "glibc": Condition(hasattr(ctypes.pythonapi, "gnu_get_libc_version"), "needs fork, omp, float modes", tested=True),
    "cores": Condition(os.cpu_count() > 1 and sys.platform != "win32", "needs two cores, POSIX threads", tested=True),
    "gcc": Condition(shutil.which("gcc"), "no C compiler", tested=True),
    "brainevent": Condition(installed("brainevent"), "brainevent is not installed", tested=True),
    "scipy": Condition(package="scipy", tested=True),
    "float128": Condition(hasattr(numpy, "float128"), "NumPy's long double has another size here"),
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
    """Return the names of the conditions of a test, from its marks `needs(...)`.

    A test that computes on a GPU and needs four devices needs four GPUs.
    """
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
    assert not [text for text in texts if re.search(rf"{PER_SLICE_FALLBACK}\w+:( |$)", text)]


@pytest.fixture(autouse=True)
def no_exception_is_taken_for_a_fallback(caplog):
    """Fail if an unexpected exception turned a batch on a GPU into per-slice launches.

    The library catches it and logs its type.  Tests that expect one clear the log.
    """
    caplog.set_level("DEBUG", "xla_kernels")
    yield
    check_fallbacks(record.getMessage() for record in caplog.get_records("call"))


@pytest.fixture
def fallback_reasons(caplog):
    """Return a function that returns the logged reasons for per-slice launches, and clears the log."""

    def take():
        texts = {text.partition(PER_SLICE_FALLBACK)[2] for text in caplog.messages}
        caplog.clear()
        return texts - {""}

    return take


def pytest_addoption(parser):
    names = {"default": [], "type": lambda names: names.split(",")}
    parser.addoption("--require", metavar="NAMES", help="fail instead of skipping if one of these is missing", **names)
    parser.addoption("--needing", metavar="NAMES", help="select the tests that need one of these conditions", **names)
    parser.addoption("--warnings-are-errors", action="store_true", help="except those that pyproject.toml ignores")
    parser.addoption("--outcomes-out", metavar="PATH", help="write the outcome of each test as JSON")
    parser.addoption("--grid-out", metavar="PATH", help="append the table of the matrix, as Markdown")


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


def pytest_collection_finish(session):
    """Exclude modules and collected tests from garbage collection, which would traverse them again and again."""
    gc.freeze()


# -- the outcomes of all tests (--outcomes-out), and the table of the matrix ---------------------------------


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):  # a worker of xdist, which ran some of the tests
        return
    outcomes = {}
    for outcome in ("passed", "failed", "error", "skipped", "xfailed", "xpassed"):
        for report in terminalreporter.stats.get(outcome, []):
            reason = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else ""
            outcomes[report.nodeid.partition("::")[2]] = reason or outcome
    if path := config.getoption("--outcomes-out"):
        pathlib.Path(path).write_text(json.dumps(outcomes), encoding="utf-8")
    if table := table_of_matrix(outcomes):
        terminalreporter.section("matrix: passed / all cells of the run")
        terminalreporter.write(table)
        if path := config.getoption("--grid-out"):
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"Python {platform.python_version()}, {versions()}\n\n{table}\n")


def table_of_matrix(outcomes):
    """Return a Markdown table of the cells, with a row per operation and a column per backend, or "" without cells."""
    counts = collections.defaultdict(collections.Counter)
    for name, outcome in outcomes.items():
        if cell := re.fullmatch(r"test_matrix\[(\w+)-(\w+)-.*\]", name):
            counts[cell.groups()][outcome == "passed"] += 1
    rows, columns = [sorted(set(names)) for names in zip(*counts)] or ([], [])
    lines = [["operation", *columns], ["---"] * (1 + len(columns))]
    for row in rows:
        found = [counts[row, column] for column in columns]
        lines.append([row, *[f"{count[True]} / {count.total()}" for count in found]])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) if rows else ""


# -- fakes of a GPU, and a recorder of driver calls -----------------------------------------------------
# Where there is no GPU, fakes let handlers for CUDA run.  Programs are lowered for CUDA, and run on the CPU.
#
#     class              fixture        tests
#     FakeXlaGpu         -              the base class: JAX lists two GPUs, and XLA gives handlers a stream and a device
#     FakeCudaDriver     fake_cuda      handlers of Numba CUDA, with a fake `libcuda.so.1` (.ci/fake_cuda_driver.c).  It
#                                       logs its calls, and runs no kernel (test_cuda_tests_pass_with_fake_driver).
#     FakeWarp           fake_warp_gpu  handlers of Warp, with a fake `wp.launch`.  Kernels run on the CPU.
#     DriverRecorder     driver_calls   handlers on fake and on real GPUs: records their launches and memsets


def targets_in(text):
    """Return the names of the custom-call targets in a lowered program."""
    return re.findall(r"custom_call @\"?([\w.]+)", text)


def lower_for_cuda(function, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def program_for_cuda(function, *args):
    """Return a callable program that is lowered for CUDA.  Only exported programs run on another platform."""
    targets = targets_in(lower_for_cuda(function, *args))
    checks = [export.DisabledSafetyCheck.platform(), *map(export.DisabledSafetyCheck.custom_call, targets)]
    return export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(*args).call


def run_for_cuda(function, *args):
    """Lower a function for CUDA, and run this program on the CPU."""
    return jax.block_until_ready(program_for_cuda(function, *args)(*args))


def capsule_address(capsule):
    """Return the address in a PyCapsule without a name, as JAX creates them for C functions."""
    get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    return get_pointer(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, None)


class FakeXlaGpu:
    """Two GPUs in JAX's list of devices.  Handlers for CUDA are registered for the CPU, and called with a fake API."""

    HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    device = 0  # the ordinal of the GPU that handlers get

    def __init__(self):
        self.handlers, self.traits_of = {}, {}  # by the name of the target
        self.local_devices, self.register = jax.local_devices, jax.ffi.register_ffi_target

    def start(self, monkeypatch):
        """Replace functions of JAX for one test."""
        monkeypatch.setattr(jax, "local_devices", self.with_gpus)
        monkeypatch.setattr(jax.ffi, "register_ffi_target", self.register_for_cpu)

    def with_gpus(self, *args, backend=None, **options):
        if backend == "cuda":
            return [types.SimpleNamespace(local_hardware_id=ordinal) for ordinal in (0, 1)]
        return self.local_devices(*args, backend=backend, **options)

    def register_for_cpu(self, name, handler, platform="cpu", **options):
        if platform == "CUDA":
            native = self.HANDLER(capsule_address(handler))
            self.handlers[name] = self.HANDLER(functools.partial(self.call, name, native))
            handler = jax.ffi.pycapsule(ctypes.cast(self.handlers[name], ctypes.c_void_p))
        self.register(name, handler, "cpu", **options)

    def call(self, name, handler, frame_address):
        """Call a handler with an API that has a stream and a device.  If XLA asks for metadata, record the traits."""
        frame = xk.XLA_FFI_CallFrame.from_address(frame_address)
        if frame.extension_start:
            error = handler(frame_address)
            extension = xk.XLA_FFI_Metadata_Extension.from_address(frame.extension_start)
            self.traits_of[name] = extension.metadata.contents.traits
            return error
        api = xk.XLA_FFI_Api.from_buffer_copy(frame.api.contents)
        get_stream, get_ordinal = self.HANDLER(self.get_stream), self.HANDLER(self.get_ordinal)
        api.XLA_FFI_Stream_Get = ctypes.cast(get_stream, ctypes.c_void_p)
        api.XLA_FFI_DeviceOrdinal_Get = ctypes.cast(get_ordinal, ctypes.c_void_p)
        frame.api = ctypes.pointer(api)
        return handler(frame_address)

    def get_stream(self, args):
        xk.XLA_FFI_Stream_Get_Args.from_address(args).stream = 0x5EED

    def get_ordinal(self, args):
        xk.XLA_FFI_DeviceOrdinal_Get_Args.from_address(args).device_ordinal = self.device

    def traits(self, function, *args):
        """Return the traits of the handlers in a program.  1 means compatible with command buffers."""
        return {self.traits_of[target] for target in targets_in(lower_for_cuda(function, *args))}


class FakeCudaDriver(FakeXlaGpu):
    """The fake GPUs together with the fake `libcuda.so.1`.

    The text of a launch is, for example, "native 0: 7,2,3 x 32,1,1 +64": a handler ("native") or a package ("numba")
    launched on GPU 0 a grid of (7, 2, 3) blocks of (32, 1, 1) threads with 64 bytes of dynamic shared memory.  If the
    stream is not that of the call, the text ends with "on another stream".
    """

    def __init__(self):
        super().__init__()
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.driver.take_log.restype = ctypes.c_char_p

    def start(self, monkeypatch):
        super().start(monkeypatch)
        self.set(device=0, n_params=0)
        self.fail("")
        self.log()

    def set(self, **values):
        """Set variables of the driver.  Handlers get `device` from this object."""
        vars(self).update(values)
        for name, value in values.items():
            ctypes.c_int.in_dll(self.driver, name).value = value

    def fail(self, function):
        """Let the next call of a driver function fail."""
        (ctypes.c_char * 64).in_dll(self.driver, "failing").value = function.encode()

    def log(self):
        """Return the driver calls since the last time, each as a text and the fill byte or the launch parameters."""
        return [json.loads(line) for line in self.driver.take_log().splitlines()]

    def launches(self, function, *args):
        """Call a function, and return the text and the parameters of each launch."""
        self.log()
        run_for_cuda(function, *args)
        return [call for call in self.log() if " x " in call[0]]


class FakeFunction(typing.NamedTuple):
    """A CUfunction of FakeWarp, which runs on the CPU."""

    launch: typing.Any  # a recorded `wp.Launch` for the CPU
    ordinal: int  # of the device


class FakeWarp(FakeXlaGpu):
    """A fake GPU for Warp: `wp.launch` records launches for the CPU, and a fake `libcuda` runs them there.

    1. The library records a launch.  `record` gives it the number of a fake CUfunction, such as 3.
    2. A handler calls `cuLaunchKernel` with this number and the addresses of the parameters.
    3. `launch` copies the parameters to the launch of fake function 3, and runs it for each block along z.

    A CPU has no blockIdx.z, by which the batch kernel moves to its slice.  So this kernel reads it from a variable.
    """

    device = 1

    def __init__(self):
        super().__init__()
        self.make_array, self.record_on_cpu = warp().array.__init__, warp().launch
        self.numbers, self.functions = itertools.count(1), {}  # {number: FakeFunction}
        self.block_index_z = ctypes.c_uint32(0)  # its address is in compiled kernels
        self.lock = threading.Lock()  # a launch changes block_index_z and the fake function
        number, size, pointer = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
        kind = functools.partial(ctypes.CFUNCTYPE, number, pointer)
        self.library = types.SimpleNamespace(
            cuLaunchKernel=kind(*[number] * 7, pointer, ctypes.POINTER(pointer), pointer)(self.launch),
            cuMemcpyDtoDAsync_v2=kind(pointer, size, pointer)(self.copy_memory),
            cuMemsetD8Async=kind(ctypes.c_ubyte, size, pointer)(self.set_memory),
            cuCtxGetCurrent=lambda context: 0,
            cuCtxSetCurrent=lambda context: 0,
            cuFuncGetAttribute=self.get_attribute,
        )

    def copy_memory(self, target, source, nbytes, stream):
        ctypes.memmove(target, source, nbytes)
        return 0

    def set_memory(self, target, value, nbytes, stream):
        ctypes.memset(target, value, nbytes)
        return 0

    def get_attribute(self, value, attribute, function):
        value._obj.value = 2**31 - 1  # no limit
        return 0

    def start(self, monkeypatch):
        def make_on_cpu(array, *args, **options):
            self.make_array(array, *args, **{**options, "device": "cpu"})

        super().start(monkeypatch)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(xk._LibCuda, "__init__", lambda libcuda: setattr(libcuda, "library", self.library))
        monkeypatch.setattr(warp(), "launch", self.record)
        monkeypatch.setattr(warp().array, "__init__", make_on_cpu)
        z = f"*(unsigned*){ctypes.addressof(self.block_index_z)}ull"
        monkeypatch.setattr(xk, "_ADVANCE_SNIPPET", xk._ADVANCE_SNIPPET.replace("blockIdx.z", z))
        self.launches = []  # grid, block, shared memory, stream, and ordinal of the device

    def record(self, kernel, *args, device, block_dim, **options):
        """Record a launch, as `wp.launch(..., record_cmd=True)` does, with a fake CUfunction if it is for a GPU."""
        if device == "cpu":
            return self.record_on_cpu(kernel, *args, device=device, block_dim=block_dim, **options)
        launch_on_cpu = self.record_on_cpu(kernel, *args, device="cpu", block_dim=1, **options)
        number = next(self.numbers)
        self.functions[number] = FakeFunction(launch_on_cpu, int(device.removeprefix("cuda:")))
        launch = copy.copy(launch_on_cpu)  # for the library, with the hooks and the device of a GPU
        forward = backward = ctypes.c_void_p(number)
        shared_memory = block_dim + 1  # any number that the handler must pass on
        launch.hooks = type(launch.hooks)(forward, backward, shared_memory, shared_memory)
        launch.device = types.SimpleNamespace(is_cpu=False)
        return launch

    def launch(self, number, gx, gy, gz, bx, by, bz, shared_memory, stream, params, extra):
        """Stand in for `cuLaunchKernel`."""
        with self.lock:
            launch, ordinal = self.functions[number]
            self.launches.append(((gx, gy, gz), (bx, by, bz), shared_memory, stream, ordinal))
            for param, passed in zip(launch.params, params):
                ctypes.memmove(ctypes.addressof(param), passed, ctypes.sizeof(param))
            for z in range(gz):
                self.block_index_z.value = z
                launch.launch()
        return 0


# All tests share one fake of each class, because XLA keeps handlers forever.
@pytest.fixture(scope="session")
def fake_cuda_of_session():
    return FakeCudaDriver()


@pytest.fixture(scope="session")
def fake_warp_of_session():
    return FakeWarp()


@pytest.fixture
def fake_cuda(fake_cuda_of_session, monkeypatch):
    fake_cuda_of_session.start(monkeypatch)
    return fake_cuda_of_session


@pytest.fixture
def fake_warp_gpu(fake_warp_of_session, monkeypatch):
    fake_warp_of_session.start(monkeypatch)
    return fake_warp_of_session


class DriverRecorder:
    """Records the launches, and the sizes of the memsets, by all handlers of the session.

    The library writes the address of `cuLaunchKernel` into handlers.  Here, it is the address of a callback, which
    records the call and then calls `cuLaunchKernel`.
    """

    def __init__(self):
        number, size, pointer = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
        self.prototypes = {
            "cuLaunchKernel": ctypes.CFUNCTYPE(number, pointer, *[number] * 7, *[pointer] * 3),
            "cuMemsetD8Async": ctypes.CFUNCTYPE(number, pointer, ctypes.c_uint8, size, pointer),
        }
        self.launches, self.memsets = [], []
        self.callbacks = {}  # by the address of the driver function, kept because handlers are permanent
        address_of = xk._LibCuda.address
        xk._LibCuda.address = lambda libcuda, name: self.address(name, address_of(libcuda, name))

    def address(self, name, function_address):
        if name not in self.prototypes:
            return function_address
        if function_address not in self.callbacks:
            self.callbacks[function_address] = self.callback(name, function_address)
        return ctypes.cast(self.callbacks[function_address], ctypes.c_void_p).value

    def callback(self, name, function_address):
        prototype = self.prototypes[name]

        def call(*args):
            if name == "cuLaunchKernel":
                self.launches.append(args)
            else:
                _, _, nbytes, _ = args
                self.memsets.append(nbytes)
            return prototype(function_address)(*args)

        return prototype(call)

    def run(self, function):
        """Call a function without arguments, and return the results and the number of launches."""
        self.launches, self.memsets = [], []
        results = jax.block_until_ready(function())
        return results, len(self.launches)


@pytest.fixture(scope="session", autouse=True)  # before any handler is compiled
def driver_calls():
    return DriverRecorder()
