// Update rules over runs of a segment's shard, operation by operation as on the host. T is the type of parameters and
// state, S the type of the gradient. `factors` are scale, clip and a flag: if the flag is 0, nothing is written. The
// low-precision copy of the parameters, if there is one, is written in the same pass. `not_finite` is set if anything
// written is not finite; `most` is the largest finite parameter.

// AdamW for one element: a parameter and its moments.
struct AdamW {
    T keep, weight, rest;
    bool by_end;
    T beta2, square_weight, root_correction, eps, step_size;

    __device__ void step(T g, T& param, T& mean, T& square) const {
        T average = by_end ? g - (g - mean) * rest : mean + weight * (g - mean);
        T variance = square * beta2 + square_weight * g * g;
        T denominator = square_root(variance) / root_correction + eps;
        param = param * keep + step_size * average / denominator;
        mean = average;
        square = variance;
    }
};

extern "C" __global__ void adamw(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ means, T* __restrict__ squares,
    bf16* __restrict__ copy, u64 len, const double* __restrict__ factors,
    i64* not_finite, T most, T keep, T weight, u32 by_end, T beta2, T square_weight, T root_correction, T eps, T step_size
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    AdamW rule{keep, weight, T(1) - weight, by_end != 0, beta2, square_weight, root_correction, eps, step_size};
    bool vectors =
        aligned<W>(gradient) && aligned<W>(params) && aligned<W>(means) && aligned<W>(squares) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        auto m = load<w>(means + i);
        auto v = load<w>(squares + i);
        for (int k = 0; k < w; k++) {
            rule.step(scaled(slopes.at[k], scale, clip), p.at[k], m.at[k], v.at[k]);
            // A non-finite average leaves no parameter finite; a non-finite variance may.
            written.param(p.at[k]);
            written.state(v.at[k]);
        }
        store<w>(params + i, p);
        copy_to<w>(copy, i, p);
        store<w>(means + i, m);
        store<w>(squares + i, v);
    });
    written.end(not_finite);
}

// Elements per block of 8-bit moments, and threads per block of the AdamW kernel for them.
constexpr u64 CODED = 256;

// A code book: the values of 256 codes, and the lower bound of each next code.
struct Book {
    const float* values;
    const float* bounds;

    __device__ u8 code(float number) const {
        u32 code = 0;
        for (u32 step = 128; step > 0; step /= 2) code += number >= bounds[code + step - 1] ? step : 0;
        return u8(code);
    }
};

// Encodes one value per thread, for the first `len` threads of a block, and stores their largest magnitude.
__device__ inline void encode(Book book, T value, u64 len, u8* code, T* largest) {
    bool mine = threadIdx.x < len;
    T magnitude = value < T(0) ? -value : value;
    T most = block_reduce(mine ? magnitude : T(0), T(0), Larger());
    if (mine) *code = book.code(float(value / (most > T(0) ? most : T(1))));
    if (threadIdx.x == 0) *largest = most;
}

// AdamW with moments stored as codes and, for every block of a row, their largest magnitude. `books` are values and
// bounds for the first moments, then for the second moments.
extern "C" __global__ void adamw_8bit(
    const S* __restrict__ gradient, T* __restrict__ params, u8* __restrict__ means, u8* __restrict__ squares,
    T* __restrict__ largest_means, T* __restrict__ largest_squares, bf16* __restrict__ copy, u64 rows, u64 width,
    const float* __restrict__ books, const double* __restrict__ factors, i64* not_finite, T most, T keep, T weight,
    u32 by_end, T beta2, T square_weight, T root_correction, T eps, T step_size
) {
    if (factors[2] == 0.0) return;
    __shared__ float table[4 * CODED];
    for (u64 i = threadIdx.x; i < 4 * CODED; i += blockDim.x) table[i] = books[i];
    __syncthreads();
    Book mean_book{table, table + CODED}, square_book{table + 2 * CODED, table + 3 * CODED};
    T scale = T(factors[0]), clip = T(factors[1]);
    AdamW rule{keep, weight, T(1) - weight, by_end != 0, beta2, square_weight, root_correction, eps, step_size};
    Written<T> written(most);
    u64 blocks = (width + CODED - 1) / CODED;
    for (u64 block = blockIdx.x; block < rows * blocks; block += gridDim.x) {
        u64 start = block % blocks * CODED;
        u64 len = width - start < CODED ? width - start : CODED;
        u64 i = block / blocks * width + start + threadIdx.x;
        T mean = T(0), square = T(0);
        if (threadIdx.x < len) {
            Vector<T, 1> p = load<1>(params + i);
            mean = T(mean_book.values[means[i]]) * largest_means[block];
            square = T(square_book.values[squares[i]]) * largest_squares[block];
            rule.step(scaled(gradient[i], scale, clip), p.at[0], mean, square);
            written.param(p.at[0]);
            written.state(square);
            store<1>(params + i, p);
            copy_to<1>(copy, i, p);
        }
        // Both calls synchronize before they replace the magnitudes, which all threads have read.
        encode(mean_book, mean, len, means + i, largest_means + block);
        encode(square_book, square, len, squares + i, largest_squares + block);
    }
    written.end(not_finite);
}

