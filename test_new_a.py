"""A vmap on a GPU is one launch: Warp and Numba CUDA, on a card or the emulated GPU, and by fake drivers on the CPU."""

import collections
import ctypes
import functools
import importlib
import itertools
import logging
import re
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conftest
import xla_kernels as xk
from test_xla_kernels import (  # noqa: F401 (fixtures)
    CUDA_MODULES,
    DeviceArray,
    cuda,
    fake_gpu,
    gpus,
    in_threads,
    is_successor,
    like_first,
    needs_fake_gpu,
    run_for_cuda,
    run_python,
    runs,
    sample,
    spec,
    wp,
    written_for,
)

# -- counting, on any driver ----------------------------------------------------------------------------

LAUNCHED = collections.Counter()


@functools.cache
def counting(address):
    """The address of a function that counts, and calls cuLaunchKernel at this address."""
    number, pointer = ctypes.c_uint32, ctypes.c_void_p
    kind = ctypes.CFUNCTYPE(number, pointer, *[number] * 7, pointer, pointer, pointer)
    launch = kind(address)

    def count(*args):
        LAUNCHED[""] += 1
        return launch(*args)

    counting.alive.append(kind(count))
    return ctypes.cast(counting.alive[-1], ctypes.c_void_p).value


counting.alive = []


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Handlers that are compiled meanwhile count."""
    find = xk._LibCuda.address

    def address(libcuda, name):
        return counting(find(libcuda, name)) if name == "cuLaunchKernel" else find(libcuda, name)

    monkeypatch.setattr(xk._LibCuda, "address", address)


@pytest.fixture(autouse=True)
def no_mistake_looks_like_a_fallback(monkeypatch):
    monkeypatch.setattr(xk, "_FALLS_BACK_ON", xk._NoSingleLaunch)


@pytest.fixture
def reasons(caplog):
    """Gives why batches that were lowered since it was last asked are a launch for each slice."""
    caplog.set_level(logging.DEBUG, "xla_kernels")

    def take():
        found = [text for _, _, text in caplog.record_tuples if "a launch for each slice" in text]
        caplog.clear()
        return {text.partition(": a batch is a launch for each slice: ")[2] for text in found}

    return take


def run_on_gpu(function, *args):
    return jax.block_until_ready(jax.jit(function)(*args))


def launches(run, function, *args):
    """What a call gives, and how many launches that took."""
    LAUNCHED.clear()
    results = run(function, *args)
    return results, LAUNCHED[""]


def slice_by_slice(function, in_axes):
    """What vmap gives."""

    def call(*args):
        n = next(len(x) for x, axis in zip(args, in_axes) if axis is not None)
        slices = [function(*[x if axis is None else x[i] for x, axis in zip(args, in_axes)]) for i in range(n)]
        return jax.tree.map(lambda *parts: jnp.stack(parts), *slices)

    return call


# -- Warp: kernels ----------------------------------------------------------------------------------------


@functools.cache
def warp_kernels():
    unique = wp.kernel(module="unique")
    floats = wp.array(dtype=float)

    @wp.struct
    class Params:
        a: float
        n: int

    @unique
    def add(x: floats, y: floats, out: floats):
        i = wp.tid()
        out[i] = x[i] + 2.0 * y[i]

    @unique
    def stencil(x: floats, out: floats):
        i = wp.tid()
        out[i] = x[wp.max(i - 1, 0)] - 2.0 * x[i] + x[wp.min(i + 1, x.shape[0] - 1)]

    @unique
    def transposed(x: wp.array2d(dtype=float), out: wp.array2d(dtype=float)):
        i, j = wp.tid()
        out[j, i] = x[i, j] + float(i)

    @unique
    def four_dimensions(x: wp.array4d(dtype=float), out: wp.array4d(dtype=float)):
        i, j, k, m = wp.tid()
        out[i, j, k, m] = x[i, j, k, m] + float(m)

    @unique
    def vectors(x: wp.array(dtype=wp.vec3), m: wp.array(dtype=wp.mat33), out: wp.array(dtype=wp.vec3)):
        i = wp.tid()
        v = m[i] * x[i]
        v[0] += 1.0
        out[i] = v

    @unique
    def dtypes(a: wp.array3d(dtype=wp.float16), b: wp.array(dtype=wp.uint8), c: wp.array(dtype=wp.bool),
               q: wp.array(dtype=wp.quat), out: wp.array3d(dtype=wp.float16)):  # fmt: skip
        i, j, k = wp.tid()
        v = a[i][j, k]
        if c[i]:
            v = v + wp.float16(b[i]) + wp.float16(q[i][3])
        out[i, j, k] = v

    @unique
    def in_out(x: floats, y: floats):
        i = wp.tid()
        y[i] = y[i] * 2.0 + x[i]

    @unique
    def histogram(x: floats, out: floats, total: floats):
        i = wp.tid()
        wp.atomic_add(out, i % 4, x[i])
        wp.atomic_add(total, 0, x[i])

    @unique
    def values(x: floats, p: Params, v: wp.vec3, s: wp.int64, maybe: floats, out: floats):
        i = wp.tid()
        out[i] = p.a * x[i] + float(p.n) + v[1] + float(s)
        if maybe:
            out[i] = maybe[i]

    @unique
    def loss(x: floats, w: floats, out: floats):
        i = wp.tid()
        out[i] = wp.sin(x[i]) * w[i] + x[wp.max(i - 1, 0)]

    @unique
    def norm(x: wp.array(dtype=wp.vec3), out: floats):
        wp.atomic_add(out, 0, wp.dot(x[wp.tid()], x[wp.tid()]))

    @unique
    def tiles(x: floats, out: floats):
        i, _thread = wp.tid()
        wp.tile_store(out, 2.0 * wp.tile_load(x, shape=64, offset=i * 64), offset=i * 64)

    @unique
    def with_zero_d_and_empty(x: floats, factor: floats, empty: floats, out: floats):
        out[wp.tid()] = x[wp.tid()] * factor[0] + float(empty.shape[0])

    @wp.func
    def element(x: floats, i: int):
        return x[i] * 2.0

    @wp.func
    def store(out: floats, i: int, v: float):
        out[i] = v

    @unique
    def by_functions(x: floats, out: floats):
        i = wp.tid()
        y = x
        if i % 2 == 0:
            y = out
            y[i] = 1.0
        else:
            store(out, i, element(y, i))

    @unique
    def assigned(x: floats, y: floats, out: floats):
        i = wp.tid()
        for k in range(x.shape[0]):
            if k == i:
                x = y
        out[i] = x[i]

    factor = wp.constant(2.5)
    other = 3

    @wp.kernel(module="unique", enable_backward=False)
    def closure(x: floats, out: floats):
        """A docstring."""
        i = wp.tid()
        if x.shape[0] > 100:
            return
        for j in range(wp.static(other + 1)):
            out[i] = x[i] * factor + float(other) + float(j)

    @unique
    def generic(x: wp.array(dtype=typing.Any), out: wp.array(dtype=typing.Any)):
        out[wp.tid()] = x[wp.tid()] + x[wp.tid()]

    overload = wp.overload(generic, [floats, floats])

    @unique
    def many(a: floats, b: floats, c: floats, d: floats, e: floats, f: floats, o: floats, p: floats, q: floats):
        i = wp.tid()
        o[i] = a[i] + b[i]
        p[i] = c[i] + d[i]
        q[i] = e[i] + f[i]

    # What is a launch for each slice.

    @wp.func_native("out[i] = x + 1.0f;")
    def add_one(x: float, out: floats, i: int): ...

    @unique
    def in_c(x: floats, out: floats):
        add_one(x[wp.tid()], out, wp.tid())

    @wp.func
    def cube(x: float):
        return x * x * x

    @wp.func_grad(cube)
    def adj_cube(x: float, adj_ret: float):
        wp.adjoint[x] += 30.0 * x * x * adj_ret  # ten times too large, to see that it is called

    @unique
    def own_adjoint(x: floats, out: floats):
        out[wp.tid()] = cube(x[wp.tid()])

    @unique
    def our_names(x: floats, _xla_step_0: floats, out: floats):
        out[wp.tid()] = x[wp.tid()] + _xla_step_0[wp.tid()]

    return types.SimpleNamespace(**locals())


if wp and conftest.CONDITIONS["warp 1.15"][0]():

    @wp.kernel(module="unique", grid_stride=False)
    def without_grid_stride(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        out[wp.tid()] = 3.0 * x[wp.tid()]


class Batch(typing.NamedTuple):
    """A kernel, and inputs of which some have slices."""

    kernel: str
    inputs: tuple
    options: typing.Any = types.MappingProxyType({})
    in_axes: tuple | None = None  # by default all have
    gradient: bool = False
    launches: int = 1  # of all slices, by the kernel or by its adjoint

    def make(self):
        kernel = getattr(warp_kernels(), self.kernel, None) or globals()[self.kernel]
        return xk.warp_kernel(kernel, **{"outs": like_first, "differentiable": self.gradient, **self.options})

    def function(self):
        """A function of one slice of the inputs."""
        f = self.make()
        if self.kernel == "values":
            p = warp_kernels().Params()
            p.a, p.n = 3.0, 4
            return lambda x: f(x, p, wp.vec3(1.0, 2.0, 3.0), 5, None)
        if self.gradient:
            return jax.grad(lambda *x: jnp.sin(f(*x)).sum(), tuple(range(len(self.inputs))))
        return f

    def axes(self):
        return self.in_axes or (0,) * len(self.inputs)


FLOAT = np.dtype(np.float32)
IN_ORDER = {"vmap_method": "sequential"}
PAIRS = sample(3, 7), sample(3, 7, seed=1)
SHARED = sample(3, 7), sample(7, seed=1)
BINS = {"outs": (spec(4), spec(1)), "launch_dims": 7, "zero_outputs": True}
TILES = {"launch_dims": 2, "tiled": True, "block_dim": 64}
IN_OUT = {"outs": lambda x, y: y, "in_out_argnames": ["y"], "launch_dims": 7}
WITH_BOOL = (
    sample(3, 2, 3, 2).astype(np.float16), np.ones((3, 2), np.uint8), np.eye(3, 2, dtype=bool), sample(3, 2, 4)
)  # fmt: skip
BATCHES = {
    "elementwise": Batch("add", PAIRS),
    "shared operand": Batch("add", SHARED, in_axes=(0, None)),
    "stencil": Batch("stencil", PAIRS[:1]),
    "large blocks": Batch("stencil", (sample(3, 1030),), {"block_dim": 1024}),
    "two indices": Batch("transposed", (sample(3, 4, 5),), {"outs": spec(5, 4)}),
    "four dimensions": Batch("four_dimensions", (sample(3, 2, 1, 3, 2),)),
    "vectors": Batch("vectors", (sample(3, 6, 3), sample(3, 6, 3, 3))),
    "dtypes and views": Batch("dtypes", WITH_BOOL, {"outs": spec(2, 3, 2, dtype=np.float16)}),
    "in-out": Batch("in_out", PAIRS, IN_OUT),
    "in-out from what is shared": Batch("in_out", SHARED, IN_OUT, in_axes=(0, None)),
    "atomics into zeros": Batch("histogram", PAIRS[:1], BINS),
    "values, a struct and None": Batch("values", PAIRS[:1], {"launch_dims": 7}),
    "gradient": Batch("loss", PAIRS, gradient=True, launches=2),
    "gradient, shared operand": Batch("loss", SHARED, in_axes=(0, None), gradient=True, launches=2),
    "gradient, vectors and an atomic": Batch(
        "norm", (sample(3, 7, 3),), {"outs": spec(1), "launch_dims": 7, "zero_outputs": True}, gradient=True, launches=2
    ),
    "tiles": Batch("tiles", (sample(3, 128),), TILES),
    "gradient of tiles": Batch("tiles", (sample(3, 128),), TILES, gradient=True, launches=2),
    "0-d and empty arrays": Batch("with_zero_d_and_empty", (*SHARED[:1], sample(3), np.zeros((3, 0), FLOAT))),
    "all empty": Batch("add", (np.zeros((3, 0), FLOAT),) * 2, launches=0),
    "functions and other names": Batch("by_functions", PAIRS[:1], {"zero_outputs": False}),
    "a parameter that is assigned": Batch("assigned", PAIRS),
    "constants, statics, a closure": Batch("closure", PAIRS[:1]),
    "an overload": Batch("overload", PAIRS[:1]),
    "many arrays": Batch(
        "many", tuple(sample(3, 5) if k % 3 else sample(5) for k in range(6)), {"outs": (spec(5),) * 3},
        in_axes=(None, 0, 0) * 2,
    ),
}  # fmt: skip
SINCE_1_15 = pytest.param(Batch("without_grid_stride", PAIRS[:1]), marks=pytest.mark.needs("warp 1.15"))


@pytest.fixture(
    params=[pytest.param("fake", marks=needs_fake_gpu), pytest.param("gpu", marks=pytest.mark.needs("warp_gpu"))]
)
def run(request):
    """Runs a function for CUDA: by a driver that is made of the CPU, or on a GPU."""
    if request.param == "fake":
        request.getfixturevalue("fake_gpu")
        return run_for_cuda
    return run_on_gpu


def check(run, function, in_axes, args, expected_launches):
    results, n_launches = launches(run, jax.vmap(function, in_axes), *args)
    assert n_launches == expected_launches
    expected = run(slice_by_slice(function, in_axes), *args)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-4), results, expected)


@pytest.mark.parametrize("batch", [*BATCHES.values(), SINCE_1_15], ids=[*BATCHES, "without a grid stride"])
def test_warp_a_batch_is_one_launch(run, batch):
    check(run, batch.function(), batch.axes(), batch.inputs, batch.launches)


NESTED = {  # in_axes, inner and outer, and launches: of slices that are not one step apart, one for each inner loop
    "all": ((0, 0), (0, 0), 1),
    "pairs": ((None, 0), (0, None), 3),
    "shared by the outer": ((0, 0), (None, 0), 3),
    "shared by both": ((0, None), (0, None), 1),
}


@pytest.mark.parametrize("kind", NESTED)
def test_warp_nested_batches(run, kind):
    inner, outer, n = NESTED[kind]
    shapes = [[3] * (a == 0) + [2] * (b == 0) + [7] for a, b in zip(outer, inner)]
    f = BATCHES["elementwise"].make()
    args = [sample(*shape, seed=k) for k, shape in enumerate(shapes)]
    results, n_launches = launches(run, jax.vmap(jax.vmap(f, inner), outer), *args)
    assert n_launches == n
    np.testing.assert_allclose(results, jax.vmap(jax.vmap(lambda x, y: x + 2 * y, inner), outer)(*args), 1e-5)


def test_warp_70_000_slices(run):
    f = BATCHES["elementwise"].make()
    x, y = sample(70_000, 2), sample(70_000, 2, seed=1)
    results, n_launches = launches(run, jax.vmap(f), x, y)
    assert n_launches == 2  # a grid has 65,535 blocks along z
    np.testing.assert_allclose(results, x + 2 * y, 1e-5)


def test_warp_batches_in_loops_and_the_gradient_of_a_scan(run):
    f = Batch("loss", PAIRS, gradient=True).make()

    def in_jax(x, w):
        return jnp.sin(x) * w + x[jnp.maximum(jnp.arange(7) - 1, 0)]

    def loss(f, x, w):
        return jax.lax.scan(lambda x, _: (f(x, w), None), x, length=2)[0].sum()

    gradients = [jax.vmap(jax.grad(functools.partial(loss, function), (0, 1))) for function in (f, in_jax)]
    results, n_launches = launches(run, gradients[0], *PAIRS)
    assert n_launches == 4
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-3, 1e-4), results, gradients[1](*PAIRS))


def test_warp_a_gradient_is_summed_over_slices(run):
    f = Batch("loss", PAIRS, gradient=True).make()
    x, w = SHARED
    result, n_launches = launches(run, jax.grad(lambda w: jax.vmap(lambda x: f(x, w))(x).sum()), w)
    assert n_launches == 2
    np.testing.assert_allclose(result, np.sin(x).sum(0), 1e-4)


NUMBERS = itertools.count()


def fresh_kernel():
    """x + 3 * y, by a kernel that no other test has made."""
    number = next(NUMBERS)

    @wp.kernel(module="unique")
    def fresh(x: wp.array(dtype=float), y: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = x[i] + 3.0 * y[i] + 0.0 * float(number)

    return fresh


def test_warp_batches_share_a_kernel_whatever_their_slices_share(run, monkeypatch):
    """Whatever its size, too: it is built once."""
    built = []
    make = xk._make_kernel_in_z
    monkeypatch.setattr(xk, "_make_kernel_in_z", lambda *args: built.append(args) or make(*args))
    kernel = fresh_kernel()
    f = xk.warp_kernel(kernel, like_first)
    for in_axes, args in [((0, 0), PAIRS), ((0, None), SHARED), ((0, 0), [np.tile(x, (2, 1)) for x in PAIRS])]:
        check(run, f, in_axes, args, 1)
    assert len(built) == 1


@needs_fake_gpu
@pytest.mark.parametrize("options, n", [({}, 1), ({"name": "at_once"}, 2), ({"name": "one", **IN_ORDER}, 1)], ids=str)
def test_warp_a_batch_is_built_when_a_kernel_with_a_name_is_traced(fake_gpu, monkeypatch, options, n):  # noqa: F811
    """An exported program may have a batch of it, in a process that lowers none."""
    monkeypatch.setattr(xk, "_traced_platform", lambda: "cuda")
    f = xk.warp_kernel(fresh_kernel(), like_first, **options)
    before = len(fake_gpu.handlers)
    jax.eval_shape(f, spec(7), spec(7))
    assert len(fake_gpu.handlers) == before + n
    fake_gpu.run(jax.vmap(f), *PAIRS)
    assert len(fake_gpu.handlers) == before + n + (not options)


def test_warp_threads_make_batches_at_once(run):
    kernel = fresh_kernel()
    x, y = PAIRS

    def vmap_of_size(n):
        f = xk.warp_kernel(kernel, like_first)
        args = [np.tile(z, (n, 1)) for z in PAIRS]
        np.testing.assert_allclose(run(jax.vmap(f), *args), np.tile(x + 3 * y, (n, 1)), 1e-5)

    LAUNCHED.clear()
    in_threads(vmap_of_size, [1, 2, 3, 4])
    assert LAUNCHED[""] == 4


@pytest.mark.needs("warp_gpu")
def test_warp_batches_over_a_mesh():
    """A launch on each device."""
    devices = jax.devices("cuda")
    mesh = jax.sharding.Mesh(np.array(devices), "i")
    f = Batch("loss", PAIRS).make()
    x, w = sample(8, 7), sample(7, seed=1)
    split = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    whole = jax.device_put(w, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    results, n_launches = launches(run_on_gpu, jax.vmap(f, (0, None)), split, whole)
    assert n_launches == len(devices)
    np.testing.assert_allclose(results, np.sin(x) * w + x[:, np.maximum(np.arange(7) - 1, 0)], 1e-4)


# -- Warp: a launch for each slice, and why ---------------------------------------------------------------


FALLBACKS = {  # a batch, and the reason
    "in order": (Batch("add", PAIRS, IN_ORDER), "vmap_method says that slices run in order"),
    "C++": (Batch("in_c", PAIRS[:1]), "it calls C++, or has adjoints, of your own"),
    "adjoint": (Batch("own_adjoint", PAIRS[:1], gradient=True), "it calls C++, or has adjoints, of your own"),
    "our names": (Batch("our_names", PAIRS), "names that begin with _xla_ are those of what is added to it"),
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_warp_batches_that_are_a_launch_for_each_slice_say_why(run, reasons, kind):
    batch, reason = FALLBACKS[kind]
    n_calls = 1 + batch.gradient
    check(run, batch.function(), batch.axes(), batch.inputs, 3 * n_calls)
    assert reasons() == {reason}


def test_warp_a_batch_whose_code_transformers_are_unknown(run, reasons):
    import ast

    kernel = fresh_kernel()
    transformed = type(kernel)(
        kernel.func, "transformed", type(kernel.module)("transformed", None), code_transformers=[ast.NodeTransformer()]
    )
    check(run, xk.warp_kernel(transformed, like_first), (0, 0), PAIRS, 3)
    assert reasons() == {"its code transformers would see another source"}


WHAT_IT_NAMES = 2.0


@pytest.mark.needs("warp")
def test_warp_a_constant_that_changed(run, reasons, monkeypatch):
    @wp.kernel(module="unique")
    def changing(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        out[wp.tid()] = WHAT_IT_NAMES * x[wp.tid()]

    f = xk.warp_kernel(changing, like_first)
    x, _ = PAIRS
    np.testing.assert_allclose(run(f, x[0]), 2 * x[0])
    monkeypatch.setitem(globals(), "WHAT_IT_NAMES", 3.0)
    results, n_launches = launches(run, jax.vmap(f), x)
    assert n_launches == 3
    np.testing.assert_allclose(results, 2 * x)
    assert reasons() == {"what it names is something else now than when Warp read it"}


def test_warp_what_does_not_build(run, reasons, monkeypatch):
    """With the exception where tests let it pass; users get a line in the log, and a launch for each slice."""
    monkeypatch.setattr(xk, "_MOVE_SNIPPET", "this is no C++ {field}")
    kernel = fresh_kernel()
    f = xk.warp_kernel(kernel, like_first)
    with pytest.raises(Exception, match=r"(?i)build|compil"):
        run(jax.vmap(f), *PAIRS)
    monkeypatch.setattr(xk, "_FALLS_BACK_ON", Exception)
    kernel = fresh_kernel()
    check(run, xk.warp_kernel(kernel, like_first), (0, 0), PAIRS, 3)
    assert any(re.search(r"(?i)build|compil", reason) for reason in reasons())  # Warp 1.14 reports it once


def test_warp_what_does_not_fit(run, reasons, monkeypatch):
    """Registers of the kernel for batches leave too few threads, which a mere number stands for."""
    f = xk.warp_kernel(fresh_kernel(), like_first)
    monkeypatch.setattr(xk._LibCuda, "limit", lambda libcuda, function, attribute: 255)
    _, n_launches = launches(run, jax.vmap(f), *PAIRS)
    assert n_launches == 3
    (reason,) = reasons()
    assert reason.startswith(
        "it does not fit then; on this GPU the kernel has at most 255 threads in a block, by its registers and "
        "launch_bounds: 256 are too many"
    )


# -- Numba CUDA ---------------------------------------------------------------------------------------------


def stencil(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[max(i - 1, 0)] + y[i]


def in_out(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = 2 * y[i] + x[i]


def zero_d(x, factor, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] * factor[()]


def scalar(x, factor, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] * factor


def asks_for_z(x, y, out):
    i, _, k = cuda.grid(3)
    if i < out.size and k == 0:
        out[i] = x[i] + cuda.gridDim.z


def shared_memory(x, y, out):
    i = cuda.grid(1)
    tile = cuda.shared.array(8, cuda_float32)  # noqa: F821
    tile[cuda.threadIdx.x] = x[min(i, x.size - 1)]
    cuda.syncthreads()
    if i < out.size:
        out[i] = tile[7 - cuda.threadIdx.x] + y[i]


Z_OF_ITS_OWN = "blocks along z are the slices, and it has some of its own: grid=(1, 1, 2)"
CUDA_BATCHES = {  # kernel, the inputs, options, in_axes, and why a batch is no single launch
    "stencil": (stencil, PAIRS, {}, (0, 0), None),
    "shared operand": (stencil, SHARED, {}, (0, None), None),
    "in-out": (in_out, PAIRS, {"outs": lambda x, y: y, "in_out_argnames": ["y"]}, (0, 0), None),
    "scalar": (scalar, (PAIRS[0], sample(3)), {"scalars": ["factor"]}, (0, 0), None),
    "shared memory": (shared_memory, PAIRS, {}, (0, 0), None),
    "0-d arrays": (zero_d, (PAIRS[0], sample(3)), {}, (0, 0), {"numba_cuda_mlir.cuda": "TypeError: .*cannot compile"}),
    "in order": (stencil, PAIRS, IN_ORDER, (0, 0), "vmap_method says that slices run in order"),
    "a grid with a z": (
        stencil,
        PAIRS,
        {"launch_dims": None, "grid": (1, 1, 2), "block": 8},
        (0, 0),
        re.escape(Z_OF_ITS_OWN),
    ),
    "asks for z": (asks_for_z, PAIRS, {}, (0, 0), "blocks along z are the slices, and its PTX has %n?ctaid.z"),
}


def cuda_row(kind, package):
    """A wrapper of the row's kernel for this package, its inputs and axes, and the reason."""
    kernel, inputs, options, in_axes, reason = CUDA_BATCHES[kind]
    options = {"outs": like_first, "launch_dims": 7, "threads_per_block": 8, **options}
    if isinstance(reason, dict):
        reason = reason.get(package.__name__.partition(".")[0])
    return xk.numba_cuda_kernel(package.jit(written_for(package, kernel)), **options), inputs, in_axes, reason


