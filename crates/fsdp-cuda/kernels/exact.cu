// Exact sums of doubles (Kulisch's accumulator, like the core's ExactSum): a fixed-point number of 32-bit digits in
// 64-bit words, and a last word that counts non-finite values. Words are added by integer atomics, so the order does
// not matter; the reader of the words propagates carries.

constexpr int DIGITS = 68;
constexpr int WORDS = DIGITS + 1;

// Sums per block. The copies of a word are adjacent.
constexpr int COPIES = 32;

__device__ void add_word(i64* word, i64 value) {
    if (value != 0) atomicAdd(reinterpret_cast<u64*>(word), u64(value));
}

// Adds to a sum whose words are `COPIES` apart.
__device__ void add_exactly(i64* words, double value) {
    u64 bits = u64(__double_as_longlong(value));
    u32 exponent = u32(bits >> 52) & 0x7ff;
    u64 fraction = bits & ((u64(1) << 52) - 1);
    if (exponent == 0x7ff) {
        add_word(words + DIGITS * COPIES, 1);
        return;
    }
    // A subnormal has no hidden bit and shares the exponent of the smallest normal number.
    u64 mantissa = exponent == 0 ? fraction : fraction | u64(1) << 52;
    u32 place = exponent == 0 ? 0 : exponent - 1;
    u32 shift = place % 32;
    u64 low = mantissa << shift;
    u64 high = shift == 0 ? 0 : mantissa >> (64 - shift);
    i64 sign = bits >> 63 ? -1 : 1;
    i64* first = words + place / 32 * COPIES;
    add_word(first, sign * i64(low & 0xffffffff));
    add_word(first + COPIES, sign * i64(low >> 32));
    add_word(first + 2 * COPIES, sign * i64(high));
}

// Every block has its own sums, so that atomics seldom collide: numbers of similar magnitude, such as gradients and
// losses, go to the same three words. Lanes that add at the same time have separate sums, because a 64-bit addition in
// shared memory is a loop that only one of the colliding lanes leaves per iteration; in global memory it is not a loop,
// but all blocks of the grid would collide.
__device__ i64* block_sums_begin() {
    __shared__ i64 words[WORDS * COPIES];
    for (int i = threadIdx.x; i < WORDS * COPIES; i += blockDim.x) words[i] = 0;
    __syncthreads();
    return words;
}

__device__ void block_sums_end(const i64* words, i64* sum) {
    __syncthreads();
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) {
        i64 total = 0;
        // Threads start at different sums, so that their words are in different banks.
        for (int copy = 0; copy < COPIES; copy++) total += words[i * COPIES + (copy + i) % COPIES];
        add_word(sum + i, total);
    }
}

// One warp per row: lane l adds the elements l, l + 32, ..., and the lanes are combined in pairs, in the same order as
// on the host.
extern "C" __global__ void square_sum(const T* __restrict__ src, i64* __restrict__ sum, u64 row_len, u64 rows) {
    i64* words = block_sums_begin();
    if (row_len == 1) {
        u64 stride = u64(gridDim.x) * blockDim.x;
        for (u64 row = u64(blockIdx.x) * blockDim.x + threadIdx.x; row < rows; row += stride) {
            double value = double(widen(src[row]));
            add_exactly(words + threadIdx.x % COPIES, value * value);
        }
    } else {
        u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
        for (u64 row = u64(blockIdx.x) * warps + threadIdx.x / 32; row < rows; row += u64(gridDim.x) * warps) {
            double squares = 0.0;
            for (u64 i = lane; i < row_len; i += 32) {
                double value = double(widen(src[row * row_len + i]));
                squares += value * value;
            }
            squares = warp_reduce(squares, Add());
            if (lane == 0) add_exactly(words + threadIdx.x / 32, squares);
        }
    }
    block_sums_end(words, sum);
}

