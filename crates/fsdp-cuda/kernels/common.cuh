// Shared by all kernels: element types, their arithmetic, vectors of elements, and reductions.
//
// The compilation defines ELEMENT and OTHER; T and S are these types, A and B the types used for arithmetic on them.
// bf16 and f16 are widened on load and rounded to nearest even on store; nothing is included. Products and sums are
// fused only where fma is written, so results round like those of the host's kernels. Code in PTX has a second form
// with the same results, for compilers that generate code for the host.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct bf16 {
    u16 bits;
};

struct f16 {
    u16 bits;
};

template <class E> struct Arithmetic { typedef E type; };
template <> struct Arithmetic<f16> { typedef float type; };
template <> struct Arithmetic<bf16> { typedef float type; };

typedef ELEMENT T;
typedef OTHER S;
typedef Arithmetic<T>::type A;
typedef Arithmetic<S>::type B;

// Number of elements of T in 16 bytes.
constexpr int WIDTH = 16 / sizeof(T);

__device__ inline float widen(float value) { return value; }
__device__ inline double widen(double value) { return value; }
__device__ inline float widen(bf16 value) { return __uint_as_float(u32(value.bits) << 16); }

__device__ inline float widen(f16 value) {
#ifdef __CUDACC__
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
#else
    u32 sign = u32(value.bits & 0x8000) << 16, magnitude = u32(value.bits & 0x7fff) << 13;
    // Exponent and mantissa, shifted into place, represent 2^-112 of the number.
    u32 finite = __float_as_uint(__uint_as_float(magnitude) * __uint_as_float(0x77800000));
    return __uint_as_float(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite));
#endif
}

// Rounds a number in the arithmetic type to an element.
template <class E> __device__ E narrow(typename Arithmetic<E>::type value);
template <> __device__ inline float narrow<float>(float value) { return value; }
template <> __device__ inline double narrow<double>(double value) { return value; }
template <> __device__ inline bf16 narrow<bf16>(float value) {
#ifdef __CUDACC__
    // Compiles to one instruction, or one for two adjacent elements. NaN becomes 0x7fff.
    u16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return bf16{rounded};
#else
    u32 bits = __float_as_uint(value);
    u32 rounded = (bits + (0x7fff + ((bits >> 16) & 1))) >> 16;
    return bf16{u16(value != value ? 0x7fff : rounded)};
#endif
}

template <> __device__ inline f16 narrow<f16>(float value) {
#ifdef __CUDACC__
    // NaN becomes 0x7fff.
    u16 rounded;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return f16{rounded};
#else
    u32 bits = __float_as_uint(value), twice = bits << 1;
    float base = fabsf(value) * __uint_as_float(0x77800000) * __uint_as_float(0x08800000);
    // Adds a power of two below which a number has no more bits than the result may have.
    u32 power = (twice & 0xff000000) > 0x71000000 ? twice & 0xff000000 : 0x71000000;
    u32 sum = __float_as_uint(__uint_as_float((power >> 1) + 0x07800000) + base);
    u32 rounded = ((sum >> 13) & 0x7c00) + (sum & 0x0fff);
    return f16{u16(value != value ? 0x7fff : (bits >> 16 & 0x8000) | rounded)};
#endif
}

// Rounds a double to an element, once.
template <class E> __device__ E from_double(double value);
template <> __device__ inline float from_double<float>(double value) { return float(value); }
template <> __device__ inline double from_double<double>(double value) { return value; }
// Rounds to odd, in single precision, as an intermediate step from a double to a narrower type.
__device__ inline float rounded_to_odd(double value) {
    float nearest = float(value);
    double exact = nearest;
    u32 bits = __float_as_uint(nearest) - u32(fabs(exact) > fabs(value));
    bool inexact = exact != value && value == value;
    return __uint_as_float(bits | u32(inexact));
}
template <> __device__ inline bf16 from_double<bf16>(double value) { return narrow<bf16>(rounded_to_odd(value)); }
template <> __device__ inline f16 from_double<f16>(double value) { return narrow<f16>(rounded_to_odd(value)); }

template <class X, class Y> struct same { static constexpr bool value = false; };
template <class X> struct same<X, X> { static constexpr bool value = true; };