def check_reasons(found, expected):
    assert len(found) == (expected is not None)
    for reason in found:
        assert reason == expected or re.match(expected, reason)


DRIVERS = [  # the fake driver for each package, and a GPU for the one that is tested
    *[pytest.param(module, marks=pytest.mark.needs("fake driver", CUDA_MODULES[module])) for module in CUDA_MODULES],
    pytest.param("gpu", marks=[pytest.mark.needs("gpu"), pytest.mark.needs("cuda", "compiler")]),
]


class Driven(typing.NamedTuple):
    """A package, and what runs a function for CUDA."""

    cuda: types.ModuleType
    run: typing.Callable

    def check(self, op, in_axes, inputs, expected_launches):
        """The fake driver runs no kernel."""
        if self.run is run_on_gpu:
            check(self.run, op, in_axes, inputs, expected_launches)
        else:
            assert launches(self.run, jax.vmap(op, in_axes), *inputs)[1] == expected_launches

    def op(self, kernel, **options):
        options = {"outs": like_first, "launch_dims": 7, "threads_per_block": 8, **options}
        function = kernel if kernel.__closure__ else written_for(self.cuda, kernel)
        return xk.numba_cuda_kernel(self.cuda.jit(function), **options)


@pytest.fixture(params=DRIVERS)
def driven(request):
    if request.param == "gpu":
        return Driven(cuda, run_on_gpu)
    request.getfixturevalue("gpus")
    return Driven(importlib.import_module(request.param), run_for_cuda)