extern "C" __global__ void exact_sum(const double* __restrict__ src, i64* __restrict__ sum, u64 len) {
    i64* words = block_sums_begin();
    u64 stride = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < len; i += stride) {
        add_exactly(words + threadIdx.x % COPIES, src[i]);
    }
    block_sums_end(words, sum);
}

// Adds integers, given as doubles, to words.
extern "C" __global__ void add_counts(const double* __restrict__ src, i64* __restrict__ words, u64 len) {
    u64 stride = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < len; i += stride) words[i] += i64(src[i]);
}

// Propagates carries: every digit but the highest becomes 0 .. 2^32 - 1.
__device__ void carry(i64* digits) {
    i64 over = 0;
    for (int i = 0; i < DIGITS - 1; i++) {
        i64 total = digits[i] + over;
        digits[i] = total & 0xffffffff;
        over = total >> 32;
    }
    digits[DIGITS - 1] += over;
}

// `2^exponent` for exponents of normal numbers.
__device__ double power(int exponent) { return __longlong_as_double(i64(exponent + 1023) << 52); }

// Rounds a carried, non-negative sum: the three leading digits cover the 53 bits of the result.
__device__ double rounded(const i64* digits) {
    int top = DIGITS - 1;
    while (top >= 0 && digits[top] == 0) top--;
    if (top < 0) return 0.0;
    int low = top >= 2 ? top - 2 : 0;
    u64 high = 0, rest = 0;
    for (int i = top; i >= low; i--) {
        // (high, rest) is a number of up to 96 bits; rest holds its lowest 32.
        high = high << 32 | rest;
        rest = u64(digits[i]);
    }
    double mantissa;
    if (high == 0) {
        mantissa = double(rest);
    } else {
        int zeros = __clzll(i64(high));
        // Keeps 64 leading bits; the last one records whether any bits follow, below where a double rounds.
        int room = zeros > 32 ? 32 : zeros;
        u64 leading = high << zeros | (zeros >= 32 ? rest << (zeros - 32) : rest >> (32 - room));
        u64 dropped = zeros >= 32 ? 0 : rest & ((u64(1) << (32 - room)) - 1);
        mantissa = double(leading | u64(dropped != 0)) * power(32 - zeros);
    }
    int exponent = -1074 + 32 * low;
    // Two factors, so that neither underflows unless the product does.
    int half = exponent / 2;
    return mantissa * power(half) * power(exponent - half);
}

__device__ double value_of(const i64* words) {
    if (words[DIGITS] > 0) return __longlong_as_double(0x7ff8000000000000ll);
    i64 digits[DIGITS];
    for (int i = 0; i < DIGITS; i++) digits[i] = words[i];
    carry(digits);
    if (digits[DIGITS - 1] >= 0) return rounded(digits);
    for (int i = 0; i < DIGITS; i++) digits[i] = -digits[i];
    carry(digits);
    return -rounded(digits);
}

// Computes what an update needs from the scalars of a step: loss, squared gradient norm (divided by `divisor`), number
// of targets, and, after the number of ranks that ask to stop, the number of ranks whose parameters or state are not
// finite. Runs on one thread.
extern "C" __global__ void gradient_factors(
    const i64* __restrict__ scalars, double* __restrict__ factors, double divisor, u32 clips, double most
) {
    u64 count = u64(scalars[2 * WORDS]);
    double mean = count == 0 ? 0.0 : 1.0 / double(count);
    double scale = count == 0 ? 0.0 : divisor / double(count);
    double loss = value_of(scalars) * mean;
    double norm = sqrt(value_of(scalars + WORDS)) * scale;
    double clip = 1.0;
    if (clips) {
        clip = most / (norm + 1e-6);
        // Like Rust's min: a NaN norm does not clip.
        clip = clip < 1.0 ? clip : 1.0;
    }
    bool was_finite = factors[2] != 0.0 && scalars[2 * WORDS + 2] == 0;
    factors[0] = scale;
    factors[1] = clip;
    factors[2] = was_finite && is_finite(loss) && is_finite(norm) ? 1.0 : 0.0;
}
