//! Tests of the choice of kernels, and of the code around them.

use tch::Kind;

use super::*;

#[test]
fn chosen_kernel_runs_if_operands_allow_else_composed() {
    let choice = |heads, kv_heads, head_dim, [as_they_are, repeated]: [Option<CudaAttention>; 2]| {
        let dims = AttentionDims { batch: 2, seq: 8, heads, kv_heads, head_dim };
        AttentionKernel::of_kernels(dims, |is_repeated| Ok(if is_repeated { repeated } else { as_they_are }))
            .expect("a choice that cannot fail")
    };
    let [flash, efficient, cudnn] =
        [CudaAttention::Flash, CudaAttention::Efficient, CudaAttention::Cudnn].map(Some);
    for kernel in [flash, efficient, cudnn] {
        assert_eq!(Some(choice(4, 4, 64, [kernel, None])), kernel.map(AttentionKernel::Cuda));
        assert_eq!(choice(4, 4, 20, [kernel, kernel]), AttentionKernel::Composed);
        assert_eq!(Some(choice(4, 2, 64, [efficient, kernel])), kernel.map(AttentionKernel::Repeated));
        assert_eq!(Some(choice(4, 2, 64, [None, kernel])), kernel.map(AttentionKernel::Repeated));
    }
    assert_eq!(choice(4, 2, 64, [cudnn, efficient]), AttentionKernel::Cuda(CudaAttention::Cudnn));
    assert_eq!(choice(4, 2, 20, [cudnn, efficient]), AttentionKernel::Composed);
    assert_eq!(choice(4, 4, 64, [None, efficient]), AttentionKernel::Composed);
    assert_eq!(choice(4, 2, 64, [efficient, None]), AttentionKernel::Composed);
}

#[test]
fn shim_reports_attention_kernel_chosen_by_libtorch() {
    let tensor = |heads: i64| Tensor::zeros([1, heads, 8, 8], (Kind::Float, Device::Cpu));
    // On the host, libtorch has one fused kernel, which it reports as FlashAttention.
    let operands = [tensor(4), tensor(4), tensor(4)];
    let chosen = ffi::choose_attention(operands.each_ref()).expect("an operation of every libtorch");
    assert_eq!(chosen, Some(CudaAttention::Flash));
}

#[test]
fn pack_heads_concatenates_head_gradients_in_each_row() {
    let part = |first: f64, heads: i64| {
        (Tensor::arange(heads * 6, (Kind::Float, Device::Cpu)) + first).view([1, heads, 3, 2])
    };
    let parts = [part(0.0, 2), part(100.0, 1), part(200.0, 1)];
    let mut rows = Tensor::zeros([1, 3, 4, 2], (Kind::Float, Device::Cpu));
    ffi::pack_heads(parts.each_ref(), &mut rows).expect("sizes that fit");
    let found = Vec::<f32>::try_from(rows.view([-1])).expect("floats");
    assert_eq!(&found[..8], [0.0, 1.0, 6.0, 7.0, 100.0, 101.0, 200.0, 201.0]);
    assert_eq!(&found[8..12], [2.0, 3.0, 8.0, 9.0]);
}

#[test]
fn attention_over_repeated_keys_matches_grouped_queries() {
    let dims = AttentionDims { batch: 2, seq: 19, heads: 6, kv_heads: 2, head_dim: 8 };
    let options = (Kind::Double, Device::Cpu);
    let [qkv, dy] = [(packed(dims), 3.0), (rows(dims), 5.0)].map(|(sizes, step)| {
        (Tensor::arange(sizes.iter().product::<i64>(), options) * step).sin().view(&sizes[..])
    });
    let [q, k, v] = heads(dims, &qkv).expect("views");
    let dy = dy.transpose(1, 2);
    let by = |k: &Tensor, v: &Tensor| {
        let (y, lse) = Tensor::internal_scaled_dot_product_flash_attention_for_cpu(
            &q,
            k,
            v,
            0.0,
            true,
            None::<Tensor>,
            None,
        );
        let gradients = Tensor::internal_scaled_dot_product_flash_attention_for_cpu_backward(
            &dy,
            &q,
            k,
            v,
            &y,
            &lse,
            0.0,
            true,
            None::<Tensor>,
            None,
        );
        (y, [gradients.0, gradients.1, gradients.2])
    };
    let (y, [dq, dk, dv]) =
        by(&repeated(dims, &k).expect("heads that divide"), &repeated(dims, &v).expect("heads that divide"));
    let mut dqkv = Tensor::zeros(packed(dims), options);
    ffi::pack_heads([&dq, &dk, &dv], &mut dqkv).expect("heads that divide");
    // The reference sums are libtorch's own over a dimension of groups: no head is added to a head of another key.
    let (expected, [dq, dk, dv]) = by(&k, &v);
    let parts = heads(dims, &dqkv).expect("views");
    for (got, expected) in [&y, &parts[0], &parts[1], &parts[2]].into_iter().zip([&expected, &dq, &dk, &dv]) {
        let off = (got - expected).abs().max().double_value(&[]);
        // Numbers of at most 1, sums of at most 3 x 19 of them: any order stays below a thousand roundings.
        assert!(off <= 1e3 * f64::EPSILON * 57.0, "{off}");
    }
}