extern "C" __global__ void sgd(
    const S* __restrict__ gradient, T* __restrict__ params, bf16* __restrict__ copy, u64 len,
    const double* __restrict__ factors, i64* not_finite, T most, T decay, T lr
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        for (int k = 0; k < w; k++) {
            p.at[k] += -lr * (scaled(slopes.at[k], scale, clip) + decay * p.at[k]);
            written.param(p.at[k]);
        }
        store<w>(params + i, p);
        copy_to<w>(copy, i, p);
    });
    written.end(not_finite);
}

extern "C" __global__ void sgd_momentum(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ buffer, bf16* __restrict__ copy, u64 len,
    const double* __restrict__ factors, i64* not_finite, T most, T decay, T lr, T momentum, T undamped, u32 nesterov,
    u32 first
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(buffer) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        auto b = load<w>(buffer + i);
        for (int k = 0; k < w; k++) {
            T g = scaled(slopes.at[k], scale, clip) + decay * p.at[k];
            T average = first ? g : b.at[k] * momentum + undamped * g;
            T direction = nesterov ? g + momentum * average : average;
            b.at[k] = average;
            p.at[k] += -lr * direction;
            // A non-finite momentum leaves no parameter finite.
            written.param(p.at[k]);
        }
        store<w>(params + i, p);
        store<w>(buffer + i, b);
        copy_to<w>(copy, i, p);
    });
    written.end(not_finite);
}

extern "C" __global__ void lion(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ averages, bf16* __restrict__ copy, u64 len,
    const double* __restrict__ factors, i64* not_finite, T most, T keep, T old, T fresh, T kept, T added, T step_size
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(averages) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        auto m = load<w>(averages + i);
        for (int k = 0; k < w; k++) {
            T g = scaled(slopes.at[k], scale, clip);
            T direction = m.at[k] * old + fresh * g;
            T up = direction > T(0) ? step_size : T(0);
            T down = direction < T(0) ? step_size : T(0);
            p.at[k] = p.at[k] * keep + (up - down);
            m.at[k] = m.at[k] * kept + added * g;
            // The sign is always finite; the average reveals non-finite gradients.
            written.param(p.at[k]);
            written.state(m.at[k]);
        }
        store<w>(params + i, p);
        copy_to<w>(copy, i, p);
        store<w>(averages + i, m);
    });
    written.end(not_finite);
}

// An exponential moving average of the parameters, which are only read.
extern "C" __global__ void ema(
    const T* __restrict__ params, T* __restrict__ averages, u64 len, const double* __restrict__ factors,
    i64* not_finite, T most, T weight
) {
    if (factors[2] == 0.0) return;
    Written<T> written(most);
    T rest = T(1) - weight;
    bool by_end = weight >= T(0.5);
    bool vectors = aligned<W>(params) && aligned<W>(averages);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto p = load<w>(params + i);
        auto average = load<w>(averages + i);
        for (int k = 0; k < w; k++) {
            T away = p.at[k] - average.at[k];
            average.at[k] = by_end ? p.at[k] - away * rest : average.at[k] + weight * away;
            written.state(average.at[k]);
        }
        store<w>(averages + i, average);
    });
    written.end(not_finite);
}