// Converts `from` to an element of type D, rounded once.
template <class D, class E> __device__ D convert(E from) {
    if constexpr (same<typename Arithmetic<D>::type, typename Arithmetic<E>::type>::value) {
        return narrow<D>(widen(from));
    } else {
        return from_double<D>(double(widen(from)));
    }
}

// `to + from`, rounded once.
template <class D, class E> __device__ D sum_of(D to, E from) {
    if constexpr (same<typename Arithmetic<D>::type, typename Arithmetic<E>::type>::value) {
        return narrow<D>(widen(to) + widen(from));
    } else {
        return from_double<D>(double(widen(to)) + double(widen(from)));
    }
}

// W elements, loaded and stored together.
template <class E, int W> struct alignas(sizeof(E) * W) Vector {
    E at[W];
};

template <int W, class E> __device__ Vector<E, W> load(const E* from) {
    return *reinterpret_cast<const Vector<E, W>*>(from);
}

template <int W, class E> __device__ void store(E* to, const Vector<E, W>& vector) {
    *reinterpret_cast<Vector<E, W>*>(to) = vector;
}

template <int W, class E> __device__ bool aligned(const E* pointer) {
    return (u64(pointer) & (sizeof(E) * W - 1)) == 0;
}

template <int W> struct Wide {
    static constexpr int width = W;
};

// Calls body(Wide<W>(), i) for the vectors of 0 .. len, and body(Wide<1>(), i) for the rest; all threads of the grid
// take part. Without `vectors`, handles single elements only.
template <int W, class Body> __device__ void for_elements(u64 len, bool vectors, Body body) {
    u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    u64 stride = u64(gridDim.x) * blockDim.x;
    u64 whole = vectors ? len / W : 0;
    for (u64 i = first; i < whole; i += stride) body(Wide<W>(), i * W);
    for (u64 i = whole * W + first; i < len; i += stride) body(Wide<1>(), i);
}

// Like for_elements, for a row shared by the threads of one block.
template <int W, class Body> __device__ void for_row(u64 len, bool vectors, Body body) {
    u64 whole = vectors ? len / W : 0;
    for (u64 i = threadIdx.x; i < whole; i += blockDim.x) body(Wide<W>(), i * W);
    for (u64 i = whole * W + threadIdx.x; i < len; i += blockDim.x) body(Wide<1>(), i);
}

// Number of elements per vector that suits both T and S.
constexpr int W = 16 / (sizeof(T) > sizeof(S) ? sizeof(T) : sizeof(S));

// The gradient as an update rule uses it: converted to the parameter's type, scaled and clipped.
template <class E> __device__ E scaled(S gradient, E scale, E clip) { return convert<E>(gradient) * scale * clip; }

// Stores the parameters at i in the low-precision copy, if there is one.
template <int w, class E> __device__ void copy_to(bf16* copy, u64 i, const Vector<E, w>& params) {
    if (copy == nullptr) return;
    Vector<bf16, w> rounded;
    for (int k = 0; k < w; k++) rounded.at[k] = convert<bf16>(params.at[k]);
    store<w>(copy + i, rounded);
}

// Whether a magnitude is at most `most`; false for NaN.
__device__ inline bool is_within(float value, float most) { return fabsf(value) <= most; }
__device__ inline bool is_within(double value, double most) { return fabs(value) <= most; }

__device__ inline bool is_finite(float value) { return is_within(value, 3.4028234663852886e38f); }
__device__ inline bool is_finite(double value) { return is_within(value, 1.7976931348623157e308); }

// Tracks whether everything that a thread of an update wrote is finite. `most` is the largest magnitude for which a
// parameter, and its low-precision copy if any, is finite.
template <class E> struct Written {
    E most;
    bool finite = true;

    __device__ explicit Written(E most) : most(most) {}
    __device__ void param(E value) { finite &= is_within(value, most); }
    __device__ void state(E value) { finite &= is_finite(value); }

    // Stores the result. All threads that write the word write the same value.
    __device__ void end(i64* not_finite) const {
        if (!finite) *not_finite = 1;
    }
};

__device__ inline float square_root(float value) { return sqrtf(value); }
__device__ inline double square_root(double value) { return sqrt(value); }

// `2^exponent` for the exponents of normal numbers.
__device__ inline float power_of_two(int exponent) { return __uint_as_float(u32(exponent + 127) << 23); }