@pytest.mark.parametrize("kind", CUDA_BATCHES)
def test_fakecuda_a_batch_is_one_launch(driven, kind, reasons, monkeypatch):
    kernel, inputs, options, in_axes, reason = CUDA_BATCHES[kind]
    if isinstance(reason, dict):  # an exception of a package
        reason = reason.get(driven.cuda.__name__)
        monkeypatch.setattr(xk, "_FALLS_BACK_ON", Exception)
    driven.check(driven.op(kernel, **options), in_axes, inputs, 3 if reason else 1)
    found = reasons()
    assert len(found) == bool(reason)
    assert all(re.match(reason, text) for text in found)


def device_array(driven):
    if driven.run is run_on_gpu:
        return driven.cuda.to_device(np.zeros(8, np.float32))
    return DeviceArray()


def kernel_with_array(driven, where, array):
    """A kernel that counts its launches in an array on the device; Numba lets it not, by a closure or a tuple."""
    count = "if cuda.grid(1) == 0:\n        array[0] += 1; out[0] = array[0] + x[0]"
    names = {"cuda": driven.cuda}
    if where == "a closure":

        def read(x, y, out):
            out[0] = array[0] + x[0]

        return read
    if where == "a tuple":
        return runs("out[0] = arrays[0][0] + x[0]", "x, y, out", arrays=(array,))
    if where == "a module":
        module = types.ModuleType("a")
        module.array = array
        return runs(count.replace("array", "module.array"), "x, y, out", module=module)
    if where == "a function":
        function = driven.cuda.jit(device=True)(runs(count, "x, out", array=array, **names))
        return runs("count(x, out)", "x, y, out", count=function)
    return runs(count, "x, y, out", array=array)


