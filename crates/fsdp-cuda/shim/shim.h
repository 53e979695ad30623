// The C interface for Rust: operations and settings of libtorch that its Rust bindings lack.
//
// Every function that can fail returns null on success, or the text of the exception, to be freed with
// fsdp_torch_free_text. No exception leaves this file. Tensors are those of the bindings: pointers to at::Tensor.

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

// If set, operations use deterministic algorithms, and those that have none fail.
char* fsdp_torch_set_deterministic(bool deterministic);

// Whether fsdp_torch_multiply_halves is supported on this CPU.
bool fsdp_torch_multiplies_halves();

// out = lhs rhs, or out += lhs rhs if `accumulate`: lhs and rhs are bf16 matrices on the host with any strides, out is
// a dense f32 matrix.
char* fsdp_torch_multiply_halves(const FsdpTensor* lhs, const FsdpTensor* rhs, FsdpTensor* out, bool accumulate);

// Loads libtorch's CUDA half, so that devices exist; `library` is a name or a path.
char* fsdp_torch_load_cuda(const char* library);

// Initializes libtorch's CUDA half; fails if it cannot use the driver and its devices.
char* fsdp_torch_start_cuda();

// Makes a stream created elsewhere the current stream of this thread, and its device the current device.
char* fsdp_torch_enter_stream(int32_t device, void* stream);

// Bytes in libtorch's caching allocator on a device: allocated, reserved, peak allocated, peak reserved.
char* fsdp_torch_allocator_bytes(int32_t device, int64_t bytes[4]);

// Resets the allocator's peaks.
char* fsdp_torch_reset_allocator_peaks(int32_t device);

// Returns unused memory of libtorch's caching allocator to the driver, on all CUDA devices; `had_any` says whether the
// current device had any.
char* fsdp_torch_empty_cache(bool* had_any);

// Registers a callback: before libtorch's allocator asks the driver for more memory, it calls `give_back` with the
// device number, which returns whether it has freed some. Only the first call counts.
char* fsdp_torch_on_memory_wanted(bool (*give_back)(int32_t device));

// Stores in `kernel` the kernel that PyTorch would choose for causal attention without dropout over (batch, heads,
// positions, elements), as its number in at::SDPBackend: 0 only compositions, 1 FlashAttention, 2 the memory-efficient
// kernels, 3 cuDNN's.
char* fsdp_torch_choose_attention(const FsdpTensor* q, const FsdpTensor* k, const FsdpTensor* v, int32_t* kernel);

// Causal attention on a CUDA device with kernel 1, 2 or 3; scores are multiplied by `scale`. The backward pass
// concatenates the gradients of q, k and v into rows of (batch, positions, all heads, elements).
char* fsdp_torch_attention(int32_t kernel, double scale, const FsdpTensor* q, const FsdpTensor* k, const FsdpTensor* v,
                           FsdpTensor* y, FsdpTensor* lse);
char* fsdp_torch_attention_backward(int32_t kernel, double scale, const FsdpTensor* dy, const FsdpTensor* q,
                                    const FsdpTensor* k, const FsdpTensor* v, const FsdpTensor* y, const FsdpTensor* lse,
                                    FsdpTensor* dqkv);

// Concatenates gradients of q, k and v, with any strides, into rows.
char* fsdp_torch_pack_heads(const FsdpTensor* dq, const FsdpTensor* dk, const FsdpTensor* dv, FsdpTensor* dqkv);

#ifdef __cplusplus
}
#endif