// `e^x` as `fraction * 2^exponent`. `exponent` is the true exponent plus a constant whose low bits are zero, also after
// it is halved; power_of_two shifts the constant out.
struct Power {
    float fraction;
    u32 exponent;
};

// Same algorithm as on the host: reduction to |r| <= ln 2 / 2, and the polynomial of Cephes.
__device__ inline Power power_of_e(float x) {
    const float shift = 12582912.0f;
    float shifted = fmaf(x, 1.44269504088896340736f, shift);
    float n = shifted - shift;
    float r = fmaf(n, 2.1219444e-4f, fmaf(n, -0.6933594f, x));
    float p = 1.9875691e-4f;
    p = fmaf(p, r, 1.3981999e-3f);
    p = fmaf(p, r, 8.333452e-3f);
    p = fmaf(p, r, 4.1665796e-2f);
    p = fmaf(p, r, 1.6666665e-1f);
    p = fmaf(p, r, 5.0000003e-1f);
    return Power{fmaf(p, r * r, r) + 1.0f, __float_as_uint(shifted)};
}

// `e^x` for |x| below this has the exponent of a normal number, and so has its reciprocal.
constexpr float NEAR = 87.0f;
__device__ inline float exponential_near(float x) {
    Power power = power_of_e(x);
    return power.fraction * power_of_two(int(power.exponent));
}

// `e^x` for x <= 120, as two factors, so that neither underflows unless the result does.
__device__ inline float exponential_below(float x) {
    Power power = power_of_e(x < -150.0f ? -150.0f : x);
    u32 low = power.exponent >> 1;
    return power.fraction * power_of_two(int(low)) * power_of_two(int(power.exponent - low));
}
__device__ inline double exponential_below(double x) { return exp(x); }

// `e^x`. All these variants round alike.
__device__ inline float exponential(float x) { return exponential_below(x > 120.0f ? 120.0f : x); }

// `1 / d`, rounded like a division, for d from 1 to 2^126: an approximation and one Newton step. This is what the
// compiler generates for a division by such d, without the range check.
__device__ inline float reciprocal(float d) {
#ifdef __CUDACC__
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(d));
    return fmaf(near, fmaf(-d, near, 1.0f), near);
#else
    return 1.0f / d;
#endif
}

// `1 / (1 + e^-x)` of w numbers. A single branch covers all of them: numbers near 0 skip the general case.
template <int w> __device__ Vector<float, w> logistic(Vector<float, w> x) {
    bool near = true;
    for (int k = 0; k < w; k++) near &= fabsf(x.at[k]) < NEAR;
    if (near) {
        for (int k = 0; k < w; k++) x.at[k] = reciprocal(1.0f + exponential_near(-x.at[k]));
    } else {
        for (int k = 0; k < w; k++) x.at[k] = 1.0f / (1.0f + exponential(-x.at[k]));
    }
    return x;
}
template <int w> __device__ Vector<double, w> logistic(Vector<double, w> x) {
    for (int k = 0; k < w; k++) x.at[k] = 1.0 / (1.0 + exp(-x.at[k]));
    return x;
}

struct Add {
    template <class R> __device__ R operator()(R a, R b) const { return a + b; }
};

// The larger number; NaN is ignored.
struct Larger {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
    __device__ double operator()(double a, double b) const { return fmax(a, b); }
};

// Combines the values of a warp in pairs, upper half into lower half; the result is in lane 0.
template <class R, class Op> __device__ R warp_reduce(R value, Op op) {
    for (int width = 16; width > 0; width /= 2) value = op(value, __shfl_down_sync(0xffffffffu, value, width));
    return value;
}

// Combines the values of a block in a fixed order; all threads get the result. `rest` stands in for missing warps. All
// threads of the block must call it; there are at most 1024, in whole warps.
template <class R, class Op> __device__ R block_reduce(R value, R rest, Op op) {
    __shared__ R partial[32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = warp_reduce(value, op);
    // All threads that read the previous result have passed the last barrier below.
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    if (warp == 0) {
        value = warp_reduce(lane < blockDim.x / 32 ? partial[lane] : rest, op);
        if (lane == 0) partial[0] = value;
    }
    __syncthreads();
    value = partial[0];
    __syncthreads();
    return value;
}
