/* A program: all launches of a pass of a layer, as one tvm-ffi function of the pass's tensors.
 *
 * program(code, kernel...) -> function. The function takes the tensors of a call, the last of them scratch, compares
 * each with what the code declares, and calls the kernels in turn, with tensors that are parts of those given. It
 * returns 0 when it ran; 1 + i when tensor i is not as declared, and then it has called nothing. The error of a kernel
 * is the function's own, and no later kernel runs. It knows nothing of the kernels: which arguments each gets is data,
 * written by twell/runtime/program.py.
 *
 * code, int64:
 *   FORMAT; the numbers of tensors given, arguments, views, launches, dimensions of all views, dimensions of operands
 *   per operand, a tensor given that is not the scratch: dtype, ndim, shape, strides
 *   bytes of scratch
 *   per launch: the number of its arguments
 *   per argument: kind, value   NONE; INT; FLOAT, the bits of a double; GIVEN, a tensor's index; VIEW, a view's index
 *   per view: the index of the tensor given that it is part of, byte offset, dtype, ndim, shape, strides
 * A dtype is code | bits << 8 | lanes << 16 of DLPack's. Strides are in elements.
 *
 * C11 and the C API of tvm-ffi: no torch, no CUDA, no C++. A program does not change once it is made, so that several
 * threads may run it at a time, and one may run it inside itself.
 */
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>

/* twell/runtime/host.py has the same number; change both where the code changes */
enum { FORMAT = 1 };
/* a call keeps this much on the stack: 4 KB for the arguments of a launch, which are far fewer */
enum { MOST_TENSORS = 64, MOST_ARGUMENTS = 64, MOST_NUMBERS = 1 << 24 };
enum { ALIGNMENT = 16 };
enum { NONE, INT, FLOAT, GIVEN, VIEW };
/* numbers at the begin of the code */
enum { OF_FORMAT, OF_GIVEN, OF_ARGUMENTS, OF_VIEWS, OF_LAUNCHES, OF_VIEW_DIMS, OF_OPERAND_DIMS, HEADER };

typedef struct {
  TVMFFIObject* kernel;
  TVMFFISafeCallType call;
  int count;
  const int64_t* arguments; /* pairs of kind and value */
} Launch;

typedef struct {
  int base;
  int64_t offset;
  DLTensor tensor; /* without data and device */
} View;

typedef struct {
  int given, launches;
  int64_t scratch;
  DLTensor* operand; /* without data and device */
  View* view;
  Launch* launch;
  int64_t code[]; /* a copy, which has the shapes, strides and arguments */
} Program;

__attribute__((format(printf, 2, 3))) static int refuse(const char* kind, const char* format, ...) {
  char message[256];
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof(message), format, values);
  va_end(values);
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

/* ---- a call ---- */

static const DLTensor* tensor_of(const TVMFFIAny* any) {
  if (any->type_index == kTVMFFITensor) return (const DLTensor*)(any->v_obj + 1);
  if (any->type_index == kTVMFFIDLTensorPtr) return (const DLTensor*)any->v_ptr;
  return NULL;
}

/* integers, because the memory of an empty tensor may be NULL, to which C adds nothing */
static uintptr_t address(const DLTensor* tensor) { return (uintptr_t)tensor->data + tensor->byte_offset; }

static bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

/* Strides of a dimension of at most one element, and of a tensor without elements, reach nothing. Every tensor has
 * strides: tvm-ffi adds those that older DLPack leaves out. */
static bool is_as_declared(const DLTensor* tensor, const DLTensor* operand) {
  if (!same_dtype(tensor->dtype, operand->dtype) || tensor->ndim != operand->ndim) return false;
  bool empty = false;
  for (int d = 0; d < tensor->ndim; d++) {
    if (tensor->shape[d] != operand->shape[d]) return false;
    empty = empty || tensor->shape[d] == 0;
  }
  if (empty) return true;
  for (int d = 0; d < tensor->ndim; d++)
    if (tensor->shape[d] > 1 && tensor->strides[d] != operand->strides[d]) return false;
  return address(tensor) % ALIGNMENT == 0;
}

