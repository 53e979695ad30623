// Update rules over runs of a segment's shard, operation by operation as on the host. T is the type of parameters and
// state, S that of the gradient. `factors` are scale, clip and a flag: when that is down, nothing is written. The copy of
// the parameters that computes is written in the same pass, where there is one. `not_finite` is set when what is
// written is not finite; `most` is the largest parameter that is.

extern "C" __global__ void adamw(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ means, T* __restrict__ squares,
    bf16* __restrict__ copy, u64 len, const double* __restrict__ factors,
    i64* not_finite, T most, T keep, T weight, u32 by_end, T beta2, T square_weight, T root_correction, T eps, T step_size
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]), rest = T(1) - weight;
    bool vectors =
        aligned<W>(gradient) && aligned<W>(params) && aligned<W>(means) && aligned<W>(squares) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        auto m = load<w>(means + i);
        auto v = load<w>(squares + i);
        for (int k = 0; k < w; k++) {
            T g = scaled(slopes.at[k], scale, clip);
            T average = by_end ? g - (g - m.at[k]) * rest : m.at[k] + weight * (g - m.at[k]);
            T variance = v.at[k] * beta2 + square_weight * g * g;
            T denominator = square_root(variance) / root_correction + eps;
            p.at[k] = p.at[k] * keep + step_size * average / denominator;
            m.at[k] = average;
            v.at[k] = variance;
            // An average that is not finite leaves no parameter finite; a variance does.
            written.param(p.at[k]);
            written.state(variance);
        }
        store<w>(params + i, p);
        copy_to<w>(copy, i, p);
        store<w>(means + i, m);
        store<w>(squares + i, v);
    });
    written.end(not_finite);
}

extern "C" __global__ void sgd(
    const S* __restrict__ gradient, T* __restrict__ params, bf16* __restrict__ copy, u64 len,
    const double* __restrict__ factors, i64* not_finite, T most, T decay, T lr
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        for (int k = 0; k < w; k++) {
            p.at[k] += -lr * (scaled(slopes.at[k], scale, clip) + decay * p.at[k]);
            written.param(p.at[k]);
        }
        store<w>(params + i, p);
        copy_to<w>(copy, i, p);
    });
    written.end(not_finite);
}

extern "C" __global__ void sgd_momentum(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ buffer, bf16* __restrict__ copy, u64 len,
    const double* __restrict__ factors, i64* not_finite, T most, T decay, T lr, T momentum, T undamped, u32 nesterov,
    u32 first
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(buffer) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        auto b = load<w>(buffer + i);
        for (int k = 0; k < w; k++) {
            T g = scaled(slopes.at[k], scale, clip) + decay * p.at[k];
            T average = first ? g : b.at[k] * momentum + undamped * g;
            T direction = nesterov ? g + momentum * average : average;
            b.at[k] = average;
            p.at[k] += -lr * direction;
            // A momentum that is not finite leaves no parameter finite.
            written.param(p.at[k]);
        }
        store<w>(params + i, p);
        store<w>(buffer + i, b);
        copy_to<w>(copy, i, p);
    });
    written.end(not_finite);
}

extern "C" __global__ void lion(
    const S* __restrict__ gradient, T* __restrict__ params, T* __restrict__ averages, bf16* __restrict__ copy, u64 len,
    const double* __restrict__ factors, i64* not_finite, T most, T keep, T old, T fresh, T kept, T added, T step_size
) {
    if (factors[2] == 0.0) return;
    T scale = T(factors[0]), clip = T(factors[1]);
    bool vectors = aligned<W>(gradient) && aligned<W>(params) && aligned<W>(averages) && aligned<W>(copy);
    Written<T> written(most);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto slopes = load<w>(gradient + i);
        auto p = load<w>(params + i);
        auto m = load<w>(averages + i);
        for (int k = 0; k < w; k++) {
            T g = scaled(slopes.at[k], scale, clip);
            T direction = m.at[k] * old + fresh * g;
            T up = direction > T(0) ? step_size : T(0);
            T down = direction < T(0) ? step_size : T(0);
            p.at[k] = p.at[k] * keep + (up - down);
            m.at[k] = m.at[k] * kept + added * g;
            // A sign is finite whatever it is of; an average shows what is not.
            written.param(p.at[k]);
            written.state(m.at[k]);
        }
        store<w>(params + i, p);
        copy_to<w>(copy, i, p);
        store<w>(averages + i, m);
    });
    written.end(not_finite);
}

// An average of the parameters, which are only read.
extern "C" __global__ void ema(
    const T* __restrict__ params, T* __restrict__ averages, u64 len, const double* __restrict__ factors,
    i64* not_finite, T most, T weight
) {
    if (factors[2] == 0.0) return;
    Written<T> written(most);
    T rest = T(1) - weight;
    bool by_end = weight >= T(0.5);
    bool vectors = aligned<W>(params) && aligned<W>(averages);
    for_elements<W>(len, vectors, [&](auto wide, u64 i) {
        constexpr int w = decltype(wide)::width;
        auto p = load<w>(params + i);
        auto average = load<w>(averages + i);
        for (int k = 0; k < w; k++) {
            T away = p.at[k] - average.at[k];
            average.at[k] = by_end ? p.at[k] - away * rest : average.at[k] + weight * away;
            written.state(average.at[k]);
        }
        store<w>(averages + i, average);
    });
    written.end(not_finite);
}
