// Adafactor over one piece of a segment's shard: whole rows of a matrix, or a run of a parameter without rows, which is
// processed in blocks of a fixed length. T is the type of parameters and state, S the type of the gradient. `factors`
// are scale, clip and a flag: if the flag is 0, nothing is written. `not_finite` is set if parameters or state written
// are not finite; `most` is the largest finite parameter.
//
// Within a row or a block, sums have the same order as on the host. Rows are summed sequentially in groups, and the
// groups in order: that is the host's order for up to ROWS rows, and deterministic beyond.

// Rows, or partial results, that are summed sequentially.
constexpr u64 ROWS = 64;

// Elements of a block.
constexpr u64 BLOCK = 1024;

// Number of squares of parameters that a warp sums.
constexpr u64 SQUARES = 4096;

// Rows of a matrix that a thread block updates.
constexpr u64 TILE_ROWS = 16;

// Calls body(i) for the items 0 .. count, one warp per item; all lanes take part.
template <class Body> __device__ void for_warps(u64 count, Body body) {
    u64 warps = blockDim.x / 32;
    for (u64 i = u64(blockIdx.x) * warps + threadIdx.x / 32; i < count; i += u64(gridDim.x) * warps) body(i);
}

// Sums term(i) over first .. last within a warp: lane l adds the terms l, l + 32, ..., and the lanes are combined in
// pairs. The result is in lane 0.
template <class Term> __device__ double warp_sum(u64 first, u64 last, Term term) {
    double sum = 0.0;
    for (u64 i = first + threadIdx.x % 32; i < last; i += 32) sum += term(i);
    return warp_reduce(sum, Add());
}

// Adds value(0) .. value(count - 1) to a sum. One block.
template <class Value> __device__ void add_in_order(u64 count, double* to, Value value) {
    __shared__ double groups[256];
    double sum = 0.0;
    for (u64 first = 0; first < count; first += ROWS * blockDim.x) {
        u64 start = first + ROWS * threadIdx.x;
        double group = 0.0;
        for (u64 i = start; i < start + ROWS && i < count; i++) group += value(i);
        groups[threadIdx.x] = group;
        __syncthreads();
        for (u32 i = 0; threadIdx.x == 0 && i < blockDim.x && first + ROWS * i < count; i++) sum += groups[i];
        __syncthreads();
    }
    if (threadIdx.x == 0) *to += sum;
}

extern "C" __global__ void add_partial(
    const double* __restrict__ partial, u64 count, double* __restrict__ to, const double* __restrict__ factors
) {
    if (factors[2] == 0.0) return;
    add_in_order(count, to, [&](u64 i) { return partial[i]; });
}

// Partial sums of squares of parameters.
extern "C" __global__ void parameter_squares(
    const T* __restrict__ params, double* __restrict__ partial, u64 len, const double* __restrict__ factors
) {
    if (factors[2] == 0.0) return;
    for_warps((len + SQUARES - 1) / SQUARES, [&](u64 i) {
        u64 last = (i + 1) * SQUARES < len ? (i + 1) * SQUARES : len;
        double sum = warp_sum(i * SQUARES, last, [&](u64 at) { return double(params[at]) * double(params[at]); });
        if (threadIdx.x % 32 == 0) partial[i] = sum;
    });
}

// Advances the full second moment of a parameter without rows.
extern "C" __global__ void advance_full(
    const S* __restrict__ gradient, T* __restrict__ full, u64 len, const double* __restrict__ factors, i64* not_finite,
    T most, T beta2, T eps
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]), rest = T(1) - beta2;
    Written<T> written(most);
    for_elements<W>(len, aligned<W>(gradient) && aligned<W>(full), [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto moment = load<w>(full + i);
        for (int k = 0; k < w; k++) {
            T g = scaled(slopes.at[k], scale, clip);
            moment.at[k] = moment.at[k] * beta2 + rest * (g * g + eps);
            written.state(moment.at[k]);
        }
        store<w>(full + i, moment);
    });
    written.end(not_finite);
}

// Advances the means of rows.
extern "C" __global__ void advance_rows(
    const S* __restrict__ gradient, T* __restrict__ means, u64 width, u64 rows, const double* __restrict__ factors,
    i64* not_finite, T most, T beta2, T eps
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]), rest = T(1) - beta2;
    Written<T> written(most);
    for_warps(rows, [&](u64 row) {
        double sum = warp_sum(row * width, (row + 1) * width, [&](u64 i) {
            T g = scaled(gradient[i], scale, clip);
            return double(g * g + eps);
        });
        if (threadIdx.x % 32 == 0) {
            T mean = means[row] * beta2 + rest * T(sum / double(width));
            means[row] = mean;
            written.state(mean);
        }
    });
    written.end(not_finite);
}

