// Softmax cross-entropy of rows of logits, one block per row. The largest logit and the sum of exponentials are found
// in one pass: a thread that meets a larger logit rescales its sum so far. Threads of a warp would seldom agree on a
// branch, so there is none: an unchanged maximum rescales by 1.
//
// The order of sums in a row depends only on its length and on its alignment relative to 16 bytes.

constexpr u32 IGNORED_TARGET = 0xffffffffu;

__device__ float lowest(float) { return __uint_as_float(0xff800000u); }
__device__ double lowest(double) { return __longlong_as_double(i64(0xfff0000000000000ull)); }

// A row as aligned vectors of T, and single elements: `head` before the vectors, the rest after them.
struct Cut {
    u64 head, vectors, len;

    __device__ Cut(const T* row, u64 len) : len(len) {
        head = (WIDTH - u64(row) / sizeof(T) % WIDTH) % WIDTH;
        head = head < len ? head : len;
        vectors = (len - head) / WIDTH;
    }
};

// Calls body(Wide<WIDTH>(), i) for the vectors of a row, and body(Wide<1>(), i) for its single elements; the threads of
// a block share the work.
template <bool FROM_END, class Body> __device__ void for_cut(const Cut& cut, Body body) {
    for (u64 i = threadIdx.x; i < cut.vectors; i += blockDim.x) {
        body(Wide<WIDTH>(), cut.head + (FROM_END ? cut.vectors - 1 - i : i) * WIDTH);
    }
    // There are fewer single elements than threads in a warp.
    u64 i = threadIdx.x, between = cut.vectors * WIDTH;
    if (i < cut.len - between) body(Wide<1>(), i < cut.head ? i : i + between);
}

// Stores a vector in one access if `at_once`, element by element otherwise.
template <int w> __device__ void store_at(S* to, const Vector<S, w>& vector, bool at_once) {
    if (at_once) {
        store<w>(to, vector);
    } else {
        for (int k = 0; k < w; k++) to[k] = vector.at[k];
    }
}

// The hyperbolic tangent, computed as on the host.
__device__ A tangent(A x) {
    A a = x < A(0) ? -x : x, square = x * x;
    A above = A(135135) + square * (A(17325) + square * (A(378) + square));
    A below = A(135135) + square * (A(62370) + square * (A(3150) + square * A(28)));
    A power = exponential_below(-(a + a));
    A far = (A(1) - power) / (A(1) + power);
    return a < A(0.45) ? x * above / below : (x < A(0) ? -far : far);
}

// A logit, capped unless the cap is 0.
__device__ A capped(A logit, A cap) { return cap == A(0) ? logit : cap * tangent(logit / cap); }

// Propagates the gradient of a capped logit through the cap.
__device__ A through_cap(A gradient, A logit, A cap) {
    A bent = logit / cap;
    return cap == A(0) ? gradient : gradient * (A(1) - bent * bent);
}

// `gradient` gets softmax - one_hot plus the contributions of the other loss terms, or zeros where the target is
// ignored; it may be null or alias `logits`. `smoothing` is the share of the target that is spread over all classes;
// `z_loss` is the coefficient of the squared logarithm of the sum of exponentials; its contribution to each loss is
// stored in `z_losses`, which may be null. Gradients are multiplied by `loss_scale`.
extern "C" __launch_bounds__(1024) __global__ void cross_entropy(
    const T* logits, S* gradient, const u32* __restrict__ targets, double* __restrict__ losses,
    double* __restrict__ z_losses, u64 vocab, u64 rows,
    A cap, A smoothing, A z_loss, A loss_scale
) {
    const A none = lowest(A(0));
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* values = logits + row * vocab;
        S* slopes = gradient == nullptr ? nullptr : gradient + row * vocab;
        Cut cut(values, vocab);
        // A separate gradient may be aligned differently from the logits; then it is stored element by element.
        bool at_once = aligned<WIDTH>(slopes + cut.head);
        u32 target = targets[row];
        if (target >= vocab) {
            bool counts = target != IGNORED_TARGET;
            if (threadIdx.x == 0) {
                losses[row] = counts ? __longlong_as_double(0x7ff8000000000000ll) : 0.0;
                if (z_losses != nullptr) z_losses[row] = 0.0;
            }
            if (slopes == nullptr) continue;
            for_cut<false>(cut, [&](auto wide, u64 i) {
                constexpr int w = decltype(wide)::width;
                Vector<S, w> zeros;
                for (int k = 0; k < w; k++) zeros.at[k] = narrow<S>(B(0));
                store_at<w>(slopes + i, zeros, at_once);
            });
            continue;
        }
        A own = capped(widen(values[target]), cap);
        A largest = none, sum = 0, plain = 0;
        for_cut<false>(cut, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(values + i);
            A before = largest;
            Vector<A, w> of;
            for (int k = 0; k < w; k++) of.at[k] = capped(widen(in.at[k]), cap);
            for (int k = 0; k < w; k++) largest = Larger()(largest, of.at[k]);
            if (smoothing != A(0)) {
                for (int k = 0; k < w; k++) plain += of.at[k];
            }
            // -inf cannot be subtracted; its exponential is 0 for any shift.
            A shift = largest == none ? A(0) : largest;
            sum *= exponential_below(before - shift);
            for (int k = 0; k < w; k++) sum += exponential_below(of.at[k] - shift);
        });
        A top = block_reduce(largest, none, Larger());
        A total = block_reduce(largest == none ? sum : sum * exponential_below(largest - top), A(0), Add());
        A mean = smoothing == A(0) ? A(0) : block_reduce(plain, A(0), Add()) / A(vocab);
        double normalizer = log(double(total)) + double(top);
        if (threadIdx.x == 0) {
            double loss = log(double(total)) + (double(top) - double(own));
            if (smoothing != A(0)) loss += double(smoothing) * (double(own) - double(mean));
            if (z_loss != A(0)) {
                double of_row = double(z_loss) * normalizer * normalizer;
                loss += of_row;
                if (z_losses != nullptr) z_losses[row] = of_row;
            }
            losses[row] = loss;
        }
        if (slopes == nullptr) continue;
        A scale = A(1.0 + 2.0 * double(z_loss) * normalizer) / total;
        A even = smoothing / A(vocab), one = A(1) - smoothing;
        // From the end: the elements read last are still in the cache.
        for_cut<true>(cut, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(values + i);
            u32 of_target = target - u32(i);
            Vector<S, w> out;
            for (int k = 0; k < w; k++) {
                A logit = capped(widen(in.at[k]), cap);
                A share = exponential_below(logit - top) * scale - even;
                A slope = through_cap(of_target == k ? share - one : share, logit, cap);
                out.at[k] = narrow<S>(B(slope * loss_scale));
            }
            store_at<w>(slopes + i, out, at_once);
        });
    }
}
