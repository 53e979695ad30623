// Sums of integers, which wrap.

extern "C" __global__ void accumulate_u32(const u32* __restrict__ src, u32* __restrict__ dst, u64 len) {
    for_elements<1>(len, false, [&](auto, u64 i) { dst[i] += src[i]; });
}

extern "C" __global__ void accumulate_i64(const u64* __restrict__ src, u64* __restrict__ dst, u64 len) {
    for_elements<1>(len, false, [&](auto, u64 i) { dst[i] += src[i]; });
}
