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

// Makes libtorch's CUDA half look for the driver and its devices: fails when it can not use them.
char* fsdp_torch_start_cuda();

// Makes a stream that others created the current one of this thread, and its device the current device.
char* fsdp_torch_enter_stream(int32_t device, void* stream);

// Bytes of libtorch's caching allocator on a device: allocated, reserved, and their peaks.
char* fsdp_torch_allocator_bytes(int32_t device, int64_t bytes[4]);

// Forgets the allocator's peaks.
char* fsdp_torch_reset_allocator_peaks(int32_t device);

// Gives the driver what libtorch's caching allocator keeps of CUDA devices and nobody uses; whether there was anything.
char* fsdp_torch_empty_cache(bool* had_any);

// Before libtorch's allocator asks the driver for more memory, it calls `give_back` with the number of the device, which
// returns whether it has freed some. Only the first call of this function counts.
char* fsdp_torch_on_memory_wanted(bool (*give_back)(int32_t device));

// The kernel that PyTorch would choose for causal attention without dropout over (batch, heads, positions, elements), by
// its number in at::SDPBackend: 0 is none but compositions, 1 FlashAttention, 2 the memory-efficient kernels, 3 cuDNN's.
char* fsdp_torch_choose_attention(const FsdpTensor* q, const FsdpTensor* k, const FsdpTensor* v, int32_t* kernel);

// Causal attention of a CUDA device by kernel 1, 2 or 3, of scores times `scale`. The gradients of q, k and v are put side by side into rows of
// (batch, positions, all heads, elements).
char* fsdp_torch_attention(int32_t kernel, double scale, const FsdpTensor* q, const FsdpTensor* k, const FsdpTensor* v,
                           FsdpTensor* y, FsdpTensor* lse);
char* fsdp_torch_attention_backward(int32_t kernel, double scale, const FsdpTensor* dy, const FsdpTensor* q,
                                    const FsdpTensor* k, const FsdpTensor* v, const FsdpTensor* y, const FsdpTensor* lse,
                                    FsdpTensor* dqkv);

// Puts gradients of q, k and v, wherever they are, side by side into rows.
char* fsdp_torch_pack_heads(const FsdpTensor* dq, const FsdpTensor* dk, const FsdpTensor* dv, FsdpTensor* dqkv);

#ifdef __cplusplus
}
#endif