@pytest.mark.parametrize("where", ["a global", "a closure", "a function", "a module", "a tuple"])
def test_fakecuda_a_kernel_that_names_an_array_on_the_device(driven, where, reasons):
    """It may write to it, slice after slice: one launch would race in silence."""
    if is_successor(driven.cuda) and where in ("a module", "a tuple"):
        pytest.skip("numba_cuda_mlir cannot compile that")
    array = device_array(driven)
    kernel = kernel_with_array(driven, where, array)
    op = driven.op(kernel, zero_outputs=True)
    results, n_launches = launches(driven.run, jax.vmap(op), *PAIRS)
    assert n_launches == 3
    if driven.run is run_on_gpu:
        counts = [0, 0, 0] if where in ("a closure", "a tuple") else [1, 2, 3]
        np.testing.assert_allclose(results[:, 0] - PAIRS[0][:, 0], counts, atol=1e-5)
    (reason,) = reasons()
    assert re.fullmatch(r"it names arrays on the device, to which it may write: '(array|arrays)'", reason)


def test_fakecuda_a_batch_reads_what_the_kernel_read(driven, reasons):
    """Also where another wrapper had it compiled."""

    def scale(x, out):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = factor * x[i]  # noqa: F821

    kernel = driven.cuda.jit(written_for(driven.cuda, scale, factor=2.0))
    options = {"outs": like_first, "launch_dims": 7, "threads_per_block": 8}
    x, _ = PAIRS
    driven.run(xk.numba_cuda_kernel(kernel, **options), x[0])
    kernel.py_func.__globals__["factor"] = 3.0
    for more in {}, {"input_output_aliases": {0: 0}}:
        op = xk.numba_cuda_kernel(kernel, **options, **more)
        results, n_launches = launches(driven.run, jax.vmap(op), x)
        assert n_launches == 3
        if driven.run is run_on_gpu:
            np.testing.assert_allclose(results, 2 * x, 1e-5)
        assert reasons() == {"it reads other values now than when it was compiled"}


