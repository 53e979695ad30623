// Elementwise kernels: activations, dropout, rotary position embedding.

template <int w> __device__ Vector<A, w> widened(const Vector<T, w>& from) {
    Vector<A, w> wide;
    for (int k = 0; k < w; k++) wide.at[k] = widen(from.at[k]);
    return wide;
}

// Values of a function, and its derivative.
template <int w> struct Both {
    Vector<A, w> value, slope;
};

struct Silu {
    template <int w> static __device__ Both<w> both(const Vector<A, w>& x) {
        Both<w> found;
        auto logistics = logistic(x);
        for (int k = 0; k < w; k++) {
            A s = logistics.at[k], y = x.at[k] * s;
            found.value.at[k] = y;
            found.slope.at[k] = s + y * (A(1) - s);
        }
        return found;
    }
};

// The tanh approximation, as x * logistic(2 u).
struct GeluTanh {
    template <int w> static __device__ Both<w> both(const Vector<A, w>& x) {
        // 2 sqrt(2 / pi), the cubic coefficient, and the coefficient in its derivative.
        const A scale = A(2.0 * 0.7978845608028654), cubic = A(0.044715), cubic_slope = A(3.0 * 0.044715);
        Vector<A, w> u;
        for (int k = 0; k < w; k++) {
            A v = x.at[k];
            u.at[k] = scale * (v + cubic * v * v * v);
        }
        auto logistics = logistic(u);
        Both<w> found;
        for (int k = 0; k < w; k++) {
            A v = x.at[k], s = logistics.at[k];
            A slope = scale * (A(1) + cubic_slope * v * v);
            found.value.at[k] = v * s;
            found.slope.at[k] = s + v * s * (A(1) - s) * slope;
        }
        return found;
    }
};

// GELU: x times the standard normal distribution function, whose tail above |x| is the host's series.
struct Gelu {
    template <int w> static __device__ Both<w> both(const Vector<A, w>& x) {
        const double terms[] = {
            0.24261280114151915, 0.18792720420989265, 0.05554838891881276, 0.012129438315111521,
            0.0017314801240606202, 8.014961859953749e-05, -2.5136847908026697e-05, -4.725842254926741e-06,
            2.5258922136865774e-07, 1.536333687349456e-07, -8.452550300172939e-10, -5.171627015435708e-09,
            -2.8206509081173767e-11, 1.9435038070971737e-10, -2.485356047851177e-12, -7.936207374645758e-12,
            4.606201711176235e-13, 3.2821541166777413e-13, -4.3538406631637026e-14, -1.2268185079261069e-14,
            3.2328460815413983e-15, 3.045165880431601e-16, -2.0130368431552942e-16, 7.151235360661802e-18,
            1.0142661060832152e-17, -1.751600193201231e-18,
        };
        constexpr int count = sizeof(A) == sizeof(float) ? 12 : 26;
        Both<w> found;
        for (int k = 0; k < w; k++) {
            A v = x.at[k], a = v < A(0) ? -v : v;
            A power = exponential_below(A(-0.5) * a * a);
            A t = A(4) / (A(4) + a), s = t + t - A(1);
            A sum = 0, before = 0;
            for (int i = count - 1; i > 0; i--) {
                A next = A(terms[i]) + (s + s) * sum - before;
                before = sum;
                sum = next;
            }
            A tail = power * t * (A(terms[0]) + s * sum - before);
            A below = v < A(0) ? tail : A(1) - tail;
            found.value.at[k] = v * below;
            found.slope.at[k] = below + v * (A(0.3989422804014327) * power);
        }
        return found;
    }
};

// NaN stays.
struct Relu {
    template <int w> static __device__ Both<w> both(const Vector<A, w>& x) {
        Both<w> found;
        for (int k = 0; k < w; k++) {
            found.value.at[k] = x.at[k] < A(0) ? A(0) : x.at[k];
            found.slope.at[k] = x.at[k] > A(0) ? A(1) : A(0);
        }
        return found;
    }
};

// z * logistic(1.702 z) with z = min(x, 7).
struct ClampedSwish {
    template <int w> static __device__ Both<w> both(const Vector<A, w>& x) {
        const A limit = A(7), scale = A(1.702);
        Both<w> found;
        Vector<A, w> scaled;
        for (int k = 0; k < w; k++) scaled.at[k] = scale * (x.at[k] > limit ? limit : x.at[k]);
        auto logistics = logistic(scaled);
        for (int k = 0; k < w; k++) {
            A s = logistics.at[k], z = x.at[k] > limit ? limit : x.at[k];
            found.value.at[k] = z * s;
            found.slope.at[k] = x.at[k] > limit ? A(0) : s + scaled.at[k] * s * (A(1) - s);
        }
        return found;
    }
};

