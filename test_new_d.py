"""Beginners' mistakes, and the messages that name the fix: rows for the one table of errors."""

import dataclasses
import pickle
import re
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest

import xla_kernels as xk
from conftest import x64
from test_xla_kernels import F32, FLOATS, cuda, spec, warp_kernels, wrap


@dataclasses.dataclass
class Config:
    gain: float = 2.0


ONE = np.int32(1)
CALLS_NO_JAX = "a kernel cannot call JAX: write np. for jnp., and loops for jax.lax and jax.vmap"
NUMBERS_ALONE = "globals and closures can be numbers, tuples and NumPy arrays: what a dict, a list or an object has is"
TAKES_NO_KEYWORDS = "a parameter cannot be keyword-only: make it an input, or a variable of the closure"
C_FUNCTIONS = "math.erf and math.gamma; on CPUs SciPy's C functions by get_cython_function_address, as in `bessel`"


def stored(expression, **values):
    """A kernel that stores what a line of a beginner's program computes."""
    namespace = {"np": np, "jax": jax, "jnp": jnp, **values}
    exec(f"def kernel(x, out):\n    {expression}", namespace)
    return namespace["kernel"]


def keyword_only(x, out, *, n=3):
    out[:] = x + n


def keyword_only_result(x, *, n=3):
    return x + n


def copy(x, out):
    out[:] = x


wrapped = wrap(copy)
op = xk.XLACustomKernel("scale")
op.def_kernel("jax", "cpu", lambda n: lambda x: n * x)
call_op = partial(op, n=2.0)


@jax.custom_vjp
def by_rule(x):
    return wrapped(x)


by_rule.defvjp(lambda x: (wrapped(x), x), lambda x, ct: (wrapped(x) * ct,))


@jax.custom_jvp
def by_tangents(x):
    return wrapped(x)


by_tangents.defjvp(lambda xs, ts: (wrapped(*xs), wrapped(*ts)))


def in_numba(kernel, *inputs, outs=lambda x: x):
    return lambda: wrap(kernel, outs)(*inputs or [F32])


def with_scipy(name):
    """A kernel that calls a function of SciPy, by a module or by its name."""

    def run():
        special = pytest.importorskip("scipy.special")
        return wrap(stored(f"out[0] = {name}(x[0])", special=special, j0=special.j0))(F32)

    return run


def pickled_in_main(x):
    """What another process reads, whose `__main__` is another one."""
    main = sys.modules["__main__"]
    main.op_of_main = x
    try:
        data = pickle.dumps(x)
    finally:
        del main.op_of_main
    return pickle.loads(data)


def with_x64(call):
    def run():
        with x64():
            return call()

    return run


def outs_of(function, *inputs):
    return wrap(copy, function), *(inputs or [F32])


