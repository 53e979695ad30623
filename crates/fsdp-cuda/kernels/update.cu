// The update of elements by a formula, which comes before this text: `update`, its NUMBERS, STATES and CHANGES_PARAMS.
// T is the type of parameters and state, S the type of the gradient. `factors` are scale, clip and a flag: if the flag
// is 0, nothing is written. The low-precision copy of the parameters, if there is one, is written in the same pass.
// `not_finite` is set if anything written is not finite; `most` is the largest finite parameter.

extern "C" __global__ void update_elements(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ states0, T* __restrict__ states1,
    T* __restrict__ states2, bf16* __restrict__ copy, u64 len, const double* __restrict__ factors, i64* not_finite, T most, NUMBERS
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    // Null pointers are aligned.
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(states0) && aligned<W>(states1) &&
        aligned<W>(states2) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        Vector<T, w> first, second, third;
        if (STATES > 0) first = load<w>(states0 + i);
        if (STATES > 1) second = load<w>(states1 + i);
        if (STATES > 2) third = load<w>(states2 + i);
        for (int k = 0; k < w; k++) {
            update(scaled(slopes.at[k], scale, clip), p.at[k], first.at[k], second.at[k], third.at[k], ALL_NUMBERS);
            if (CHANGES_PARAMS) written.param(p.at[k]);
            if (STATES > 0) written.state(first.at[k]);
            if (STATES > 1) written.state(second.at[k]);
            if (STATES > 2) written.state(third.at[k]);
        }
        if (CHANGES_PARAMS) store<w>(params + i, p);
        if (CHANGES_PARAMS) copy_to<w>(copy, i, p);
        if (STATES > 0) store<w>(states0 + i, first);
        if (STATES > 1) store<w>(states1 + i, second);
        if (STATES > 2) store<w>(states2 + i, third);
    });
    written.end(not_finite);
}
