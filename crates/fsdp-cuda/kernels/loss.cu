// Softmax cross-entropy of rows of logits, a block for each row. The largest logit and the sum of exponentials are found
// in one pass: a thread that meets a larger logit scales what it has summed so far.

constexpr u32 IGNORED_TARGET = 0xffffffffu;

__device__ float lowest(float) { return __uint_as_float(0xff800000u); }
__device__ double lowest(double) { return __longlong_as_double(i64(0xfff0000000000000ull)); }

__device__ void fill_row(S* row, u64 len, bool vectors) {
    for_row<WIDTH>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        Vector<S, w> zeros;
        for (int k = 0; k < w; k++) zeros.at[k] = narrow<S>(B(0));
        store<w>(row + i, zeros);
    });
}

// `gradient` gets softmax - one_hot, or zeros where the target does not count; it may be null, and it may be `logits`.
extern "C" __launch_bounds__(1024) __global__ void cross_entropy(
    const T* logits, S* gradient, const u32* __restrict__ targets, double* __restrict__ losses, u64 vocab, u64 rows
) {
    const A none = lowest(A(0));
    bool vectors = vocab % WIDTH == 0 && aligned<WIDTH>(logits) && aligned<WIDTH>(gradient);
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* values = logits + row * vocab;
        S* slopes = gradient == nullptr ? nullptr : gradient + row * vocab;
        u32 target = targets[row];
        if (target >= vocab) {
            bool counts = target != IGNORED_TARGET;
            if (threadIdx.x == 0) losses[row] = counts ? __longlong_as_double(0x7ff8000000000000ll) : 0.0;
            if (slopes != nullptr) fill_row(slopes, vocab, vectors);
            continue;
        }
        A own = widen(values[target]);
        A largest = none, sum = 0;
        for_row<WIDTH>(vocab, vectors, [&](auto wide, u64 i) {
            constexpr int w = decltype(wide)::width;
            auto in = load<w>(values + i);
            A most = largest;
            for (int k = 0; k < w; k++) most = Larger()(most, widen(in.at[k]));
            if (most > largest) {
                sum *= exponential(largest - most);
                largest = most;
            }
            for (int k = 0; k < w; k++) {
                A value = widen(in.at[k]);
                if (value != none) sum += exponential(value - largest);
            }
        });
        A top = block_reduce(largest, none, Larger());
        A total = block_reduce(largest == none ? sum : sum * exponential(largest - top), A(0), Add());
        if (threadIdx.x == 0) losses[row] = log(double(total)) + (double(top) - double(own));
        if (slopes == nullptr) continue;
        A scale = A(1) / total;
        // From the end: what was read last is still in the cache.
        for_row<WIDTH>(vocab, vectors, [&](auto wide, u64 from_end) {
            constexpr int w = decltype(wide)::width;
            u64 i = vocab - w - from_end;
            auto in = load<w>(values + i);
            Vector<S, w> out;
            for (int k = 0; k < w; k++) {
                A share = exponential(widen(in.at[k]) - top) * scale;
                out.at[k] = narrow<S>(B(i + k == target ? share - A(1) : share));
            }
            store<w>(slopes + i, out);
        });
    }
}
