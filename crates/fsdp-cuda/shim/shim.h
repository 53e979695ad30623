// What the Rust side calls: operations and settings of libtorch that its bindings lack.
//
// Every function that can fail returns null, or the text of the exception (to be given to fsdp_torch_free_text). No
// exception leaves this file. Tensors are those of the bindings: pointers to at::Tensor.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
#include <ATen/core/Tensor.h>
using FsdpTensor = at::Tensor;
extern "C" {
#else
typedef struct FsdpTensor FsdpTensor;
#endif

void fsdp_torch_free_text(char* text);

// Whether operations without a deterministic algorithm fail, and others take theirs.
char* fsdp_torch_set_deterministic(bool deterministic);

// Whether fsdp_torch_multiply_halves works on this processor.
bool fsdp_torch_multiplies_halves();

// out = lhs rhs, or out += lhs rhs: lhs and rhs are bf16 matrices on the host with any strides, out a dense f32 one.
char* fsdp_torch_multiply_halves(const FsdpTensor* lhs, const FsdpTensor* rhs, FsdpTensor* out, bool accumulate);

// Loads libtorch's CUDA half, so that devices exist; `library` is a name or a path.
char* fsdp_torch_load_cuda(const char* library);

// Makes a stream that others created the current one of this thread, and its device the current device.
char* fsdp_torch_enter_stream(int32_t device, void* stream);

// Bytes of libtorch's caching allocator on a device: allocated, reserved, and their peaks.
char* fsdp_torch_allocator_bytes(int32_t device, int64_t bytes[4]);

// Forgets the allocator's peaks.
char* fsdp_torch_reset_allocator_peaks(int32_t device);

// Causal attention of a CUDA device without dropout over (batch, heads, positions, elements). `flash` takes 16-bit floats
// and grouped queries; otherwise the memory-efficient kernels run, for as many key heads as query heads.
char* fsdp_torch_attention(bool flash, const FsdpTensor* q, const FsdpTensor* k, const FsdpTensor* v, FsdpTensor* y,
                           FsdpTensor* lse);
char* fsdp_torch_attention_backward(bool flash, const FsdpTensor* dy, const FsdpTensor* q, const FsdpTensor* k,
                                    const FsdpTensor* v, const FsdpTensor* y, const FsdpTensor* lse, FsdpTensor* dq,
                                    FsdpTensor* dk, FsdpTensor* dv);

#ifdef __cplusplus
}
#endif