static bool is_scratch(const DLTensor* tensor, int64_t bytes) {
  if (!same_dtype(tensor->dtype, (DLDataType){kDLUInt, 8, 1}) || tensor->ndim != 1) return false;
  if (tensor->shape[0] < bytes) return false;
  if (tensor->shape[0] > 1 && tensor->strides[0] != 1) return false;
  return bytes == 0 || address(tensor) % ALIGNMENT == 0;
}

static int run(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  const Program* p = (const Program*)self;
  const DLTensor* given[MOST_TENSORS] = {NULL};
  if (count != p->given) return refuse("ValueError", "expected %d tensors, got %d", p->given, (int)count);
  for (int i = 0; i < count; i++)
    if (!(given[i] = tensor_of(&args[i])))
      return refuse("TypeError", "argument %d must be a tensor, got type index %d", i, (int)args[i].type_index);

  result->type_index = kTVMFFIInt;
  const DLDevice device = given[0]->device;
  for (int i = 0; i < count; i++) {
    const DLDevice own = given[i]->device;
    bool fits = own.device_type == device.device_type && own.device_id == device.device_id;
    fits = fits && (i < count - 1 ? is_as_declared(given[i], &p->operand[i]) : is_scratch(given[i], p->scratch));
    result->v_int64 = 1 + i;
    if (!fits) return 0;
  }
  result->v_int64 = 0;

  for (const Launch* launch = p->launch; launch < p->launch + p->launches; launch++) {
    TVMFFIAny arguments[MOST_ARGUMENTS];
    DLTensor views[MOST_ARGUMENTS];
    for (int i = 0; i < launch->count; i++) {
      const int64_t kind = launch->arguments[2 * i], value = launch->arguments[2 * i + 1];
      if (kind == GIVEN) {
        arguments[i] = args[value];
      } else if (kind == VIEW) {
        const View* view = &p->view[value];
        views[i] = view->tensor;
        views[i].data = (void*)(address(given[view->base]) + (uintptr_t)view->offset);
        views[i].device = device;
        arguments[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr};
        arguments[i].v_ptr = &views[i];
      } else {
        arguments[i] = (TVMFFIAny){.type_index = kind == NONE ? kTVMFFINone : kind == INT ? kTVMFFIInt : kTVMFFIFloat};
        arguments[i].v_int64 = value;
      }
    }
    TVMFFIAny returned = {.type_index = kTVMFFINone};
    const int status = launch->call(launch->kernel, arguments, launch->count, &returned);
    if (status) {
      *result = (TVMFFIAny){.type_index = kTVMFFINone};
      return status;
    }
    /* kernels return nothing, but a function of Python may */
    if (returned.type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(returned.v_obj);
  }
  return 0;
}

/* ---- making a program ---- */

static void destroy(void* self) {
  Program* p = (Program*)self;
  for (int i = 0; p->launch && i < p->launches; i++)
    if (p->launch[i].kernel) TVMFFIObjectDecRef(p->launch[i].kernel);
  free(p->operand);
  free(p->view);
  free(p->launch);
  free(p);
}

/* Bytes from the first to the last element; -1 where 63 bits do not hold the number. */
static int64_t extent(const DLTensor* t) {
  int64_t elements = 1, step, bytes;
  bool empty = false;
  for (int d = 0; d < t->ndim; d++) {
    empty = empty || t->shape[d] == 0;
    if (t->shape[d] > 1 && (__builtin_mul_overflow(t->shape[d] - 1, t->strides[d], &step) ||
                            __builtin_add_overflow(elements, step, &elements)))
      return -1;
  }
  if (empty) return 0;
  return __builtin_mul_overflow(elements, (t->dtype.bits * t->dtype.lanes + 7) / 8, &bytes) ? -1 : bytes;
}

/* Read one tensor, of which `dims` dimensions are left; return its number of dimensions, or refuse it. */
static int64_t read_tensor(int64_t* code, int64_t dims, DLTensor* tensor) {
  const int64_t dtype = code[0], ndim = code[1];
  if (dtype < 0 || dtype > UINT32_MAX || (dtype >> 8 & 255) == 0 || dtype >> 16 == 0)
    return refuse("ValueError", "expected a dtype with bits and lanes, got %" PRId64, dtype);
  if (ndim < 0 || ndim > dims)
    return refuse("ValueError", "expected a tensor of up to %" PRId64 " dimensions, got %" PRId64, dims, ndim);
  tensor->dtype = (DLDataType){(uint8_t)dtype, (uint8_t)(dtype >> 8), (uint16_t)(dtype >> 16)};
  tensor->ndim = (int)ndim;
  tensor->shape = code + 2;
  tensor->strides = code + 2 + ndim;
  for (const int64_t* size = tensor->shape; size < tensor->shape + 2 * ndim; size++)
    if (*size < 0) return refuse("ValueError", "expected lengths and strides from 0 on, got %" PRId64, *size);
  if (extent(tensor) < 0)
    return refuse("ValueError", "expected a tensor of up to %" PRId64 " bytes, got a larger one", INT64_MAX);
  return ndim;
}

/* Read the code behind the header, whose numbers fit the length of the code. */
static int read_code(Program* p, const TVMFFIAny* kernels) {
  const int64_t* header = p->code;
  int64_t *c = p->code + HEADER, ndim, left = header[OF_OPERAND_DIMS];
  for (int i = 0; i < p->given - 1; i++, c += 2 + 2 * ndim, left -= ndim)
    if ((ndim = read_tensor(c, left, &p->operand[i])) < 0) return -1;
  if (left) return refuse("ValueError", "expected %" PRId64 " more dimensions of operands, got none", left);
  if ((p->scratch = *c++) < 0) return refuse("ValueError", "expected bytes of scratch, got %" PRId64, p->scratch);

  const int64_t *counts = c, *arguments = c + p->launches;
  left = header[OF_ARGUMENTS];
  for (int i = 0; i < p->launches; left -= counts[i++]) {
    const int64_t most = left < MOST_ARGUMENTS ? left : MOST_ARGUMENTS;
    if (counts[i] < 0 || counts[i] > most)
      return refuse("ValueError", "expected a launch of up to %" PRId64 " arguments, got %" PRId64, most, counts[i]);
    if (kernels[i].type_index != kTVMFFIFunction)
      return refuse("TypeError", "kernel %d must be a function, got type index %d", i, (int)kernels[i].type_index);
    const TVMFFIFunctionCell* function = (const TVMFFIFunctionCell*)(kernels[i].v_obj + 1);
    p->launch[i] = (Launch){kernels[i].v_obj, function->safe_call, (int)counts[i], arguments};
    TVMFFIObjectIncRef(kernels[i].v_obj);
    arguments += 2 * counts[i];
  }
  if (left) return refuse("ValueError", "expected %" PRId64 " more arguments of launches, got none", left);
  for (c += p->launches; c < arguments; c += 2) {
    if (c[0] < NONE || c[0] > VIEW) return refuse("ValueError", "expected a kind from 0 to 4, got %" PRId64, c[0]);
    const int64_t things = c[0] == GIVEN ? header[OF_GIVEN] : header[OF_VIEWS];
    if (c[0] >= GIVEN && (c[1] < 0 || c[1] >= things))
      return refuse("ValueError", "expected the index of one of %" PRId64 " tensors, got %" PRId64, things, c[1]);
  }

  left = header[OF_VIEW_DIMS];
  for (int64_t i = 0; i < header[OF_VIEWS]; i++, left -= ndim) {
    View* view = &p->view[i];
    const int64_t base = c[0], offset = c[1];
    if (base < 0 || base >= p->given)
      return refuse("ValueError", "expected a view of one of %d tensors, got %" PRId64, p->given, base);
    if ((ndim = read_tensor(c + 2, left, &view->tensor)) < 0) return -1;
    const int64_t room = base == p->given - 1 ? p->scratch : extent(&p->operand[base]), own = extent(&view->tensor);
    if (offset < 0 || (own && offset > room - own))
      return refuse("ValueError", "expected a view within %" PRId64 " bytes of tensor %d, got %" PRId64 " at %" PRId64,
                    room, (int)base, own, offset);
    view->base = (int)base, view->offset = offset;
    c += 4 + 2 * ndim;
  }
  if (left) return refuse("ValueError", "expected %" PRId64 " more dimensions of views, got none", left);
  return 0;
}

TVM_FFI_DLL_EXPORT int __tvm_ffi_program(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  (void)self;
  const DLTensor* code = count > 0 ? tensor_of(&args[0]) : NULL;
  if (!code) return refuse("TypeError", "expected a tensor of code and kernels, got none");
  if (!same_dtype(code->dtype, (DLDataType){kDLInt, 64, 1}) || code->device.device_type != kDLCPU || code->ndim != 1 ||
      (code->shape[0] > 1 && code->strides[0] != 1))
    return refuse("ValueError",
                  "expected code in a contiguous int64 tensor of one dimension on the CPU, "
                  "got %d bits of DLPack's kind %d, %d dimensions, device type %d",
                  code->dtype.bits, code->dtype.code, (int)code->ndim, (int)code->device.device_type);

  const int64_t length = code->shape[0], *numbers = (const int64_t*)address(code);
  if (length > 0 && numbers[OF_FORMAT] != FORMAT)
    return refuse("ValueError", "expected code of format %d, got format %" PRId64, FORMAT, numbers[OF_FORMAT]);
  if (length < HEADER || length > MOST_NUMBERS)
    return refuse("ValueError", "expected %d to %d numbers of code, got %" PRId64, HEADER, MOST_NUMBERS, length);
  for (int i = OF_GIVEN; i < HEADER; i++)
    if (numbers[i] < 0 || numbers[i] > length)
      return refuse("ValueError", "expected 0 to %" PRId64 " in word %d of code, got %" PRId64, length, i, numbers[i]);
  const int64_t given = numbers[OF_GIVEN], views = numbers[OF_VIEWS], launches = numbers[OF_LAUNCHES];
  if (given < 1 || given > MOST_TENSORS)
    return refuse("ValueError", "expected 1 to %d tensors given, got %" PRId64, MOST_TENSORS, given);
  if (launches != count - 1)
    return refuse("ValueError", "expected %" PRId64 " kernels, got %d", launches, (int)count - 1);
  const int64_t dims = numbers[OF_OPERAND_DIMS] + numbers[OF_VIEW_DIMS];
  const int64_t expected = HEADER + 2 * (given - 1) + 1 + launches + 2 * numbers[OF_ARGUMENTS] + 4 * views + 2 * dims;
  if (length != expected)
    return refuse("ValueError", "expected %" PRId64 " numbers of code by its header, got %" PRId64, expected, length);

  Program* p = (Program*)calloc(1, sizeof(*p) + (size_t)length * sizeof(*p->code));
  if (!p) return refuse("MemoryError", "no memory for a program of %" PRId64 " numbers", length);
  memcpy(p->code, numbers, (size_t)length * sizeof(*p->code));
  p->given = (int)given, p->launches = (int)launches;
  /* one more of each, because memory of no bytes may be NULL */
  p->operand = (DLTensor*)calloc((size_t)given, sizeof(*p->operand));
  p->view = (View*)calloc((size_t)views + 1, sizeof(*p->view));
  p->launch = (Launch*)calloc((size_t)launches + 1, sizeof(*p->launch));
  int status = -1;
  if (!p->operand || !p->view || !p->launch)
    refuse("MemoryError", "no memory for a program of %" PRId64 " numbers", length);
  else
    status = read_code(p, args + 1);
  TVMFFIObjectHandle function = NULL;
  if (!status) status = TVMFFIFunctionCreate(p, run, destroy, &function);
  if (status) {
    destroy(p);
    return status;
  }
  result->type_index = kTVMFFIFunction;
  result->v_obj = (TVMFFIObject*)function;
  return 0;
}
