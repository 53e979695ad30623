// Norms over rows, one block per row. Weight gradients are column sums over fixed blocks of rows, which `combine` adds
// in order, so no floats are added atomically.

// Rows whose column sums form one partial result; as on the host.
constexpr u64 PARTIAL_ROWS = 128;

// Columns per thread.
constexpr int COLUMNS = 4;

__device__ bool whole_vectors(u64 width, const T* a, const T* b, const T* c) {
    return width % WIDTH == 0 && aligned<WIDTH>(a) && aligned<WIDTH>(b) && aligned<WIDTH>(c);
}

extern "C" __launch_bounds__(1024) __global__ void rms_norm(
    const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, A* __restrict__ rstd,
    u64 width, u64 rows, A eps, A offset
) {
    bool vectors = whole_vectors(width, x, weight, y);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = x + row * width;
        T* to = y + row * width;
        A squares = 0;
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(from + i);
            for (int k = 0; k < w; k++) squares += widen(in.at[k]) * widen(in.at[k]);
        });
        squares = block_reduce(squares, A(0), Add());
        A scale = A(1) / square_root(squares / A(width) + eps);
        if (threadIdx.x == 0) rstd[row] = scale;
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(from + i);
            auto scales = load<w>(weight + i);
            Vector<T, w> out;
            for (int k = 0; k < w; k++) {
                out.at[k] = narrow<T>(widen(in.at[k]) * scale * (widen(scales.at[k]) + offset));
            }
            store<w>(to + i, out);
        });
    }
}

extern "C" __launch_bounds__(1024) __global__ void rms_norm_backward(
    const T* __restrict__ x, const T* __restrict__ weight, const A* __restrict__ rstd, const T* __restrict__ dy,
    T* __restrict__ dx, u64 width, u64 rows, A offset, u32 add
) {
    bool vectors = whole_vectors(width, x, weight, dy) && aligned<WIDTH>(dx);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        u64 start = row * width;
        A projection = 0;
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(x + start + i);
            auto scales = load<w>(weight + i);
            auto slopes = load<w>(dy + start + i);
            for (int k = 0; k < w; k++) {
                projection += widen(slopes.at[k]) * (widen(scales.at[k]) + offset) * widen(in.at[k]);
            }
        });
        projection = block_reduce(projection, A(0), Add());
        A scale = rstd[row];
        A mean = projection * scale * scale / A(width);
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(x + start + i);
            auto scales = load<w>(weight + i);
            auto slopes = load<w>(dy + start + i);
            Vector<T, w> out;
            if (add) out = load<w>(dx + start + i);
            for (int k = 0; k < w; k++) {
                A before = add ? widen(out.at[k]) : A(0);
                A slope = widen(slopes.at[k]) * (widen(scales.at[k]) + offset);
                out.at[k] = narrow<T>(before + scale * (slope - widen(in.at[k]) * mean));
            }
            store<w>(dx + start + i, out);
        });
    }
}

// Sums `term(row, x, dy)` over blocks of rows: one partial vector per block.
template <class Term> __device__ void column_sums(
    const T* x, const T* dy, A* partial, u64 width, u64 rows, Term term
) {
    bool vectors = width % COLUMNS == 0 && aligned<COLUMNS>(x) && aligned<COLUMNS>(dy);
    for (u64 part = blockIdx.y; part * PARTIAL_ROWS < rows; part += gridDim.y) {
        u64 first = part * PARTIAL_ROWS;
        u64 last = first + PARTIAL_ROWS < rows ? first + PARTIAL_ROWS : rows;
        for_elements<COLUMNS>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            A sums[w];
            for (int k = 0; k < w; k++) sums[k] = 0;
            for (u64 row = first; row < last; row++) {
                auto in = load<w>(x + row * width + i);
                auto slopes = load<w>(dy + row * width + i);
                for (int k = 0; k < w; k++) sums[k] += term(row, widen(in.at[k]), widen(slopes.at[k]));
            }
            for (int k = 0; k < w; k++) partial[part * width + i + k] = sums[k];
        });
    }
}

