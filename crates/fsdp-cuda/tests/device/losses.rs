//! Compares cross-entropy to the host's, for rows of logits and gradients at several alignments, and for logits that
//! are not finite.

use fsdp_core::DType;
use fsdp_core::memory::{Slice, SliceMut};
use fsdp_nn::Backend;
use fsdp_nn::backend::{BatchFacts, HeadDims, IGNORED_TARGET, Operands, Write};
use fsdp_nn::conformance::Calls;
use fsdp_nn::op::{Head, LogitsDims, LossTerms, Op};

use crate::operands::{ids, rounded};
use crate::subject::{Subject, subject};
use crate::values::*;

/// Returns losses and gradients of logits on the host, computed by a head whose weight is the identity.
fn head_of_host(vocab: usize, dtype: DType, logits: &[f64], targets: &[u32]) -> [Vec<f64>; 2] {
    let host = host();
    let rows = targets.len();
    let dims = HeadDims::new([rows, vocab, vocab], rows);
    let identity: Vec<f64> =
        (0..vocab * vocab).map(|i| f64::from(u8::from(i / vocab == i % vocab))).collect();
    let [x, weight] = [logits, &identity].map(|values| filled(&host, dtype, values));
    let ids = ids(&host, targets);
    let mut losses = room(&host, DType::F64, rows);
    let mut scratch = room(&host, dtype, rows * vocab);
    let mut dx = room(&host, dtype, rows * vocab);
    host.head_loss_backward(
        dims,
        Slice::whole(&x),
        Slice::whole(&weight),
        Slice::whole(&ids),
        (SliceMut::whole(&mut losses), None),
        SliceMut::whole(&mut scratch),
        None,
        SliceMut::whole(&mut dx),
        None,
    )
    .unwrap();
    [values(&host, &losses), values(&host, &dx)]
}

/// Returns losses and gradients, with gradients overwriting logits. Checks that the losses are the same without them.
fn in_place(cuda: &Subject, dtype: DType, shift: usize, logits: &[f64], targets: &[u32]) -> [Vec<f64>; 2] {
    let (len, vocab) = (logits.len(), logits.len() / targets.len());
    let mut logits = shifted(cuda, dtype, shift, logits);
    let ids = ids(cuda, targets);
    let [mut only, mut losses] = [(); 2].map(|()| room(cuda, DType::F64, targets.len()));
    let ids = Slice::whole(&ids);
    cuda.cross_entropy(vocab, Slice::new(&logits, shift, len), ids, SliceMut::whole(&mut only)).unwrap();
    let from = SliceMut::new(&mut logits, shift, len);
    cuda.cross_entropy_backward(vocab, from, ids, SliceMut::whole(&mut losses), None).unwrap();
    assert_bits(&values(cuda, &only), &values(cuda, &losses), "losses with and without gradient");
    [values(cuda, &losses), range(cuda, &logits, shift, len)]
}

/// Returns losses and gradients, with gradients in a separate buffer. Checks that the logits are unchanged.
fn apart(
    cuda: &Subject,
    [dtype, of_gradient]: [DType; 2],
    [shift, to]: [usize; 2],
    logits: &[f64],
    targets: &[u32],
) -> [Vec<f64>; 2] {
    let (len, vocab) = (logits.len(), logits.len() / targets.len());
    let mut there = shifted(cuda, dtype, shift, logits);
    let ids = ids(cuda, targets);
    let mut losses = room(cuda, DType::F64, targets.len());
    let mut gradient = room(cuda, of_gradient, to + len);
    cuda.cross_entropy_backward(
        vocab,
        SliceMut::new(&mut there, shift, len),
        Slice::whole(&ids),
        SliceMut::whole(&mut losses),
        Some(SliceMut::new(&mut gradient, to, len)),
    )
    .unwrap();
    assert_bits(&range(cuda, &there, shift, len), &rounded(dtype, logits.to_vec()), "logits");
    [values(cuda, &losses), range(cuda, &gradient, to, len)]
}