def test_fakecuda_launches_that_share_a_handler(driven, reasons, monkeypatch):
    """Those with too many threads for the form of batches, or with a z, are launched for each slice."""
    limit = xk._LibCuda.limit
    monkeypatch.setattr(xk._LibCuda, "limit", lambda *args: 7 if args[2] == 0 else limit(*args))
    kernel = driven.cuda.jit(written_for(driven.cuda, stencil))
    rows = [
        (1, 8, 3, "it may then have 7 threads in a block, and block=(8, 1, 1)"),
        (2, 4, 1, None),
        ((2, 1, 2), 4, 3, Z_OF_ITS_OWN.replace("(1, 1, 2)", "(2, 1, 2)")),
        (1, 8, 3, "it may then have 7 threads in a block, and block=(8, 1, 1)"),
    ]
    for grid, block, n, reason in rows:
        op = xk.numba_cuda_kernel(kernel, like_first, grid=grid, block=block)
        driven.check(op, (0, 0), PAIRS, n)
        assert reasons() == {reason} - {None}


@pytest.mark.parametrize("ptx, asks", [
    ("mov.u32 %r1, %ctaid.z;", "%ctaid.z"),
    ("mov.v4.u32 {%r1, %r2, %r3, %r4}, %nctaid;", "%nctaid"),
    ("mov.u64 %rd1, %gridid;", "%gridid"),
    (".visible .entry kernel() .explicitcluster .reqnctapercluster 2 {", ".explicitcluster"),
    ("mov.u32 %r1, %cluster_ctaid.x;", "%cluster_ctaid"),
    (".extern .func (.param .b32 result) of_the_user (.param .b64 x);", "of_the_user"),
    (".extern .func (.param .b32 result) vprintf (.param .b64 x);", ""),
    ("mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.z; mov.u32 %r3, %tid.z; mov.u32 %r4, %nctaid.y;", ""),
])  # fmt: skip
def test_ptx_that_asks_for_z(ptx, asks):
    assert xk._asks_for_z(ptx).startswith(asks) and bool(xk._asks_for_z(ptx)) == bool(asks)


