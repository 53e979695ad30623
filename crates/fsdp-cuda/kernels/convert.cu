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

// Number of parts loaded before the first of them is added: there are few threads and many parts.
constexpr int AHEAD = 16;

// Adds `count` partial vectors of length `len` in order, and stores the sum in `dst`, or adds it there.
extern "C" __global__ void combine(const S* __restrict__ partial, T* __restrict__ dst, u64 len, u64 count, u32 add) {
    for_elements<1>(len, false, [&](auto, u64 i) {
        const S* from = partial + i;
        S sum = *from;
        u64 part = 1;
        for (; part + AHEAD <= count; part += AHEAD) {
            S next[AHEAD];
            for (int k = 0; k < AHEAD; k++) next[k] = from[(part + k) * len];
            for (int k = 0; k < AHEAD; k++) sum = narrow<S>(widen(sum) + widen(next[k]));
        }
        for (; part < count; part++) sum = narrow<S>(widen(sum) + widen(from[part * len]));
        dst[i] = add ? sum_of(dst[i], sum) : convert<T>(sum);
    });
}
