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

// Vectors that a thread loads at once, so that it waits for memory less often.
constexpr int TOGETHER = 2;

// Calls body(Wide<WIDTH>(), Wide<n>(), i, step) for n vectors of a row that start at i, i + step, ..; and
// body(Wide<1>(), Wide<1>(), i, 0) for its single elements. The threads of a block share the work.
template <bool FROM_END, class Body> __device__ void for_cut(const Cut& cut, Body body) {
    auto start = [&](u64 i) { return cut.head + (FROM_END ? cut.vectors - 1 - i : i) * WIDTH; };
    const i64 step = (FROM_END ? -i64(blockDim.x) : i64(blockDim.x)) * WIDTH;
    u64 i = threadIdx.x;
    for (; i + (TOGETHER - 1) * blockDim.x < cut.vectors; i += TOGETHER * blockDim.x) {
        body(Wide<WIDTH>(), Wide<TOGETHER>(), start(i), step);
    }
    for (; i < cut.vectors; i += blockDim.x) body(Wide<WIDTH>(), Wide<1>(), start(i), step);
    // There are fewer single elements than threads in a warp.
    u64 between = cut.vectors * WIDTH;
    i = threadIdx.x;
    if (i < cut.len - between) body(Wide<1>(), Wide<1>(), i < cut.head ? i : i + between, 0);
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

// Propagates the gradient of a capped logit through the cap.
__device__ A through_cap(A gradient, A logit, A cap) {
    A bent = logit / cap;
    return gradient * (A(1) - bent * bent);
}

// `e^x` for x <= 0, like exponential_below, except that less than e^-87 becomes 0. This takes fewer instructions.
__device__ float share(float x) { return x < -NEAR ? 0.0f : exponential_near(x); }
__device__ double share(double x) { return exp(x); }

// The terms of the loss; see the kernel.
struct Terms {
    A cap, smoothing, z_loss, loss_scale;
};

// The kernel below. Unless `BENT`, the cap and the smoothing are 0, which saves time for every element.
template <bool BENT> __device__ void losses_of_rows(
    const T* logits, S* gradient, const u32* __restrict__ targets, double* __restrict__ losses,
    double* __restrict__ z_losses, u64 vocab, u64 rows, Terms terms
) {
    const A cap = terms.cap, smoothing = terms.smoothing, z_loss = terms.z_loss, loss_scale = terms.loss_scale;
    const A none = lowest(A(0));
    auto bent = [&](T value) {
        A logit = widen(value);
        return BENT && cap != A(0) ? cap * tangent(logit / cap) : logit;
    };
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
            for_cut<false>(cut, [&](auto wide, auto many, u64 i, i64 step) {
                constexpr int w = decltype(wide)::width, n = decltype(many)::width;
                Vector<S, w> zeros;
                for (int k = 0; k < w; k++) zeros.at[k] = narrow<S>(B(0));
                for (int j = 0; j < n; j++) store_at<w>(slopes + i + j * step, zeros, at_once);
            });
            continue;
        }
        A own = bent(values[target]);
        A largest = none, sum = 0, plain = 0;
        for_cut<false>(cut, [&](auto wide, auto many, u64 i, i64 step) {
            constexpr int w = decltype(wide)::width, n = decltype(many)::width;
            Vector<T, w> in[n];
            for (int j = 0; j < n; j++) in[j] = load<w>(values + i + j * step);
            A before = largest;
            A of[n * w];
            for (int k = 0; k < n * w; k++) of[k] = bent(in[k / w].at[k % w]);
            for (int k = 0; k < n * w; k++) largest = Larger()(largest, of[k]);
            if (BENT) {
                for (int k = 0; k < n * w; k++) plain += of[k];
            }
            // -inf cannot be subtracted; its exponential is 0 for any shift.
            A shift = largest == none ? A(0) : largest;
            sum *= share(before - shift);
            for (int k = 0; k < n * w; k++) sum += share(of[k] - shift);
        });
        A top = block_reduce(largest, none, Larger());
        A total = block_reduce(largest == none ? sum : sum * share(largest - top), A(0), Add());
        A mean = BENT ? block_reduce(plain, A(0), Add()) / A(vocab) : A(0);
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
        A even = smoothing / A(vocab);
        // `one` is what the target's class has more than others.
        auto slope = [&](A logit, A one) {
            A slope = share(logit - top) * scale;
            if (BENT) slope -= even;
            slope -= one;
            if (BENT && cap != A(0)) slope = through_cap(slope, logit, cap);
            return narrow<S>(B(slope * loss_scale));
        };
        // From the end: the elements read last are still in the cache.
        for_cut<true>(cut, [&](auto wide, auto many, u64 i, i64 step) {
            constexpr int w = decltype(wide)::width, n = decltype(many)::width;
            Vector<T, w> in[n];
            for (int j = 0; j < n; j++) in[j] = load<w>(values + i + j * step);
            for (int j = 0; j < n; j++) {
                Vector<S, w> out;
                for (int k = 0; k < w; k++) out.at[k] = slope(bent(in[j].at[k]), A(0));
                store_at<w>(slopes + i + j * step, out, at_once);
            }
        });
        // The target's gradient was stored as if it were another class.
        __syncthreads();
        if (threadIdx.x == 0) slopes[target] = slope(own, A(1) - smoothing);
    }
}

// `gradient` gets softmax - one_hot plus the contributions of the other loss terms, or zeros where the target is
// ignored; it may be null or alias `logits`. Logits are capped unless `cap` is 0. `smoothing` is the share of the
// target that is spread over all classes; `z_loss` is the coefficient of the squared logarithm of the sum of
// exponentials; its contribution to each loss is stored in `z_losses`, which may be null. Gradients are multiplied by
// `loss_scale`.
extern "C" __launch_bounds__(512, sizeof(A) == 4 ? 4 : 1) __global__ void cross_entropy(
    const T* logits, S* gradient, const u32* __restrict__ targets, double* __restrict__ losses,
    double* __restrict__ z_losses, u64 vocab, u64 rows,
    A cap, A smoothing, A z_loss, A loss_scale
) {
    Terms terms{cap, smoothing, z_loss, loss_scale};
    if (cap == A(0) && smoothing == A(0)) {
        losses_of_rows<false>(logits, gradient, targets, losses, z_losses, vocab, rows, terms);
    } else {
        losses_of_rows<true>(logits, gradient, targets, losses, z_losses, vocab, rows, terms);
    }
}
