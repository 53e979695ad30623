// Element by element: activations, dropout, rotary position embedding.

extern "C" __global__ void swiglu(
    const T* __restrict__ gate, const T* __restrict__ up, T* __restrict__ y, u64 len
) {
    bool vectors = aligned<WIDTH>(gate) && aligned<WIDTH>(up) && aligned<WIDTH>(y);
    for_elements<WIDTH>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto gates = load<w>(gate + i);
        auto ups = load<w>(up + i);
        Vector<A, w> g;
        for (int k = 0; k < w; k++) g.at[k] = widen(gates.at[k]);
        auto s = logistic(g);
        Vector<T, w> out;
        for (int k = 0; k < w; k++) out.at[k] = narrow<T>(g.at[k] * s.at[k] * widen(ups.at[k]));
        store<w>(y + i, out);
    });
}

// `y` gets the output again; it may be null, and it may be `dy`.
extern "C" __global__ void swiglu_backward(
    const T* __restrict__ gate, const T* __restrict__ up, const T* dy, T* y,
    T* __restrict__ dgate, T* __restrict__ dup, u64 len
) {
    bool inputs = aligned<WIDTH>(gate) && aligned<WIDTH>(up) && aligned<WIDTH>(dy) && aligned<WIDTH>(y);
    for_elements<WIDTH>(len, inputs && aligned<WIDTH>(dgate) && aligned<WIDTH>(dup), [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto gates = load<w>(gate + i);
        auto ups = load<w>(up + i);
        auto slopes = load<w>(dy + i);
        Vector<A, w> g;
        for (int k = 0; k < w; k++) g.at[k] = widen(gates.at[k]);
        auto logistics = logistic(g);
        Vector<T, w> to_gate, to_up, out;
        for (int k = 0; k < w; k++) {
            A u = widen(ups.at[k]), slope = widen(slopes.at[k]);
            A s = logistics.at[k];
            A silu = g.at[k] * s;
            to_gate.at[k] = narrow<T>(slope * u * (s + silu * (A(1) - s)));
            to_up.at[k] = narrow<T>(slope * silu);
            out.at[k] = narrow<T>(silu * u);
        }
        if (y != nullptr) store<w>(y + i, out);
        store<w>(dgate + i, to_gate);
        store<w>(dup + i, to_up);
    });
}

// `sqrt(2 / pi)`, and the cubic coefficient of the tanh form of GELU, which is x * logistic(2 u).
constexpr double GELU_SCALE = 0.7978845608028654;
constexpr double GELU_CUBIC = 0.044715;

extern "C" __global__ void gelu(const T* __restrict__ x, T* __restrict__ y, u64 len) {
    const A scale = A(2.0 * GELU_SCALE), cubic = A(GELU_CUBIC);
    for_elements<WIDTH>(len, aligned<WIDTH>(x) && aligned<WIDTH>(y), [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto in = load<w>(x + i);
        Vector<A, w> u;
        for (int k = 0; k < w; k++) {
            A v = widen(in.at[k]);
            u.at[k] = scale * (v + cubic * v * v * v);
        }
        auto s = logistic(u);
        Vector<T, w> out;
        for (int k = 0; k < w; k++) out.at[k] = narrow<T>(widen(in.at[k]) * s.at[k]);
        store<w>(y + i, out);
    });
}

// `y` gets the output again; it may be null, and it may be `dy`.
extern "C" __global__ void gelu_backward(
    const T* __restrict__ x, const T* dy, T* y, T* __restrict__ dx, u64 len
) {
    const A scale = A(2.0 * GELU_SCALE), cubic = A(GELU_CUBIC), cubic_slope = A(3.0 * GELU_CUBIC);
    bool vectors = aligned<WIDTH>(x) && aligned<WIDTH>(dy) && aligned<WIDTH>(y) && aligned<WIDTH>(dx);
    for_elements<WIDTH>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto in = load<w>(x + i);
        auto slopes = load<w>(dy + i);
        Vector<A, w> u;
        for (int k = 0; k < w; k++) {
            A v = widen(in.at[k]);
            u.at[k] = scale * (v + cubic * v * v * v);
        }
        auto logistics = logistic(u);
        Vector<T, w> out, again;
        for (int k = 0; k < w; k++) {
            A v = widen(in.at[k]), s = logistics.at[k];
            A slope = scale * (A(1) + cubic_slope * v * v);
            out.at[k] = narrow<T>(widen(slopes.at[k]) * (s + v * s * (A(1) - s) * slope));
            again.at[k] = narrow<T>(v * s);
        }
        if (y != nullptr) store<w>(y + i, again);
        store<w>(dx + i, out);
    });
}

