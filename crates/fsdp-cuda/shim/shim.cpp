#include "shim.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/SDPBackend.h>
#include <ATen/ops/_fused_sdp_choice_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_ops.h>
#include <ATen/ops/cat_ops.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Registry.h>

namespace c10 {

// Copied from c10/cuda/CUDACachingAllocator.h, which cannot be included without CUDA's own headers.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

}  // namespace c10

namespace {

char* text_of(const char* text) {
  char* copy = strdup(text);
  // Out of memory: the failure must not look like success.
  if (copy == nullptr) std::abort();
  return copy;
}

// Runs `body`; returns the text of its exception, or null.
template <typename Body>
char* caught(Body&& body) {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return text_of(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return text_of(error.what());
  } catch (...) {
    return text_of("an exception without a text");
  }
}

// ---- Products of bf16 matrices into f32 -------------------------------------------------------------------------------

// Columns of the right matrix, rows of the left one, and length of the dot products per kernel call.
constexpr int64_t BLOCK_COLUMNS = 64;
constexpr int64_t BLOCK_ROWS = 64;
constexpr int64_t BLOCK_DEPTH = 512;

struct Halves {
  const at::BFloat16* data;
  int64_t rows, columns, row_stride, column_stride;

  explicit Halves(const at::Tensor& matrix)
      : data(matrix.const_data_ptr<at::BFloat16>()),
        rows(matrix.size(0)),
        columns(matrix.size(1)),
        row_stride(matrix.stride(0)),
        column_stride(matrix.stride(1)) {}
};

// Packs columns `first ..` of `rhs` as the kernels expect them: pairs of rows interleaved, an odd last row paired with
// zeros.
void pack_columns(const Halves& rhs, int64_t first, int64_t columns, at::BFloat16* packed) {
  for (int64_t k = 0; k < rhs.rows; k += 2) {
    const at::BFloat16* even = rhs.data + k * rhs.row_stride + first * rhs.column_stride;
    const at::BFloat16* odd = even + rhs.row_stride;
    at::BFloat16* to = packed + k * columns;
    if (k + 1 == rhs.rows) {
      for (int64_t n = 0; n < columns; n++) {
        to[2 * n] = even[n * rhs.column_stride];
        to[2 * n + 1] = at::BFloat16(0);
      }
    } else if (rhs.column_stride == 1) {
      for (int64_t n = 0; n < columns; n++) {
        to[2 * n] = even[n];
        to[2 * n + 1] = odd[n];
      }
    } else {
      for (int64_t n = 0; n < columns; n++) {
        to[2 * n] = even[n * rhs.column_stride];
        to[2 * n + 1] = odd[n * rhs.column_stride];
      }
    }
  }
}

// Copies rows `first ..` of `lhs` densely, `depth` elements apart. Works in tiles, so that columns far apart in memory
// are read from the cache.
void copy_rows(const Halves& lhs, int64_t first, int64_t rows, int64_t depth, at::BFloat16* copy) {
  constexpr int64_t TILE = 32;
  for (int64_t k0 = 0; k0 < lhs.columns; k0 += TILE) {
    const int64_t k1 = std::min(k0 + TILE, lhs.columns);
    for (int64_t m = 0; m < rows; m++) {
      const at::BFloat16* from = lhs.data + (first + m) * lhs.row_stride;
      for (int64_t k = k0; k < k1; k++) copy[m * depth + k] = from[k * lhs.column_stride];
    }
  }
  for (int64_t m = 0; m < rows && lhs.columns < depth; m++) copy[m * depth + lhs.columns] = at::BFloat16(0);
}

void multiply_halves(const at::Tensor& left, const at::Tensor& right, at::Tensor& out, bool accumulate) {
  TORCH_CHECK(left.scalar_type() == at::kBFloat16 && right.scalar_type() == at::kBFloat16 &&
                  out.scalar_type() == at::kFloat && out.is_contiguous() && left.size(1) == right.size(0) &&
                  out.size(0) == left.size(0) && out.size(1) == right.size(1),
              "matrices that do not fit a product of bf16 into f32");
  const Halves lhs(left), rhs(right);
  // An even depth: the kernels take elements in pairs.
  const int64_t rows = lhs.rows, columns = rhs.columns, depth = (lhs.columns + 1) / 2 * 2;
  const int64_t row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
  const int64_t column_blocks = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
  // Kept per thread: a fresh allocation of this size would be mapped and its pages cleared every time.
  thread_local std::vector<at::BFloat16> packed, dense;
  if (packed.size() < size_t(depth * columns)) packed.resize(depth * columns);
  const bool is_dense = lhs.column_stride == 1 && depth == lhs.columns;
  if (!is_dense && dense.size() < size_t(depth * rows)) dense.resize(depth * rows);
  at::BFloat16 *const to_packed = packed.data(), *const to_dense = dense.data();
  at::parallel_for(0, column_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
      const int64_t first = block * BLOCK_COLUMNS;
      pack_columns(rhs, first, std::min(BLOCK_COLUMNS, columns - first), to_packed + first * depth);
    }
  });
  if (!is_dense) {
    at::parallel_for(0, row_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block++) {
        const int64_t first = block * BLOCK_ROWS;
        copy_rows(lhs, first, std::min(BLOCK_ROWS, rows - first), depth, to_dense + first * depth);
      }
    });
  }
  const at::BFloat16* const from_dense = is_dense ? lhs.data : to_dense;
  const int64_t stride = is_dense ? lhs.row_stride : depth;
  float* const result = out.data_ptr<float>();
  at::parallel_for(0, row_blocks * column_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
      const int64_t m = block / column_blocks * BLOCK_ROWS, n = block % column_blocks * BLOCK_COLUMNS;
      const int64_t height = std::min(BLOCK_ROWS, rows - m), width = std::min(BLOCK_COLUMNS, columns - n);
      for (int64_t k = 0; k < depth; k += BLOCK_DEPTH) {
        at::native::cpublas::brgemm(height, width, std::min(BLOCK_DEPTH, depth - k), stride, width, columns,
                                    accumulate || k > 0, from_dense + m * stride + k,
                                    to_packed + n * depth + k * width, result + m * columns + n);
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

// The kernels cannot be queried for support, so this tries one product.
bool multiplies_halves() {
  try {
    const at::Tensor half = at::ones({2, 2}, at::kBFloat16);
    at::Tensor out = at::empty({2, 2}, at::kFloat);
    multiply_halves(half, half, out, false);
    return out.eq(2).all().item<bool>();
  } catch (...) {
    return false;
  }
}

// ---- Memory of CUDA devices --------------------------------------------------------------------------------------------

using Callbacks = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;

// c10::FreeCudaMemoryCallbacksRegistry of libtorch's CUDA half, which is loaded, not linked.
constexpr const char* CALLBACKS = "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev";

class GiveBack : public c10::FreeMemoryCallback {
 public:
  explicit GiveBack(bool (*give_back)(int32_t)) : give_back_(give_back) {}

  bool Execute() override {
    return give_back_(c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index());
  }

 private:
  bool (*give_back_)(int32_t);
};

// ---- Attention ---------------------------------------------------------------------------------------------------------

// Attention kernels are identified by the numbers of at::SDPBackend, on both sides of this interface.
static_assert(int(at::SDPBackend::flash_attention) == 1 && int(at::SDPBackend::efficient_attention) == 2 &&
              int(at::SDPBackend::cudnn_attention) == 3);

// Concatenates (batch, heads, positions, elements) into rows of (batch, positions, all heads, elements). For packed
// operands, kernels return the parts already in the memory order of such rows, so a single kernel copies all of them
// with wide loads, where separate copies would go element by element. If key heads were repeated for the query heads
// that read them, the gradient of a key head is the sum over its repetitions.
void pack_heads(const std::array<at::Tensor, 3>& parts, at::Tensor& rows) {
  const int64_t kv_heads = (rows.size(2) - parts[0].size(1)) / 2;
  const auto summed = [&](const at::Tensor& part) {
    return part.size(1) == kv_heads ? part : part.unflatten(1, {kv_heads, -1}).sum(2);
  };
  const std::array<at::Tensor, 3> columns = {parts[0].transpose(1, 2), summed(parts[1]).transpose(1, 2),
                                             summed(parts[2]).transpose(1, 2)};
  at::_ops::cat_out::call(at::TensorList(columns), 2, rows);
}

}  // namespace

extern "C" {

void fsdp_torch_free_text(char* text) { std::free(text); }

char* fsdp_torch_set_deterministic(bool deterministic) {
  return caught([&] {
    at::globalContext().setDeterministicAlgorithms(deterministic, /*warn_only=*/false);
    at::globalContext().setDeterministicCuDNN(deterministic);
    // Reads of uninitialized memory are found by the memory tests; filling it here would only cost time.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  });
}

bool fsdp_torch_multiplies_halves() {
  static const bool supported = multiplies_halves();
  return supported;
}

char* fsdp_torch_multiply_halves(const FsdpTensor* lhs, const FsdpTensor* rhs, FsdpTensor* out, bool accumulate) {
  return caught([&] { multiply_halves(*lhs, *rhs, *out, accumulate); });
}

char* fsdp_torch_load_cuda(const char* library) {
  return caught([&] {
    if (dlopen(library, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
  });
}

char* fsdp_torch_start_cuda() {
  return caught([&] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); });
}

char* fsdp_torch_enter_stream(int32_t device, void* stream) {
  return caught([&] {
    const c10::Device on(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    const c10::impl::VirtualGuardImpl guard(on.type());
    guard.setDevice(on);
    // The id of a stream that libtorch did not create is its handle.
    guard.exchangeStream(c10::Stream(c10::Stream::UNSAFE, on, reinterpret_cast<c10::StreamId>(stream)));
  });
}

char* fsdp_torch_allocator_bytes(int32_t device, int64_t bytes[4]) {
  return caught([&] {
    const auto stats = c10::getDeviceAllocator(c10::DeviceType::CUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto& allocated = stats.allocated_bytes[0];
    const auto& reserved = stats.reserved_bytes[0];
    bytes[0] = allocated.current;
    bytes[1] = reserved.current;
    bytes[2] = allocated.peak;
    bytes[3] = reserved.peak;
  });
}

char* fsdp_torch_reset_allocator_peaks(int32_t device) {
  return caught(
      [&] { c10::getDeviceAllocator(c10::DeviceType::CUDA)->resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
}

char* fsdp_torch_empty_cache(bool* had_any) {
  return caught([&] {
    auto* const allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
    const auto reserved = [&] {
      const c10::DeviceIndex device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice().index();
      return allocator->getDeviceStats(device).reserved_bytes[0].current;
    };
    const int64_t before = reserved();
    allocator->emptyCache();
    *had_any = reserved() < before;
  });
}

char* fsdp_torch_on_memory_wanted(bool (*give_back)(int32_t device)) {
  return caught([&] {
    auto* const callbacks = reinterpret_cast<Callbacks* (*)()>(dlsym(RTLD_DEFAULT, CALLBACKS));
    if (callbacks == nullptr) throw std::runtime_error("libtorch's CUDA half has no list of callbacks for full devices");
    static std::once_flag once;
    std::call_once(once, [&] {
      callbacks()->Register("fsdp", [give_back] { return std::make_unique<GiveBack>(give_back); });
    });
  });
}

char* fsdp_torch_choose_attention(const FsdpTensor* q, const FsdpTensor* k, const FsdpTensor* v, int32_t* kernel) {
  return caught([&] {
    const bool grouped = q->size(1) != k->size(1);
    const auto choose = [&] {
      const int64_t chosen =
          at::_ops::_fused_sdp_choice::call(*q, *k, *v, std::nullopt, 0.0, /*is_causal=*/true, std::nullopt, grouped);
      *kernel = static_cast<int32_t>(chosen);
    };
    // The first choice for a CUDA device sets libtorch's process-wide order of kernels, without a lock.
    static std::once_flag ordered;
    if (q->is_cuda()) std::call_once(ordered, choose);
    choose();
  });
}

char* fsdp_torch_attention(int32_t kernel, double scale, const FsdpTensor* q, const FsdpTensor* k, const FsdpTensor* v,
                           FsdpTensor* y, FsdpTensor* lse) {
  return caught([&] {
    switch (static_cast<at::SDPBackend>(kernel)) {
      case at::SDPBackend::cudnn_attention: {
        const auto found = at::_ops::_scaled_dot_product_cudnn_attention::call(
            *q, *k, *v, std::nullopt, /*compute_log_sumexp=*/true, 0.0, /*is_causal=*/true, false, scale);
        y->copy_(std::get<0>(found));
        // (batch, heads, positions, 1)
        lse->copy_(std::get<1>(found).reshape(lse->sizes()));
        return;
      }
      case at::SDPBackend::flash_attention: {
        const auto found = at::_ops::_scaled_dot_product_flash_attention::call(*q, *k, *v, 0.0, /*is_causal=*/true, false,
                                                                               scale);
        y->copy_(std::get<0>(found));
        lse->copy_(std::get<1>(found));
        return;
      }
      case at::SDPBackend::efficient_attention: {
        const auto found = at::_ops::_scaled_dot_product_efficient_attention::call(
            *q, *k, *v, std::nullopt, /*compute_log_sumexp=*/true, 0.0, /*is_causal=*/true, scale);
        y->copy_(std::get<0>(found));
        // The kernel pads the positions.
        lse->copy_(std::get<1>(found).narrow(2, 0, lse->size(2)));
        return;
      }
      default:
        throw std::runtime_error("no such attention kernel");
    }
  });
}

char* fsdp_torch_attention_backward(int32_t kernel, double scale, const FsdpTensor* dy, const FsdpTensor* q,
                                    const FsdpTensor* k, const FsdpTensor* v, const FsdpTensor* y, const FsdpTensor* lse,
                                    FsdpTensor* dqkv) {
  return caught([&] {
    const int64_t positions = q->size(2);
    const at::Tensor none;
    // Without dropout, the generator state is not read.
    const auto unread = [&](at::IntArrayRef sizes, at::ScalarType type) {
      return at::empty(sizes, q->options().dtype(type));
    };
    at::Tensor dq, dk, dv;
    switch (static_cast<at::SDPBackend>(kernel)) {
      case at::SDPBackend::cudnn_attention: {
        const at::Tensor seed = unread({}, at::kLong);
        std::tie(dq, dk, dv) = at::_ops::_scaled_dot_product_cudnn_attention_backward::call(
            *dy, *q, *k, *v, *y, lse->unsqueeze(-1), seed, seed, none, none, none, positions, positions, 0.0,
            /*is_causal=*/true, scale);
        break;
      }
      case at::SDPBackend::flash_attention: {
        const at::Tensor seed = unread({2}, at::kUInt64);
        std::tie(dq, dk, dv) = at::_ops::_scaled_dot_product_flash_attention_backward::call(
            *dy, *q, *k, *v, *y, *lse, none, none, positions, positions, 0.0, /*is_causal=*/true, seed, seed,
            scale);
        break;
      }
      case at::SDPBackend::efficient_attention: {
        const int64_t padded = (positions + 31) / 32 * 32;
        at::Tensor sums =
            at::full({q->size(0), q->size(1), padded}, std::numeric_limits<float>::infinity(), lse->options());
        sums.narrow(2, 0, positions).copy_(*lse);
        const at::Tensor seed = unread({}, at::kLong);
        std::tie(dq, dk, dv, std::ignore) = at::_ops::_scaled_dot_product_efficient_attention_backward::call(
            *dy, *q, *k, *v, none, *y, sums, seed, seed, 0.0, std::array<bool, 4>{true, true, true, false},
            /*is_causal=*/true, scale);
        break;
      }
      default:
        throw std::runtime_error("no such attention kernel");
    }
    pack_heads({dq, dk, dv}, *dqkv);
  });
}

char* fsdp_torch_pack_heads(const FsdpTensor* dq, const FsdpTensor* dk, const FsdpTensor* dv, FsdpTensor* dqkv) {
  return caught([&] { pack_heads({*dq, *dk, *dv}, *dqkv); });
}

}  // extern "C"