#[test]
fn cross_entropy_matches_host_within_error_bound() {
    let cuda = &*subject();
    for dtype in [DType::F32, DType::F64] {
        for vocab in [1, 5, 64, 333] {
            let rows = 6;
            let mut logits: Vec<f64> = normal(vocab as u64, rows * vocab).iter().map(|x| 5.0 * x).collect();
            logits = rounded(dtype, logits);
            if vocab > 5 {
                logits[3..vocab / 2].fill(f64::NEG_INFINITY);
            }
            let mut targets: Vec<u32> = (0..rows as u32).map(|row| row * 7 % vocab as u32).collect();
            targets[4] = IGNORED_TARGET;
            // An infinite logit times a zero of the identity is NaN, so replace it by a large negative one.
            let finite: Vec<f64> = logits.iter().map(|x| x.max(-200.0)).collect();
            let [expected_losses, expected] = head_of_host(vocab, dtype, &finite, &targets);
            // Error of sums in a different order, and of exponentials of rounded differences of up to 50.
            let error = (vocab as f64 + 120.0) * unit(dtype);
            let bounds: Vec<f64> = expected.iter().map(|p| 2.0 * error * (p.abs() + unit(dtype))).collect();
            for shift in [0, 1, 3] {
                let [losses, gradients] = in_place(cuda, dtype, shift, &logits, &targets);
                let what = format!("of {rows} x {vocab} logits of {dtype} from {shift}");
                assert_within(&losses, &expected_losses, &vec![error; rows], &format!("losses {what}"));
                assert_within(&gradients, &expected, &bounds, &format!("gradients {what}"));
                for to in [shift, shift + 1] {
                    let apart = apart(cuda, [dtype, dtype], [shift, to], &logits, &targets);
                    assert_bits(&apart[0], &losses, &format!("losses {what}, gradients to {to}"));
                    assert_bits(&apart[1], &gradients, &format!("gradients {what} to {to}"));
                }
            }
        }
    }
}

#[test]
fn bf16_logit_gradient_is_rounded_once() {
    let cuda = &*subject();
    for vocab in [5, 64, 333] {
        let rows = 6;
        let logits: Vec<f64> = normal(vocab as u64, rows * vocab).iter().map(|x| 5.0 * x).collect();
        let mut targets: Vec<u32> = (0..rows as u32).map(|row| row * 7 % vocab as u32).collect();
        targets[4] = IGNORED_TARGET;
        let [losses, gradient] = in_place(cuda, DType::F32, 0, &logits, &targets);
        let [same_losses, by_kernel] = apart(cuda, [DType::F32, DType::Bf16], [0, 0], &logits, &targets);
        assert_bits(&same_losses, &losses, "losses");
        assert_bits(&by_kernel, &rounded(DType::Bf16, gradient), "rounded gradients");
    }
}

#[test]
fn non_finite_logits_follow_loss_formula() {
    let cuda = &*subject();
    let (nan, low) = (f64::NAN, f64::NEG_INFINITY);
    for dtype in FLOATS {
        for vocab in [3, 64, 333] {
            let mut logits = vec![low; 5 * vocab];
            // Only the first and the last row stay -inf throughout.
            logits[vocab..2 * vocab].fill(1.0);
            logits[vocab + 1] = nan;
            logits[2 * vocab + 2] = f64::INFINITY;
            logits[3 * vocab + 1] = 7.0;
            let targets = [0, 0, 1, 1, IGNORED_TARGET];
            let [losses, gradients] = in_place(cuda, dtype, 0, &logits, &targets);
            assert_bits(&losses, &[nan, nan, nan, 0.0, 0.0], &format!("{vocab} logits of {dtype}"));
            let (without, sure) = gradients.split_at(3 * vocab);
            assert!(
                without.iter().all(|slope| slope.is_nan()),
                "nothing is right where the sum is not a number"
            );
            assert!(
                sure.iter().all(|&slope| slope == 0.0),
                "a class that is sure, and a row that does not count"
            );
        }
    }
}

#[test]
fn invalid_target_or_nan_logit_gives_nan_loss() {
    let cuda = &*subject();
    let logits = filled(cuda, DType::Bf16, &[1.0, 2.0, 3.0, f64::NAN]);
    let ids = ids(cuda, &[2, 0]);
    let mut losses = room(cuda, DType::F64, 2);
    cuda.cross_entropy(2, Slice::whole(&logits), Slice::whole(&ids), SliceMut::whole(&mut losses)).unwrap();
    assert!(
        values(cuda, &losses).iter().all(|loss| loss.is_nan()),
        "a wrong target, and a logit that is none"
    );
}