extern "C" __launch_bounds__(1024) __global__ void rms_norm_weight(
    const T* __restrict__ x, const A* __restrict__ rstd, const T* __restrict__ dy, A* __restrict__ partial,
    u64 width, u64 rows
) {
    column_sums(x, dy, partial, width, rows, [&](u64 row, A in, A slope) { return slope * (in * rstd[row]); });
}

extern "C" __launch_bounds__(1024) __global__ void layer_norm(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
    A* __restrict__ stats, u64 width, u64 rows, A eps
) {
    bool vectors = whole_vectors(width, x, weight, y) && aligned<WIDTH>(bias);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = x + row * width;
        T* to = y + row * width;
        A sum = 0;
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(from + i);
            for (int k = 0; k < w; k++) sum += widen(in.at[k]);
        });
        A mean = block_reduce(sum, A(0), Add()) / A(width);
        A squares = 0;
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(from + i);
            for (int k = 0; k < w; k++) squares += (widen(in.at[k]) - mean) * (widen(in.at[k]) - mean);
        });
        squares = block_reduce(squares, A(0), Add());
        A rstd = A(1) / square_root(squares / A(width) + eps);
        if (threadIdx.x == 0) {
            stats[2 * row] = mean;
            stats[2 * row + 1] = rstd;
        }
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(from + i);
            auto scales = load<w>(weight + i);
            auto shifts = load<w>(bias + i);
            Vector<T, w> out;
            for (int k = 0; k < w; k++) {
                A normal = (widen(in.at[k]) - mean) * rstd;
                out.at[k] = narrow<T>(normal * widen(scales.at[k]) + widen(shifts.at[k]));
            }
            store<w>(to + i, out);
        });
    }
}

extern "C" __launch_bounds__(1024) __global__ void layer_norm_backward(
    const T* __restrict__ x, const T* __restrict__ weight, const A* __restrict__ stats, const T* __restrict__ dy,
    T* __restrict__ dx, u64 width, u64 rows, u32 add
) {
    bool vectors = whole_vectors(width, x, weight, dy) && aligned<WIDTH>(dx);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        u64 start = row * width;
        A mean = stats[2 * row], rstd = stats[2 * row + 1];
        A sum = 0, projection = 0;
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(x + start + i);
            auto scales = load<w>(weight + i);
            auto slopes = load<w>(dy + start + i);
            for (int k = 0; k < w; k++) {
                A slope = widen(slopes.at[k]) * widen(scales.at[k]);
                sum += slope;
                projection += slope * ((widen(in.at[k]) - mean) * rstd);
            }
        });
        A offset = block_reduce(sum, A(0), Add()) / A(width);
        A slant = block_reduce(projection, A(0), Add()) / A(width);
        for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(x + start + i);
            auto scales = load<w>(weight + i);
            auto slopes = load<w>(dy + start + i);
            Vector<T, w> out;
            if (add) out = load<w>(dx + start + i);
            for (int k = 0; k < w; k++) {
                A before = add ? widen(out.at[k]) : A(0);
                A normal = (widen(in.at[k]) - mean) * rstd;
                A slope = widen(slopes.at[k]) * widen(scales.at[k]);
                out.at[k] = narrow<T>(before + rstd * (slope - offset - normal * slant));
            }
            store<w>(dx + start + i, out);
        });
    }
}

extern "C" __launch_bounds__(1024) __global__ void layer_norm_weight(
    const T* __restrict__ x, const A* __restrict__ stats, const T* __restrict__ dy, A* __restrict__ partial,
    u64 width, u64 rows
) {
    column_sums(x, dy, partial, width, rows, [&](u64 row, A in, A slope) {
        return slope * ((in - stats[2 * row]) * stats[2 * row + 1]);
    });
}
