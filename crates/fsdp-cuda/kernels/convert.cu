// Conversions between element types: copies, sums, and combination of partial sums of weight gradients. Also scaling.

extern "C" __global__ void cast(const S* __restrict__ src, T* __restrict__ dst, u64 len) {
    for_elements<W>(len, aligned<W>(src) && aligned<W>(dst), [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto from = load<w>(src + i);
        Vector<T, w> to;
        for (int k = 0; k < w; k++) to.at[k] = convert<T>(from.at[k]);
        store<w>(dst + i, to);
    });
}

extern "C" __global__ void accumulate(const S* __restrict__ src, T* __restrict__ dst, u64 len) {
    for_elements<W>(len, aligned<W>(src) && aligned<W>(dst), [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto from = load<w>(src + i);
        auto to = load<w>(dst + i);
        for (int k = 0; k < w; k++) to.at[k] = sum_of(to.at[k], from.at[k]);
        store<w>(dst + i, to);
    });
}

// Multiplies by the element nearest to `factor`.
extern "C" __global__ void scale(T* __restrict__ dst, u64 len, double factor) {
    A rounded = widen(from_double<T>(factor));
    for_elements<W>(len, aligned<W>(dst), [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto to = load<w>(dst + i);
        for (int k = 0; k < w; k++) to.at[k] = narrow<T>(widen(to.at[k]) * rounded);
        store<w>(dst + i, to);
    });
}

// Parts whose numbers a block reads before it adds them: there are few columns and many parts.
constexpr u64 PARTS = 128;

// Adds `count` partial vectors of length `len` in order, and stores the sum in `dst`, or adds it there. All warps of a
// block read, the first one adds; each lane has a column.
extern "C" __launch_bounds__(1024) __global__ void combine(
    const S* __restrict__ partial, T* __restrict__ dst, u64 len, u64 count, u32 add
) {
    __shared__ S parts[PARTS][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    u64 i = u64(blockIdx.x) * 32 + lane;
    S sum = narrow<S>(B(0));
    for (u64 first = 0; first < count; first += PARTS) {
        u64 some = count - first < PARTS ? count - first : PARTS;
        for (u64 part = warp; part < some; part += warps) {
            if (i < len) parts[part][lane] = partial[(first + part) * len + i];
        }
        __syncthreads();
        if (warp == 0 && i < len) {
            u64 part = 0;
            if (first == 0) sum = parts[part++][lane];
            for (; part < some; part++) sum = narrow<S>(widen(sum) + widen(parts[part][lane]));
        }
        __syncthreads();
    }
    if (warp == 0 && i < len) dst[i] = add ? sum_of(dst[i], sum) : convert<T>(sum);
}