# The backend, what the message says (the parts between .*, as they are), a call and its inputs.
SPECS_NO_VALUES = ": a function gets specs (.shape and .dtype) of arrays, no values; jax.eval_shape(f, ...) gives"
NEW_ERRORS = {
    TypeError: [
        # 1. inside outs=
        ("numba", "numba_kernel 'copy': outs of (float32[4]): 'ShapeDtypeStruct' object is not subscriptable"
         + SPECS_NO_VALUES, *outs_of(lambda x: x[0])),
        ("numba", "has no attribute 'astype'" + SPECS_NO_VALUES, *outs_of(lambda x: x.astype("f4"))),
        ("numba", "has no attribute 'T'" + SPECS_NO_VALUES, *outs_of(lambda x: x.T)),
        ("numba", "'int' and 'ShapeDtypeStruct'" + SPECS_NO_VALUES, *outs_of(lambda x: 2 * x)),
        ("numba", "or is a fixed capacity, with a count as one more output", *outs_of(lambda x: x[x > 1])),
        ("numba", "outs of (float32[4], int32[]): .* not 'ShapeDtypeStruct': a function gets specs",
         *outs_of(lambda x, n: spec(int(n)), F32, ONE)),
        ("numba", "'copy': outs of .*concatenate requires ndarray .*: a function gets specs",
         *outs_of(lambda x: jnp.concatenate([x, x]))),
        ("numba", "'copy': outs: a function gets specs .*; a shape is flat, such as (2, *x.shape): .*, got (2, (4,))",
         *outs_of(lambda x: spec(2, x.shape))),
        ("numba", "outs of (float32[4]): tuple index out of range: a function gets specs",
         *outs_of(lambda x: spec(x.shape[1]))),
        ("numba", "'copy': scratch of (float32[4]): .*: a function gets specs",
         wrap(copy, scratch=lambda x: x[0]), F32),
        ("op", "'scale': outs of (float32[4]): 'ShapedArray' object is not subscriptable" + SPECS_NO_VALUES,
         partial(call_op, outs=lambda x: x[0]), F32),
        ("op", "'scale': outs of (float32[4]): unsupported operand .*: a function gets specs",
         jax.jit(partial(call_op, outs=lambda x: 2 * x)), F32),
        ("op", "a callable of the inputs' specs that returns them; got <function",
         partial(call_op, outs=lambda x: x.T), F32),
        ("warp", "'multiply': outs of (float32[4], float32[4]): .*: a function gets specs",
         lambda *args: xk.warp_kernel(warp_kernels().multiply, lambda x, y: x[0])(*args), F32, F32),
        # 2. derivatives
        ("numba", "use jax.custom_vjp for grad, jax.custom_jvp for jvp and hessian, or an XLACustomKernel's rules; "
         "jax.lax.stop_gradient(x) for inputs that need none", partial(jax.jvp, wrapped, [F32]), [F32]),
        ("numba", "a kernel that a rule calls needs a rule of its own where that is differentiated again",
         lambda x: jax.grad(lambda x: jax.grad(lambda x: by_rule(x).sum())(x).sum())(x), F32),
        ("warp", "say differentiable=True for reverse mode, or use jax.custom_vjp for grad, jax.custom_jvp for jvp",
         lambda *args: jax.jvp(xk.warp_kernel(warp_kernels().multiply, lambda x, y: x), args, args), F32, F32),
        # 3. 64 bits
        ("numba", "not float32[:]: .*: cast by .astype(np.float32) or np.float32(...), or declare 64 bits in outs",
         with_x64(in_numba(lambda x: 0.5 * x))),
        ("numba", "returns int64, not int32[]: .*: cast by .astype(np.int32) or np.int32(...), or declare 64 bits",
         with_x64(in_numba(lambda x: x + 1, ONE))),
        ("numba", "not float32[:], float32[]: .*: cast by .astype(np.float32)",
         with_x64(in_numba(lambda x: (0.5 * x, x[0]), outs=lambda x: (x, spec())))),
        # 4. functions that are no kernels
        ("numba", "got ufunc <ufunc 'sin'>; call it in a function, lambda x: np.sin(x), ", partial(wrap, np.sin)),
        ("numba", "got ufunc <ufunc 'erf'>; call it in a function",
         lambda: wrap(pytest.importorskip("scipy.special").erf)),
        ("numba", "got builtin_function_or_method .*; call it in a function, lambda x: math.sin(x)",
         partial(wrap, abs)),
        ("numba", "got PjitFunction .*: give a Python function, with np. for jnp.", partial(wrap, jnp.sin)),
        # 5. what Numba says, and what helps
        ("numba", f"; {CALLS_NO_JAX}:", wrap(stored("out[:] = jnp.sin(x)")), F32),
        ("numba", f"; {CALLS_NO_JAX}:", wrap(stored("out[:] = jax.vmap(abs)(x)")), F32),
        ("numba", f"; {CALLS_NO_JAX}:", wrap(stored("out[:] = sin(x)", sin=jnp.sin)), F32),
        ("numba", f"; {CALLS_NO_JAX}:", wrap(stored("out[:] = add(x, x)", add=jnp.add)), F32),
        ("numba", f"; {CALLS_NO_JAX}:", wrap(stored("out[:] = relu(x)", relu=jax.nn.relu)), F32),
        ("numba", "; noise is an input: draw it by jax.random before the call:",
         wrap(stored("out[:] = jax.random.normal(jax.random.key(0), (4,))")), F32),
        ("numba", "; write out[i] = 1.0 for out.at[i].set(1.0):", wrap(stored("out.at[0].set(1.0)")), F32),
        ("numba", "; write out[i] = 1.0 for out.at[i].set(1.0):", in_numba(lambda x: x.at[0].set(1.0))),
        ("numba", C_FUNCTIONS, with_scipy("special.j0")),
        ("numba", C_FUNCTIONS, with_scipy("j0")),
        ("numba", "; import outside of the kernel:", wrap(stored("import math; out[0] = math.sin(x[0])")), F32),
        ("numba", "a kernel cannot call a wrapper or an op: call the @numba.njit function in it, wrapper.__wrapped__:",
         wrap(stored("out[:] = wrapped(x)", wrapped=wrapped)), F32),
        ("numba", "; a kernel cannot call a wrapper or an op:", wrap(stored("out[:] = op(x, out, 1)", op=op)), F32),
        ("numba", "; a function that it calls needs @numba.njit (for a GPU @cuda.jit), too:",
         wrap(stored("copy(x, out)", copy=copy)), F32),
        ("numba", f"; {NUMBERS_ALONE} an input", wrap(stored("out[0] = a['gain']", a={"gain": 2.0})), F32),
        ("numba", f"; {NUMBERS_ALONE} an input", wrap(stored("out[0] = a.gain", a=Config())), F32),
        ("numba", f"; {NUMBERS_ALONE} an input", wrap(stored("out[0] = a[0]", a=[2.0])), F32),
        ("numba", f"; {TAKES_NO_KEYWORDS}:", wrap(keyword_only), F32),
        ("numba", f"; {TAKES_NO_KEYWORDS}:", wrap(keyword_only_result), F32),
        ("numba", "; debug it in Python: wrapper.__wrapped__, or of @njit its .py_func, takes NumPy arrays:",
         wrap(stored("breakpoint()")), F32),
        ("numba", "its inputs are read-only, .*: write to an output (a parameter after the inputs), name",
         wrap(copy, FLOATS), F32, F32),
        ("numba", "'copy' takes (x, out), but this call has 3 inputs and 1 outputs: it takes all by position, or",
         wrap(copy, FLOATS), F32, F32, F32),
        # 6. parameters of ops
        ("op", "XLACustomKernel 'scale': the generator (.*) takes (n), .*; give it one parameter for each, or call "
         "op(..., n=...)", partial(op, outs=FLOATS), F32),
    ],
    NotImplementedError: [
        ("numba", "cannot be transposed, as grad of a jax.custom_jvp does where its rule calls this with tangents: use",
         jax.grad(lambda x: by_tangents(x)[0]), F32),
        ("numba", "GPUs there are numba_cuda_kernel and warp_kernel, and jax.pure_callback calls this one's function",
         lambda: jax.jit(wrapped).trace(F32).lower(lowering_platforms=("cuda",))),
    ],
    pickle.UnpicklingError: [
        # 8. ops of __main__
        ("op", "__main__.op_of_main is not 'scale' here, .*: it travels by a variable of a module that both processes "
         "import, which is not __main__", lambda: pickled_in_main(xk.XLACustomKernel("scale"))),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind, backend, text, call, inputs", [
    pytest.param(kind, backend, text, call, inputs, marks=pytest.mark.needs(backend) if backend == "warp" else ())
    for kind in NEW_ERRORS for backend, text, call, *inputs in NEW_ERRORS[kind]
])  # fmt: skip
def test_a_mistake_is_told_its_fix(kind, backend, text, call, inputs):
    pattern = "(?s)" + ".*".join(map(re.escape, text.split(".*")))
    with pytest.raises(kind, match=pattern) as caught:
        jax.block_until_ready(call(*inputs))
    first_line = str(caught.value).partition("\n")[0]
    assert re.search(pattern, first_line)  # the error itself says it, before what Numba says, and no note