def test_fakecuda_what_does_not_compile_for_batches(driven, reasons, monkeypatch):
    """With the exception where tests let it pass; users get a line in the log, and a launch for each slice."""

    def fail(form, ranks):
        raise LookupError("a mistake\n of this file")

    monkeypatch.setattr(xk._Form, "for_batch", fail)
    op = driven.op(stencil)
    with pytest.raises(LookupError):
        driven.run(jax.vmap(op), *PAIRS)
    monkeypatch.setattr(xk, "_FALLS_BACK_ON", Exception)
    driven.check(op, (0, 0), PAIRS, 3)
    assert reasons() == {"LookupError: a mistake of this file"}


def test_fakecuda_a_batch_is_prepared_when_a_kernel_with_a_name_is_traced(driven, monkeypatch):
    """An exported program may have a batch of it, in a process that lowers none."""
    monkeypatch.setattr(xk, "_traced_platform", lambda: "cuda")
    prepared = []
    prepare = xk._CudaBatch.prepare

    def count(*args, **named):
        prepared.append(named)
        prepare(*args, **named)

    monkeypatch.setattr(xk._CudaBatch, "prepare", count)
    for options, n in ({}, 0), ({"name": "in_order", **IN_ORDER}, 0), ({"name": "at_once"}, 1):
        if name := options.get("name"):
            options = {**options, "name": f"{name}.{driven.cuda.__name__}"}
        jax.eval_shape(driven.op(stencil, **options), spec(7), spec(7))
        assert len(prepared) == n