extern "C" __global__ void add_rows(
    const T* __restrict__ means, u64 rows, double* __restrict__ to, const double* __restrict__ factors
) {
    if (factors[2] == 0.0) return;
    add_in_order(rows, to, [&](u64 row) { return double(means[row]); });
}

// Sums columns over groups of rows: one partial vector per group.
extern "C" __global__ void column_squares(
    const S* __restrict__ gradient, double* __restrict__ partial, u64 width, u64 rows,
    const double* __restrict__ factors, T eps
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    u64 stride = u64(gridDim.x) * blockDim.x;
    for (u64 group = blockIdx.y; group * ROWS < rows; group += gridDim.y) {
        u64 last = (group + 1) * ROWS < rows ? (group + 1) * ROWS : rows;
        for (u64 col = u64(blockIdx.x) * blockDim.x + threadIdx.x; col < width; col += stride) {
            double sum = 0.0;
            for (u64 row = group * ROWS; row < last; row++) {
                T g = scaled(gradient[row * width + col], scale, clip);
                sum += double(g * g + eps);
            }
            partial[group * width + col] = sum;
        }
    }
}

extern "C" __global__ void add_columns(
    const double* __restrict__ partial, double* __restrict__ to, u64 width, u64 groups,
    const double* __restrict__ factors
) {
    if (factors[2] == 0.0) return;
    u64 stride = u64(gridDim.x) * blockDim.x;
    for (u64 col = u64(blockIdx.x) * blockDim.x + threadIdx.x; col < width; col += stride) {
        double sum = 0.0;
        for (u64 group = 0; group < groups; group++) sum += partial[group * width + col];
        to[col] += sum;
    }
}

// Advances the means of columns, from their sums over all `rows` of the parameter. `roots` gets their reciprocal square
// roots, by which the gradient is multiplied.
extern "C" __global__ void advance_columns(
    T* __restrict__ means, T* __restrict__ roots, u64 width, const double* __restrict__ sums, double rows,
    const double* __restrict__ factors, i64* not_finite, T most, T beta2
) {
    if (factors[2] == 0.0) return;
    T rest = T(1) - beta2;
    Written<T> written(most);
    u64 stride = u64(gridDim.x) * blockDim.x;
    for (u64 col = u64(blockIdx.x) * blockDim.x + threadIdx.x; col < width; col += stride) {
        T mean = means[col] * beta2 + rest * T(sums[col] / rows);
        means[col] = mean;
        written.state(mean);
        roots[col] = T(1) / square_root(mean);
    }
    written.end(not_finite);
}

// Sums of squares of the update of each row. `sum_of_rows` is the sum of the row means over all `count` rows of the
// parameter.
extern "C" __global__ void row_updates(
    const S* __restrict__ gradient, double* __restrict__ partial, u64 width, u64 rows, const T* __restrict__ means,
    const T* __restrict__ roots, const double* __restrict__ sum_of_rows, double count, const double* __restrict__ factors
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]), mean = T(*sum_of_rows / count);
    for_warps(rows, [&](u64 row) {
        T root = T(1) / square_root(means[row] / mean);
        double sum = warp_sum(0, width, [&](u64 col) {
            T u = scaled(gradient[row * width + col], scale, clip) * (root * roots[col]);
            return double(u) * double(u);
        });
        if (threadIdx.x % 32 == 0) partial[row] = sum;
    });
}

// The same for blocks of a parameter without rows.
extern "C" __global__ void block_updates(
    const S* __restrict__ gradient, double* __restrict__ partial, u64 len, const T* __restrict__ full,
    const double* __restrict__ factors
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    for_warps((len + BLOCK - 1) / BLOCK, [&](u64 i) {
        u64 last = (i + 1) * BLOCK < len ? (i + 1) * BLOCK : len;
        double sum = warp_sum(i * BLOCK, last, [&](u64 at) {
            T u = scaled(gradient[at], scale, clip) / square_root(full[at]);
            return double(u) * double(u);
        });
        if (threadIdx.x % 32 == 0) partial[i] = sum;
    });
}

// Factors that turn the direction of an update into the step.
struct Step {
    T rate, keep, clip, beta1;
};

