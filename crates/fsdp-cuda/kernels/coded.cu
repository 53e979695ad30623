// The update of elements by a formula, as in `update.cu`, with state of 8 bits.

// Elements per block of 8-bit moments, and threads per block of the kernel for them.
constexpr u64 CODED = 256;

// A code book: the values of 256 codes, and the lower bound of each next code.
struct Book {
    const float* values;
    const float* bounds;

    __device__ u8 code(float number) const {
        u32 code = 0;
        for (u32 step = 128; step > 0; step /= 2) code += number >= bounds[code + step - 1] ? step : 0;
        return u8(code);
    }
};

// Encodes one value per thread, for the first `len` threads of a block, and stores their largest magnitude.
__device__ inline void encode(Book book, T value, u64 len, u8* code, T* largest) {
    bool mine = threadIdx.x < len;
    T magnitude = value < T(0) ? -value : value;
    T most = block_reduce(mine ? magnitude : T(0), T(0), Larger());
    if (mine) *code = book.code(float(value / (most > T(0) ? most : T(1))));
    if (threadIdx.x == 0) *largest = most;
}

// A formula with two moments stored as codes and, for every block of a row, their largest magnitude. `books` are values and
// bounds for the first moments, then for the second moments.
extern "C" __global__ void update_coded(
    const S* __restrict__ gradient, T* __restrict__ params, u8* __restrict__ means, u8* __restrict__ squares,
    T* __restrict__ largest_means, T* __restrict__ largest_squares, bf16* __restrict__ copy, u64 rows, u64 width,
    const float* __restrict__ books, const double* __restrict__ factors, i64* not_finite, T most, NUMBERS
) {
    if (factors[2] == 0.0) return;
    __shared__ float table[4 * CODED];
    for (u64 i = threadIdx.x; i < 4 * CODED; i += blockDim.x) table[i] = books[i];
    __syncthreads();
    Book mean_book{table, table + CODED}, square_book{table + 2 * CODED, table + 3 * CODED};
    T scale = T(factors[0]), clip = T(factors[1]);
    Written<T> written(most);
    u64 blocks = (width + CODED - 1) / CODED;
    for (u64 block = blockIdx.x; block < rows * blocks; block += gridDim.x) {
        u64 start = block % blocks * CODED;
        u64 len = width - start < CODED ? width - start : CODED;
        u64 i = block / blocks * width + start + threadIdx.x;
        T mean = T(0), square = T(0), unused = T(0);
        if (threadIdx.x < len) {
            Vector<T, 1> p = load<1>(params + i);
            mean = T(mean_book.values[means[i]]) * largest_means[block];
            square = T(square_book.values[squares[i]]) * largest_squares[block];
            update(scaled(gradient[i], scale, clip), p.at[0], mean, square, unused, ALL_NUMBERS);
            written.param(p.at[0]);
            written.state(square);
            store<1>(params + i, p);
            copy_to<1>(copy, i, p);
        }
        // Both calls synchronize before they replace the magnitudes, which all threads have read.
        encode(mean_book, mean, len, means + i, largest_means + block);
        encode(square_book, square, len, squares + i, largest_squares + block);
    }
    written.end(not_finite);
}