def test_fakecuda_threads_make_batches_at_once(driven):
    op = driven.op(stencil)

    def vmap_of_size(n):
        driven.run(jax.vmap(op), *[np.tile(x, (n, 1)) for x in PAIRS])

    LAUNCHED.clear()
    in_threads(vmap_of_size, [1, 2, 3, 4])
    assert LAUNCHED[""] == 4


def test_fakecuda_1_000_slices(driven):
    _, n_launches = launches(driven.run, jax.vmap(driven.op(stencil)), *[sample(1000, 7)] * 2)
    assert n_launches == 1


def test_warp_1_000_slices(run):
    x = sample(1000, 16)
    results, n_launches = launches(run, jax.vmap(BATCHES["elementwise"].make()), x, x)
    assert n_launches == 1
    np.testing.assert_allclose(results, 3 * x, 1e-5)


# -- exported ------------------------------------------------------------------------------------------------

EXPORTED = """
import sys, pathlib
import jax, numpy as np
from jax import export
import xla_kernels as xk
from test_new_a import LAUNCHED, counting
jax.config.update("jax_default_device", jax.devices("cuda")[0])
what, language, folder = sys.argv[1:]
if language == "warp":
    import warp as wp

    @wp.kernel
    def left(x: wp.array(dtype=float), out: wp.array(dtype=float)):
        i = wp.tid()
        out[i] = x[i] + 2.0 * x[wp.max(i - 1, 0)]

    op = xk.warp_kernel(left, lambda x: x, name="left")
else:
    import importlib
    cuda = importlib.import_module(language)

    @cuda.jit
    def left(x, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = x[i] + np.float32(2) * x[max(i - 1, 0)]

    op = xk.numba_cuda_kernel(left, lambda x: x, launch_dims=5, name="left")
path = pathlib.Path(folder, "exported")
if what == "save":
    (n,) = export.symbolic_shape("n")
    jax.eval_shape(op, jax.ShapeDtypeStruct((5,), np.float32))
    function = export.export(jax.jit(jax.vmap(op)), platforms=["cuda"], disabled_checks=xk.export_checks())
    path.write_bytes(function(jax.ShapeDtypeStruct((n, 5), np.float32)).serialize())
else:
    find = xk._LibCuda.address
    xk._LibCuda.address = lambda lib, name: counting(find(lib, name)) if name == "cuLaunchKernel" else find(lib, name)
    jax.eval_shape(op, jax.ShapeDtypeStruct((5,), np.float32))
    x = np.arange(20, dtype=np.float32).reshape(4, 5)
    result = export.deserialize(bytearray(path.read_bytes())).call(x)
    np.testing.assert_allclose(result, x + 2 * x[:, [0, 0, 1, 2, 3]])
    print("launches:", LAUNCHED[""])
"""


@pytest.mark.needs("gpu")
@pytest.mark.processes
@pytest.mark.parametrize("language", [
    pytest.param("warp", marks=pytest.mark.needs("warp_gpu")),
    pytest.param("numba.cuda", marks=pytest.mark.needs("numba-cuda")),
    pytest.param("numba_cuda_mlir.cuda", marks=pytest.mark.needs("numba-cuda-mlir")),
])  # fmt: skip
def test_a_batch_of_unknown_size_is_one_launch_in_another_process(language, tmp_path):
    """Which has traced a slice."""
    program = tmp_path / "program.py"
    program.write_text(EXPORTED)
    run_python(program, "save", language, tmp_path)
    assert "launches: 1" in run_python(program, "load", language, tmp_path)