# The fixes, as the messages have them.
FIXES = {
    "np.float32(...)": (lambda x: np.float32(0.5) * x, FLOATS, F32 / 2),
    ".astype(np.float32)": (lambda x: (0.5 * x).astype(np.float32), FLOATS, F32 / 2),
    "64 bits in outs": (lambda x: 0.5 * x, spec(4, dtype=np.float64), F32 / 2),
    "lambda x: np.sin(x)": (lambda x: np.sin(x), FLOATS, np.sin(F32)),
    "eval_shape": (lambda x: x[:2] + x[2:], lambda x: jax.eval_shape(lambda x: x[:2] + x[2:], x), F32[:2] * 2),
    "(2, *x.shape)": (lambda x: np.stack((x, x)), lambda x: spec(2, *x.shape), np.ones((2, 4))),
    "wrapper.__wrapped__": (stored("f(x, out)", f=numba.njit(wrapped.__wrapped__)), FLOATS, F32),
}


@pytest.mark.parametrize("fix", FIXES)
def test_the_fix_of_a_message_works(fix):
    kernel, outs, result = FIXES[fix]
    with x64():
        np.testing.assert_allclose(wrap(kernel, outs)(F32), result, rtol=1e-6)


def test_an_input_that_needs_no_gradient_needs_no_derivative():
    def loss(x, y):
        return (wrapped(jax.lax.stop_gradient(x)) * y).sum()

    np.testing.assert_array_equal(jax.grad(loss, 1)(F32, F32), F32)


@pytest.mark.gpu
@pytest.mark.parametrize("line, text", [
    ("out[0] = jnp.sin(x[0])", CALLS_NO_JAX),
    ("out.at[0].set(1.0)", "write out[i] = 1.0"),
    ("out[0] = a[0]", NUMBERS_ALONE),
])  # fmt: skip
def test_numba_cuda_is_told_the_same(line, text):
    kernel = cuda.jit(stored(line, a={0: 2.0}))
    with pytest.raises(TypeError, match=re.escape(text)):
        xk.numba_cuda_kernel(kernel, lambda x: x, launch_dims=4)(F32)