// min(max(x, -7), 7) + 1.
struct ClampedPlusOne {
    template <int w> static __device__ Both<w> both(const Vector<A, w>& x) {
        const A limit = A(7);
        Both<w> found;
        for (int k = 0; k < w; k++) {
            A z = x.at[k] > limit ? limit : x.at[k];
            found.value.at[k] = (z < -limit ? -limit : z) + A(1);
            found.slope.at[k] = x.at[k] > limit || x.at[k] < -limit ? A(0) : A(1);
        }
        return found;
    }
};

struct Logistic {
    template <int w> static __device__ Both<w> both(const Vector<A, w>& x) {
        Both<w> found;
        found.value = logistic(x);
        for (int k = 0; k < w; k++) found.slope.at[k] = found.value.at[k] * (A(1) - found.value.at[k]);
        return found;
    }
};

// Calls body(F()) for the function with this number: its discriminant in `Function` of the crate fsdp-nn.
template <class Body> __device__ void for_function(u32 function, Body body) {
    switch (function) {
        case 0: return body(Silu());
        case 1: return body(GeluTanh());
        case 2: return body(Gelu());
        case 3: return body(Relu());
        case 4: return body(ClampedSwish());
        case 5: return body(ClampedPlusOne());
        case 6: return body(Logistic());
    }
}

// y = function(x), or function(x) * up if `up` is not null.
extern "C" __global__ void activation(
    u32 function, const T* __restrict__ x, const T* __restrict__ up, T* __restrict__ y, u64 len
) {
    bool vectors = aligned<WIDTH>(x) && aligned<WIDTH>(up) && aligned<WIDTH>(y);
    for_function(function, [&](auto f) {
        for_elements<WIDTH>(len, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto values = decltype(f)::both(widened(load<w>(x + i))).value;
            if (up != nullptr) {
                auto ups = load<w>(up + i);
                for (int k = 0; k < w; k++) values.at[k] = values.at[k] * widen(ups.at[k]);
            }
            Vector<T, w> out;
            for (int k = 0; k < w; k++) out.at[k] = narrow<T>(values.at[k]);
            store<w>(y + i, out);
        });
    });
}

// `y` gets the output of the forward pass again; it may be null or alias `dy`. `up` and `dup` are null if there is no
// gate.
extern "C" __global__ void activation_backward(
    u32 function, const T* __restrict__ x, const T* __restrict__ up, const T* dy, T* y,
    T* __restrict__ dx, T* __restrict__ dup, u64 len
) {
    bool inputs = aligned<WIDTH>(x) && aligned<WIDTH>(up) && aligned<WIDTH>(dy) && aligned<WIDTH>(y);
    bool vectors = inputs && aligned<WIDTH>(dx) && aligned<WIDTH>(dup);
    for_function(function, [&](auto f) {
        for_elements<WIDTH>(len, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto of = decltype(f)::both(widened(load<w>(x + i)));
            auto slopes = widened(load<w>(dy + i));
            Vector<T, w> to_x, to_up, again;
            if (up != nullptr) {
                auto ups = widened(load<w>(up + i));
                for (int k = 0; k < w; k++) {
                    to_up.at[k] = narrow<T>(slopes.at[k] * of.value.at[k]);
                    slopes.at[k] = slopes.at[k] * ups.at[k];
                    of.value.at[k] = of.value.at[k] * ups.at[k];
                }
                store<w>(dup + i, to_up);
            }
            for (int k = 0; k < w; k++) {
                to_x.at[k] = narrow<T>(slopes.at[k] * of.slope.at[k]);
                again.at[k] = narrow<T>(of.value.at[k]);
            }
            if (y != nullptr) store<w>(y + i, again);
            store<w>(dx + i, to_x);
        });
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

// Dropout factors of elements first .. first + run_len of samples, for runs stored one after the other: 0 where
// dropped. A run may begin and end within a group of four words.
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

// Rotates element j of a head with element j + half, by the cosines and then sines of the row's position:
// `positions[row]`, or the row's index in its sample of `seq` rows if `positions` is null. Elements of a head from 2
// half on are unchanged.
extern "C" __global__ void rope(
    T* __restrict__ qkv, const A* __restrict__ table, const u32* __restrict__ positions, u64 seq, u64 rows, u32 packed,
    u32 heads, u32 head_dim, u32 half, u32 back
) {
    u64 pairs = u64(heads) * half;
    bool vectors = half % 4 == 0 && head_dim % 4 == 0 && packed % 4 == 0 && aligned<4>(qkv);
    for_elements<4>(rows * pairs, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        u64 row = i / pairs;
        u32 pair = u32(i - row * pairs);
        u32 head = pair / half, j = pair % half;
        const A* angles = table + (positions ? positions[row] : row % seq) * 2 * half + j;
        T* low = qkv + row * packed + head * head_dim + j;
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