// `squares` and `norm` are the sums of squares of a parameter of `len` elements and of its update. The learning rate is
// multiplied by the root mean square of the parameter unless `least_rms` is negative.
__device__ Step step_of(
    double squares, double norm, double len, double rate, double least_rms, double decay, double threshold, T beta1
) {
    double rms = sqrt(squares / len);
    if (least_rms >= 0.0) rate *= rms > least_rms ? rms : least_rms;
    double excess = sqrt(norm / len) / threshold;
    return Step{T(rate), T(1.0 - decay * rate), T(excess > 1.0 ? excess : 1.0), beta1};
}

// Updates parameters at i. `average` is the running mean of their updates, or null.
template <int w> __device__ void apply(
    const Step& step, const Vector<T, w>& directions, T* params, T* average, bf16* copy, u64 i, Written<T>& written
) {
    auto p = load<w>(params + i);
    Vector<T, w> updates;
    for (int k = 0; k < w; k++) updates.at[k] = directions.at[k] / step.clip * step.rate;
    if (average != nullptr) {
        auto means = load<w>(average + i);
        for (int k = 0; k < w; k++) means.at[k] = means.at[k] * step.beta1 + (T(1) - step.beta1) * updates.at[k];
        store<w>(average + i, means);
        updates = means;
    }
    for (int k = 0; k < w; k++) p.at[k] = p.at[k] * step.keep - updates.at[k];
    // A non-finite mean leaves no parameter finite.
    for (int k = 0; k < w; k++) written.param(p.at[k]);
    store<w>(params + i, p);
    copy_to<w>(copy, i, p);
}

// The update of rows. `moments` are the sums of phase 0: the sum of squares of the parameter, and the sum of the row
// means.
extern "C" __global__ void factored_update(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ average, bf16* __restrict__ copy, u64 width,
    u64 rows, const T* __restrict__ row_means, const T* __restrict__ col_means, const double* __restrict__ moments,
    const double* __restrict__ norm, double count, double len, const double* __restrict__ factors,
    i64* not_finite, T most, double rate, double least_rms, double decay, double threshold, T beta1
) {
    if (factors[2] == 0.0) return;
    __shared__ T roots[TILE_ROWS];
    Written<T> written(most);
    Step step = step_of(moments[0], *norm, len, rate, least_rms, decay, threshold, beta1);
    T scale = T(factors[0]), clip = T(factors[1]), mean = T(moments[1] / count);
    bool vectors = width % W == 0 && aligned<W>(gradient) && aligned<W>(params) && aligned<W>(average) &&
        aligned<W>(copy) && aligned<W>(col_means);
    for (u64 tile = blockIdx.y; tile * TILE_ROWS < rows; tile += gridDim.y) {
        u64 first = tile * TILE_ROWS, left = rows - first, there = left < TILE_ROWS ? left : TILE_ROWS;
        __syncthreads();
        if (threadIdx.x < there) roots[threadIdx.x] = T(1) / square_root(row_means[first + threadIdx.x] / mean);
        __syncthreads();
        for_elements<W>(width, vectors, [&](auto wide, u64 col) {
            constexpr int w = decltype(wide)::width;
            auto cols = load<w>(col_means + col);
            for (int k = 0; k < w; k++) cols.at[k] = T(1) / square_root(cols.at[k]);
            for (u64 row = 0; row < there; row++) {
                u64 i = (first + row) * width + col;
                auto slopes = load<w>(gradient + i);
                Vector<T, w> directions;
                for (int k = 0; k < w; k++) {
                    directions.at[k] = scaled(slopes.at[k], scale, clip) * (roots[row] * cols.at[k]);
                }
                apply<w>(step, directions, params, average, copy, i, written);
            }
        });
    }
    written.end(not_finite);
}

// The update of a parameter without rows. `squares` is the sum of phase 0.
extern "C" __global__ void full_update(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ average, bf16* __restrict__ copy,
    u64 piece_len, const T* __restrict__ full, const double* __restrict__ squares, const double* __restrict__ norm,
    double len, const double* __restrict__ factors, i64* not_finite, T most, double rate, double least_rms, double decay,
    double threshold, T beta1
) {
    if (factors[2] == 0.0) return;
    Written<T> written(most);
    Step step = step_of(*squares, *norm, len, rate, least_rms, decay, threshold, beta1);
    T scale = T(factors[0]), clip = T(factors[1]);
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(average) && aligned<W>(copy) &&
        aligned<W>(full);
    for_elements<W>(piece_len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto moments = load<w>(full + i);
        Vector<T, w> directions;
        for (int k = 0; k < w; k++) {
            directions.at[k] = scaled(slopes.at[k], scale, clip) / square_root(moments.at[k]);
        }
        apply<w>(step, directions, params, average, copy, i, written);
    });
    written.end(not_finite);
}
