// A fake CUDA driver, which a process without a GPU loads as libcuda.so.1 (see FakeCudaDriver in conftest.py).
//
// It has two GPUs, logs launches and memsets, and runs no kernel.  The Numba CUDA packages compile kernels and load them.
// Programs are lowered for CUDA and run on the CPU, whose memory the fake GPUs share.  All functions that are not defined
// here succeed and do nothing.

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef int Result;
typedef unsigned Size;
typedef uintptr_t Handle;  // contexts: 16 + ordinal of the GPU; modules and their functions: 16 n + 8 + ordinal

// Tests set these variables.
int device;        // the GPU of XLA's context, which is current in threads that have set no other
int n_params;      // how many parameters of a launch are logged
char failing[64];  // the function that fails when it is called next

// The log has a line of JSON for each call.
static char log_text[1 << 16];
static int log_size;
#define LOG(...) (log_size += snprintf(log_text + log_size, sizeof log_text - log_size, __VA_ARGS__))
const char *take_log(void) {
  log_text[log_size] = 0;
  log_size = 0;
  return log_text;
}

static Result result_of(const char *function) {
  if (strcmp(failing, function)) { return 0; }
  *failing = 0;
  return 2;  // CUDA_ERROR_OUT_OF_MEMORY
}
Result cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0; }

// devices and contexts
static __thread Handle contexts[64];  // the stack of this thread
static __thread int n_contexts;
static Handle current_context(void) { return n_contexts ? contexts[n_contexts - 1] : 0; }
Result cuInit(void) { return 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGetCount(int *count) { *count = 2; return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
  int compute_capability[] = {9, 0}, shared_bytes_of_block = 232448;
  *value = attribute == 75 || attribute == 76 ? compute_capability[attribute - 75] :
           attribute == 97 ? shared_bytes_of_block : 1024;
  return 0;
}
Result cuDevicePrimaryCtxRetain(Handle *context, int ordinal) { *context = 16 + ordinal; return 0; }
Result cuCtxGetCurrent(Handle *context) { *context = current_context(); return 0; }
Result cuCtxGetDevice(int *ordinal) { *ordinal = current_context() ? current_context() - 16 : device; return 0; }
Result cuCtxPushCurrent_v2(Handle context) { contexts[n_contexts++] = context; return 0; }
Result cuCtxPopCurrent_v2(Handle *context) {
  if (!n_contexts) { return 201; }
  *context = contexts[--n_contexts];
  return 0;
}
Result cuCtxSetCurrent(Handle context) { contexts[n_contexts ? n_contexts - 1 : n_contexts++] = context; return 0; }

// code: handlers load modules, and the packages load libraries
static Handle last_handle = 1024;
Result cuLibraryLoadData(Handle *library) { *library = last_handle += 16; return 0; }
Result cuLibraryGetKernel(Handle *kernel, Handle library) { *kernel = library; return 0; }
Result cuModuleLoadData(Handle *module, const char *image) {
  *module = (last_handle += 16) + 8 + current_context() - 16;
  return memcmp(image, "\177ELF", 4) ? 200 : result_of(__func__);
}
Result cuModuleGetFunction(Handle *function, Handle module) { *function = module; return 0; }
static int dynamic_shared_limit;
Result cuFuncGetAttribute(int *value, int attribute, Handle function) {
  *value = attribute == 8 ? dynamic_shared_limit : 128;  // also the static shared memory, and the threads of a block
  return 0;
}
Result cuFuncSetAttribute(Handle function, int attribute, int value) {
  if (attribute == 8) { dynamic_shared_limit = value; }
  return 0;
}

// memory and launches
Result cuMemcpyDtoDAsync_v2(void *target, void *source, size_t size) { memmove(target, source, size); return 0; }
Result cuMemsetD8Async(void *target, unsigned char value, size_t size) {
  LOG("[\"set %zu bytes\", %d]\n", size, value);
  memset(target, value, size);
  return result_of(__func__);
}
Result cuLaunchKernel(Handle function, Size gx, Size gy, Size gz, Size bx, Size by, Size bz, Size shared,
                      Handle stream, uint64_t **params) {
  int is_of_handler = function & 8, ordinal = is_of_handler ? function & 7 : (int)current_context() - 16;
  LOG("[\"%s %d: %u,%u,%u x %u,%u,%u +%u%s\", [", is_of_handler ? "native" : "numba", ordinal,
      gx, gy, gz, bx, by, bz, shared, stream == 0x5eed ? "" : " on another stream");
  for (int i = 0; i < n_params; i++) { LOG("%s%llu", i ? ", " : "", (unsigned long long)*params[i]); }
  LOG("]]\n");
  return result_of(__func__);
}
typedef struct { Size gx, gy, gz, bx, by, bz, shared; Handle stream; } Config;
Result cuLaunchKernelEx(const Config *c, Handle function, uint64_t **params) {
  return cuLaunchKernel(function, c->gx, c->gy, c->gz, c->bx, c->by, c->bz, c->shared, c->stream, params);
}

Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  char versioned[128];
  void *self = dlopen("libcuda.so.1", RTLD_LAZY);
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *function = dlsym(self, versioned);
  if (!*function) { *function = dlsym(self, name); }
  if (!*function) { *function = cuInit; }
  if (status) { *status = 0; }
  return 0;
}
