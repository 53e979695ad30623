// Norms over rows, one block per row. Weight gradients are column sums over fixed blocks of rows, which `combine` adds
// in order, so no floats are added atomically.

// Rows whose column sums form one partial result; as on the host.
constexpr u64 PARTIAL_ROWS = 128;

// Columns per thread.
constexpr int COLUMNS = 4;

__device__ bool whole_vectors(u64 width, const T* a, const T* b, const T* c) {
    return width % WIDTH == 0 && aligned<WIDTH>(a) && aligned<WIDTH>(b) && aligned<WIDTH>(c);
}

// Vectors of a row that a thread keeps in registers.
constexpr int KEPT = 4;

// A row that is read several times. Each thread keeps its share in registers if that suffices for the row.
struct Row {
    const T* from;
    u64 width;
    bool vectors, kept;
    Vector<T, WIDTH> own[KEPT];

    __device__ Row(const T* from, u64 width, bool vectors) : from(from), width(width), vectors(vectors) {
        kept = vectors && width <= KEPT * WIDTH * blockDim.x;
        for (int j = 0; j < KEPT; j++) {
            if (kept && at(j) < width) own[j] = load<WIDTH>(from + at(j));
        }
    }

    __device__ u64 at(int j) const { return (threadIdx.x + j * blockDim.x) * WIDTH; }

    // Calls body(Wide<w>(), vector, i) for the vectors of the row, which start at element i.
    template <class Body> __device__ void each(Body body) const {
        if (kept) {
            for (int j = 0; j < KEPT; j++) {
                if (at(j) < width) body(Wide<WIDTH>(), own[j], at(j));
            }
        } else {
            for_row<WIDTH>(width, vectors, [&](auto wide, u64 i) {
                body(wide, load<decltype(wide)::width>(from + i), i);
            });
        }
    }
};

extern "C" __launch_bounds__(512) __global__ void rms_norm(
    const T* __restrict__ x, const T* __restrict__ weight, T* __restrict__ y, A* __restrict__ rstd,
    u64 width, u64 rows, A eps, A offset
) {
    bool vectors = whole_vectors(width, x, weight, y);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Row of(x + row * width, width, vectors);
        T* to = y + row * width;
        A squares = 0;
        of.each([&](auto wide, auto in, u64) {
            constexpr int w = decltype(wide)::width;
            for (int k = 0; k < w; k++) squares += widen(in.at[k]) * widen(in.at[k]);
        });
        squares = block_reduce(squares, A(0), Add());
        A scale = A(1) / square_root(squares / A(width) + eps);
        if (threadIdx.x == 0) rstd[row] = scale;
        of.each([&](auto wide, auto in, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto scales = load<w>(weight + i);
            Vector<T, w> out;
            for (int k = 0; k < w; k++) {
                out.at[k] = narrow<T>(widen(in.at[k]) * scale * (widen(scales.at[k]) + offset));
            }
            store<w>(to + i, out);
        });
    }
}

extern "C" __launch_bounds__(512) __global__ void rms_norm_backward(
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

// Sums `term(row, i, columns)` over blocks of rows: one partial vector per block. `term` returns one number for each of
// the columns that start at i.
template <class Term> __device__ void column_sums(A* partial, u64 width, u64 rows, bool vectors, Term term) {
    for (u64 part = blockIdx.y; part * PARTIAL_ROWS < rows; part += gridDim.y) {
        u64 first = part * PARTIAL_ROWS;
        u64 last = first + PARTIAL_ROWS < rows ? first + PARTIAL_ROWS : rows;
        for_elements<COLUMNS>(width, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            A sums[w];
            for (int k = 0; k < w; k++) sums[k] = 0;
#pragma unroll 16
            for (u64 row = first; row < last; row++) {
                auto terms = term(wide, row, i);
                for (int k = 0; k < w; k++) sums[k] += terms.at[k];
            }
            for (int k = 0; k < w; k++) partial[part * width + i + k] = sums[k];
        });
    }
}

// The terms of a norm's weight: `term(row, x, dy)` of elements.
template <class Term> __device__ void weight_sums(
    const T* x, const T* dy, A* partial, u64 width, u64 rows, Term term
) {
    bool vectors = width % COLUMNS == 0 && aligned<COLUMNS>(x) && aligned<COLUMNS>(dy);
    column_sums(partial, width, rows, vectors, [&](auto wide, u64 row, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto in = load<w>(x + row * width + i);
        auto slopes = load<w>(dy + row * width + i);
        Vector<A, w> terms;
        for (int k = 0; k < w; k++) terms.at[k] = term(row, widen(in.at[k]), widen(slopes.at[k]));
        return terms;
    });
}

// Rows of `dy` are `stride` elements apart.
extern "C" __launch_bounds__(1024) __global__ void bias_gradient(
    const T* __restrict__ dy, A* __restrict__ partial, u64 width, u64 rows, u64 stride
) {
    bool vectors = width % COLUMNS == 0 && stride % COLUMNS == 0 && aligned<COLUMNS>(dy);
    column_sums(partial, width, rows, vectors, [&](auto wide, u64 row, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(dy + row * stride + i);
        Vector<A, w> terms;
        for (int k = 0; k < w; k++) terms.at[k] = widen(slopes.at[k]);
        return terms;
    });
}

extern "C" __launch_bounds__(1024) __global__ void rms_norm_weight(
    const T* __restrict__ x, const A* __restrict__ rstd, const T* __restrict__ dy, A* __restrict__ partial,
    u64 width, u64 rows
) {
    weight_sums(x, dy, partial, width, rows, [&](u64 row, A in, A slope) { return slope * (in * rstd[row]); });
}

extern "C" __launch_bounds__(512) __global__ void layer_norm(
    const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, T* __restrict__ y,
    A* __restrict__ stats, u64 width, u64 rows, A eps
) {
    bool vectors = whole_vectors(width, x, weight, y) && aligned<WIDTH>(bias);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Row of(x + row * width, width, vectors);
        T* to = y + row * width;
        A sum = 0;
        of.each([&](auto wide, auto in, u64) {
            constexpr int w = decltype(wide)::width;
            for (int k = 0; k < w; k++) sum += widen(in.at[k]);
        });
        A mean = block_reduce(sum, A(0), Add()) / A(width);
        A squares = 0;
        of.each([&](auto wide, auto in, u64) {
            constexpr int w = decltype(wide)::width;
            for (int k = 0; k < w; k++) squares += (widen(in.at[k]) - mean) * (widen(in.at[k]) - mean);
        });
        squares = block_reduce(squares, A(0), Add());
        A rstd = A(1) / square_root(squares / A(width) + eps);
        if (threadIdx.x == 0) {
            stats[2 * row] = mean;
            stats[2 * row + 1] = rstd;
        }
        of.each([&](auto wide, auto in, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto scales = load<w>(weight + i);
            Vector<T, w> shifts;
            if (bias) shifts = load<w>(bias + i);
            Vector<T, w> out;
            for (int k = 0; k < w; k++) {
                A normal = (widen(in.at[k]) - mean) * rstd;
                A scaled = normal * widen(scales.at[k]);
                out.at[k] = narrow<T>(bias ? scaled + widen(shifts.at[k]) : scaled);
            }
            store<w>(to + i, out);
        });
    }
}

extern "C" __launch_bounds__(512) __global__ void layer_norm_backward(
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
    weight_sums(x, dy, partial, width, rows, [&](u64 row, A in, A slope) {
        return slope * ((in - stats[2 * row]) * stats[2 * row + 1]);
    });
}