/// Runs an operation that also writes `z`, if given.
fn run<M: Backend>(
    memory: &M,
    op: Head,
    reads: &[Slice<'_, M::Buffer>],
    written: Vec<SliceMut<'_, M::Buffer>>,
    z: Option<SliceMut<'_, M::Buffer>>,
) {
    let mut writes: Vec<_> = written.into_iter().chain(z).map(Write::over).collect();
    let operands = Operands { reads, writes: &mut writes, batch: BatchFacts::default() };
    memory.run(&Op::Head(op), operands).unwrap();
}

/// Returns losses and z-losses of capped logits with loss terms, and the gradients of the logits before the cap.
fn capped<M: Backend>(
    memory: &M,
    dtype: DType,
    shift: usize,
    logits: &[f64],
    targets: &[u32],
    terms: LossTerms,
) -> [Vec<f64>; 3] {
    let (rows, len) = (targets.len(), logits.len());
    let dims = LogitsDims { softcap: Some(3.0), terms, ..LogitsDims::new(rows, len / rows) };
    let (mut there, ids) = (shifted(memory, dtype, shift, logits), ids(memory, targets));
    let [mut only, mut losses] = [(); 2].map(|()| room(memory, DType::F64, rows));
    let [mut only_z, mut z] = [(); 2].map(|()| room(memory, DType::F64, rows));
    let has_z = terms.z_loss > 0.0;
    let reads = [Slice::new(&there, shift, len), Slice::whole(&ids)];
    let z_losses = has_z.then(|| SliceMut::whole(&mut only_z));
    run(memory, Head::CrossEntropy { dims }, &reads, vec![SliceMut::whole(&mut only)], z_losses);
    let writes = vec![SliceMut::new(&mut there, shift, len), SliceMut::whole(&mut losses)];
    let z_losses = has_z.then(|| SliceMut::whole(&mut z));
    let op = Head::CrossEntropyBackward { dims, is_rounded: false };
    run(memory, op, &[Slice::whole(&ids)], writes, z_losses);
    assert_bits(&values(memory, &only), &values(memory, &losses), "losses with and without gradient");
    let z = if has_z { values(memory, &z) } else { vec![0.0; rows] };
    if has_z {
        assert_bits(&values(memory, &only_z), &z, "z-losses with and without gradient");
    }
    [values(memory, &losses), z, range(memory, &there, shift, len)]
}

#[test]
fn softcapped_cross_entropy_matches_host_within_error_bound() {
    for dtype in [DType::F32, DType::F64] {
        for (rows, vocab, shift) in [(1, 1, 0), (4, 33, 1), (5, 64, 0), (3, 1000, 3)] {
            // Logits within the cap, near it, and far beyond.
            let logits: Vec<f64> = normal(vocab as u64, rows * vocab).iter().map(|x| 4.0 * x).collect();
            let mut targets: Vec<u32> = (0..rows as u32).map(|row| row * 7 % vocab as u32).collect();
            targets[rows - 1] = if rows > 1 { IGNORED_TARGET } else { 0 };
            for (label_smoothing, z_loss, loss_scale) in
                [(0.0, 0.0, 1.0), (0.2, 0.0, 1.0), (0.0, 0.01, 1.0), (0.1, 0.001, 1.0), (0.1, 0.001, 4096.0)]
            {
                let terms = LossTerms { label_smoothing, z_loss, loss_scale, ..LossTerms::default() };
                let [losses, z, gradients] = capped(&*subject(), dtype, shift, &logits, &targets, terms);
                let [of_host, z_of_host, expected] = capped(&host(), dtype, shift, &logits, &targets, terms);
                // With a coefficient of at most 0.01, the z-loss is smaller than the other terms.
                let error = 2.0 * (vocab as f64 + 64.0) * unit(dtype);
                let what = format!("of {rows} x {vocab} capped logits of {dtype} with {terms:?}");
                let largest = 3.0 + (vocab as f64).ln();
                assert_within(&losses, &of_host, &vec![error * largest; rows], &format!("losses {what}"));
                assert_within(&z, &z_of_host, &vec![error * largest; rows], &format!("z-losses {what}"));
                assert_within(
                    &gradients,
                    &expected,
                    &vec![error * loss_scale; rows * vocab],
                    &format!("gradients {what}"),
                );
            }
        }
    }
}