// Four words of Philox4x32-10 for a key and a counter.
struct Words {
    u32 at[4];
};

__device__ Words philox(u64 key, u64 counter) {
    u32 x0 = u32(counter), x1 = u32(counter >> 32), x2 = 0, x3 = 0;
    u32 key0 = u32(key), key1 = u32(key >> 32);
    for (int round = 0; round < 10; round++) {
        u64 first = u64(0xd2511f53u) * x0, second = u64(0xcd9e8d57u) * x2;
        x0 = u32(second >> 32) ^ x1 ^ key0;
        x2 = u32(first >> 32) ^ x3 ^ key1;
        x1 = u32(second);
        x3 = u32(first);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return Words{{x0, x1, x2, x3}};
}

// Element i of a sample is dropped when word i of the sample's generator is less than the threshold.
extern "C" __global__ void dropout(
    T* __restrict__ x, const u64* __restrict__ keys, u64 sample_len, u64 samples, u32 threshold, A kept
) {
    u64 groups = (sample_len + 3) / 4;
    bool vectors = sample_len % 4 == 0 && aligned<4>(x);
    for_elements<1>(groups * samples, false, [&](auto, u64 i) {
        u64 sample = i / groups, group = i % groups;
        Words words = philox(keys[sample], group);
        T* to = x + sample * sample_len + 4 * group;
        if (vectors) {
            auto values = load<4>(to);
            for (int k = 0; k < 4; k++) {
                values.at[k] = narrow<T>(widen(values.at[k]) * (words.at[k] < threshold ? A(0) : kept));
            }
            store<4>(to, values);
        } else {
            for (int k = 0; k < 4 && 4 * group + k < sample_len; k++) {
                to[k] = narrow<T>(widen(to[k]) * (words.at[k] < threshold ? A(0) : kept));
            }
        }
    });
}

// The factors of elements first .. first + run_len of samples, for runs that lie side by side: 0 where dropped. A run may
// begin and end within a group of four words.
extern "C" __global__ void dropout_factors(
    T* __restrict__ factors, const u64* __restrict__ keys, const u64* __restrict__ firsts, u64 run_len, u64 runs,
    u32 threshold, A kept
) {
    u64 groups = run_len / 4 + 2;
    bool vectors = run_len % 4 == 0 && aligned<4>(factors);
    T chosen[2] = {narrow<T>(kept), narrow<T>(A(0))};
    for_elements<1>(groups * runs, false, [&](auto, u64 i) {
        u64 run = i / groups, first = firsts[run], end = first + run_len;
        u64 group = first / 4 + i % groups;
        if (4 * group >= end) return;
        Words words = philox(keys[run], group);
        T* to = factors + run * run_len;
        if (vectors && first % 4 == 0) {
            Vector<T, 4> values;
            for (int k = 0; k < 4; k++) values.at[k] = chosen[words.at[k] < threshold];
            store<4>(to + (4 * group - first), values);
            return;
        }
        for (int k = 0; k < 4; k++) {
            u64 element = 4 * group + k;
            if (element >= first && element < end) to[element - first] = chosen[words.at[k] < threshold];
        }
    });
}

// Rotates element j of a head with element j + half, by the cosines and then sines of the row's position.
extern "C" __global__ void rope(
    T* __restrict__ qkv, const A* __restrict__ table, u64 seq, u64 rows, u32 packed, u32 heads, u32 half, u32 back
) {
    u64 pairs = u64(heads) * half;
    for_elements<4>(rows * pairs, half % 4 == 0 && packed % 4 == 0 && aligned<4>(qkv), [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        u64 row = i / pairs;
        u32 pair = u32(i - row * pairs);
        u32 head = pair / half, j = pair % half;
        const A* angles = table + row % seq * 2 * half + j;
        T* low = qkv + row * packed + head * 2 * half + j;
        auto cosines = load<w>(angles);
        auto sines = load<w>(angles + half);
        auto lows = load<w>(low);
        auto highs = load<w>(low + half);
        Vector<T, w> to_low, to_high;
        for (int k = 0; k < w; k++) {
            A x = widen(lows.at[k]), y = widen(highs.at[k]);
            A sine = back ? -sines.at[k] : sines.at[k];
            to_low.at[k] = narrow<T>(x * cosines.at[k] - y * sine);
            to_high.at[k] = narrow<T>(y * cosines.at[k] + x * sine);
        }
        store<w>(low, to_low);
        store<w>(low + half, to_high);
    });
}
