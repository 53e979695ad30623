//! Tests Muon: orthogonalization against a slow reference, and a step on one rank.

use fsdp_core::update::WholeDirections;

use super::*;
use crate::host::HostPool;
use crate::host::element::Float;
use crate::host::workers::Workers;
use crate::update::host::{Shape, orthogonalize};
use crate::update::{AdjustLr, Muon, MuonOptions};

/// A matrix of `f64`, row by row.
type Rows = Vec<Vec<f64>>;

fn matrix(key: u64, Shape { rows, cols }: Shape) -> Rows {
    numbers(key, rows * cols).chunks(cols).map(<[f64]>::to_vec).collect()
}

fn transposed(a: &Rows) -> Rows {
    (0..a[0].len()).map(|col| a.iter().map(|row| row[col]).collect()).collect()
}

fn product(a: &Rows, b: &Rows) -> Rows {
    let b = transposed(b);
    let dot = |x: &Vec<f64>, y: &Vec<f64>| x.iter().zip(y).map(|(x, y)| x * y).sum();
    a.iter().map(|row| b.iter().map(|col| dot(row, col)).collect()).collect()
}

fn sum(terms: &[(f64, &Rows)]) -> Rows {
    let (rows, cols) = (terms[0].1.len(), terms[0].1[0].len());
    let at = |row: usize, col: usize| terms.iter().map(|(factor, term)| factor * term[row][col]).sum();
    (0..rows).map(|row| (0..cols).map(|col| at(row, col)).collect()).collect()
}

fn norm(a: &Rows) -> f64 {
    a.iter().flatten().map(|x| x * x).sum::<f64>().sqrt()
}

/// The definition: `a X + b X X^T X + c X X^T X X^T X`, five times, of a matrix of norm one.
fn naive(x: &Rows) -> Rows {
    let divisor = norm(x).max(EPS);
    let mut x: Rows = x.iter().map(|row| row.iter().map(|x| x / divisor).collect()).collect();
    for _ in 0..5 {
        let cubed = product(&product(&x, &transposed(&x)), &x);
        let fifth = product(&product(&x, &transposed(&x)), &cubed);
        x = sum(&[(3.4445, &x), (-4.7750, &cubed), (2.0315, &fifth)]);
    }
    x
}

/// Computes singular values from the eigenvalues of the smaller Gram matrix, by Jacobi rotations.
fn singular_values(x: &Rows) -> Vec<f64> {
    let x = if x.len() > x[0].len() { transposed(x) } else { x.clone() };
    let mut gram = product(&x, &transposed(&x));
    let n = gram.len();
    for (p, q) in (0..60).flat_map(|_| (0..n).flat_map(|p| (p + 1..n).map(move |q| (p, q)))) {
        if gram[p][q].abs() < 1e-14 {
            continue;
        }
        let (sin, cos) = (0.5 * (2.0 * gram[p][q]).atan2(gram[q][q] - gram[p][p])).sin_cos();
        for row in gram.iter_mut() {
            (row[p], row[q]) = (cos * row[p] - sin * row[q], sin * row[p] + cos * row[q]);
        }
        let (one, other) = (gram[p].clone(), gram[q].clone());
        for col in 0..n {
            gram[p][col] = cos * one[col] - sin * other[col];
            gram[q][col] = sin * one[col] + cos * other[col];
        }
    }
    (0..n).map(|index| gram[index][index].max(0.0).sqrt()).collect()
}

/// Bound of the Frobenius norm of the error of a computation with unit roundoff `u`, doubled for the naive order of
/// operations, which is no worse.
///
/// Singular values stay below s = 1.203 (the polynomial is at most 1.2023 from 0 to s), so with the shorter side k
/// the norm of X is at most s sqrt(k), and the norm of G = X X^T at most s^2 sqrt(k). The error of a matrix product
/// with sums of n terms is at most g(n) = n u / (1 - n u) times the product of the norms. An error made in a step
/// grows by a factor of at most 4 in each later one: this bounds the polynomial's slope from 0 to s (3.99), which
/// bounds an odd function of singular values. The first norm and division change X by less than (l k + 2) u.
fn bound(shape: Shape, u: f64) -> f64 {
    let (k, l) = (shape.rows.min(shape.cols) as f64, shape.rows.max(shape.cols) as f64);
    let (a, b, c) = (3.4445, 4.775, 2.0315);
    let g = |n: f64| n * u / (1.0 - n * u);
    let (s, x) = (1.203f64, 1.203 * k.sqrt());
    let (gram, gram_norm) = (g(l) * x * x, s * s * k.sqrt());
    let square = g(k) * gram_norm * gram_norm + 2.0 * s * s * gram;
    let factor_norm = b * gram_norm + c * gram_norm * s * s;
    let factor = b * gram + c * square + 3.0 * u * factor_norm;
    let step = g(k) * factor_norm * x + s * factor + 3.0 * u * (a * x + factor_norm * s);
    let growth = |steps: i32| 4f64.powi(steps);
    2.0 * ((l * k + 2.0) * u * growth(5) + step * (0..5).map(growth).sum::<f64>())
}

const EPS: f64 = 1e-7;

fn computed<A: Float>(x: &Rows, shape: Shape, threads: usize) -> Vec<f64> {
    let workers = Workers::new(threads, std::sync::Arc::new(HostPool::default())).unwrap();
    let flat: Vec<A> = x.iter().flatten().map(|&x| A::of(x)).collect();
    let mut scratch = vec![A::of(f64::NAN); shape.scratch()];
    let out = orthogonalize(&workers, shape, A::floats(&flat), EPS, &mut scratch);
    out.iter().map(|x| x.as_f64()).collect()
}

fn away(got: &[f64], expected: &Rows) -> f64 {
    let pairs = got.iter().zip(expected.iter().flatten());
    pairs.map(|(got, expected)| (got - expected).powi(2)).sum::<f64>().sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn orthogonalization_matches_naive_iteration_within_rounding(rows in 1usize..33, cols in 1usize..33, key in 0u64..1000) {
        let shape = Shape { rows, cols };
        // Single-precision numbers, so that both dtypes start from the same values.
        let x = matrix(key, shape);
        let expected = naive(&x);
        let double = computed::<f64>(&x, shape, 1);
        prop_assert!(away(&double, &expected) <= bound(shape, f64::EPSILON / 2.0));
        let single = computed::<f32>(&x, shape, 1);
        prop_assert!(away(&single, &expected) <= bound(shape, f64::from(f32::EPSILON) / 2.0));
        prop_assert_eq!(&computed::<f32>(&x, shape, 3), &single, "threads do not matter");
        // The actual error is much smaller.
        prop_assert!(away(&single, &expected) < 1e-3);
    }

    /// Singular values of a matrix of norm one that are not tiny end near one. (Five steps multiply them by at most
    /// 3.4445^5 = 485.)
    #[test]
    fn singular_values_end_near_one(rows in 1usize..17, cols in 1usize..17, key in 0u64..1000) {
        let shape = Shape { rows, cols };
        let x = matrix(key, shape);
        let smallest = singular_values(&x).into_iter().fold(f64::INFINITY, f64::min) / norm(&x);
        prop_assume!(smallest > 0.01);
        let got = computed::<f32>(&x, shape, 1);
        let got: Rows = got.chunks(cols).map(<[f64]>::to_vec).collect();
        for value in singular_values(&got) {
            prop_assert!((0.68..1.21).contains(&value), "{value}");
        }
    }
}

#[test]
fn scratch_and_flops_match_five_iterations() {
    let shape = Shape { rows: 6, cols: 4 };
    assert_eq!(shape.scratch(), 2 * 24 + 2 * 16);
    let flops: u128 = shape.products().iter().map(fsdp_core::update::Products::flops).sum();
    // X^T X, its square, and X times their combination.
    assert_eq!(flops, 5 * (2 * 4 * 4 * 6 + 2 * 4 * 4 * 4 + 2 * 6 * 4 * 4));
}

#[test]
fn zero_matrix_stays_zero() {
    let shape = Shape { rows: 3, cols: 5 };
    let zeros = vec![vec![0.0; 5]; 3];
    assert_eq!(computed::<f32>(&zeros, shape, 1), vec![0.0; 15]);
}

fn options(adjust_lr: AdjustLr) -> MuonOptions {
    let adamw = AdamW { betas: (0.9, 0.95), eps: 1e-3, groups: groups(0.1) };
    MuonOptions { momentum: 0.9, nesterov: true, eps: EPS, adjust_lr, adamw }
}

/// A rule that orthogonalizes two of the matrices; AdamW updates the other parameters.
fn rule(adjust_lr: AdjustLr) -> Rule {
    Rule::new(Muon::new(options(adjust_lr), &spec(), &[ParamId(2), ParamId(4)].into()))
}

/// Runs a step, with buffers for the directions of a shard of everything and for scratch.
fn update(rule: &Rule, shard: &mut Shard, number: u64) {
    let (dtype, len) = (shard.params.dtype(), shard.params.len());
    let memory = &shard.memory;
    let mut directions = memory.allocate(Category::GradientSlot, DType::F64, len).unwrap();
    let mut scratch = memory.allocate(Category::Workspace, dtype, rule.scratch()).unwrap();
    let (memory, mut view, scalars) = shard.view(number);
    rule.run(memory, Stage::Direct { direction: &mut directions }, &mut view, &scalars).unwrap();
    view.whole = Some(WholeDirections { directions: &directions, start: 0, scratch: &mut scratch });
    rule.run(memory, Stage::Update { statistics: &[] }, &mut view, &scalars).unwrap();
}

/// `torch.optim.Muon` with the naive iteration, and AdamW for the other parameters.
fn reference(adjust_lr: AdjustLr) -> Vec<f64> {
    let MuonOptions { momentum, adamw, .. } = options(adjust_lr);
    let (mut params, mut buffers) = (adamw_reference(&adamw), vec![0.0; total()]);
    let (initial, mut start) = (numbers(1, total()), 0);
    for (param, shape) in SHAPES.iter().enumerate() {
        let len: usize = shape.iter().product();
        let range = start..start + len;
        start += len;
        if ![2, 4].contains(&param) {
            continue;
        }
        let (rows, cols) = (shape[0] as f64, shape[1] as f64);
        params[range.clone()].copy_from_slice(&initial[range.clone()]);
        for step in 1..=STEPS {
            let gradient = scaled(step);
            for i in range.clone() {
                buffers[i] = momentum * buffers[i] + (1.0 - momentum) * gradient[i];
            }
            let direction = |i: usize| momentum * buffers[i] + (1.0 - momentum) * gradient[i];
            let direction: Vec<f64> = range.clone().map(direction).collect();
            let direction = naive(&direction.chunks(shape[1]).map(<[f64]>::to_vec).collect());
            let ratio = match adjust_lr {
                AdjustLr::Original => (rows / cols).max(1.0).sqrt(),
                AdjustLr::MatchRmsAdamw => 0.2 * rows.max(cols).sqrt(),
            };
            for (i, direction) in range.clone().zip(direction.into_iter().flatten()) {
                params[i] = params[i] * (1.0 - lr(step) * 0.1) - lr(step) * ratio * direction;
            }
        }
    }
    params
}

#[test]
fn step_orthogonalizes_momentum_and_uses_adamw_elsewhere() {
    for adjust_lr in [AdjustLr::Original, AdjustLr::MatchRmsAdamw] {
        let expected = reference(adjust_lr);
        for (dtype, threads, tolerance) in
            [(DType::F64, 1, 1e-12), (DType::F32, 1, 1e-5), (DType::F32, 3, 1e-5)]
        {
            let rule = rule(adjust_lr);
            let mut shard = Shard::new(&rule, dtype, 0, 1, threads);
            for step in 1..=STEPS {
                shard.scatter(&numbers(100 + step, total()), false);
                update(&rule, &mut shard, step);
            }
            shard.assert_copied();
            let mut params = vec![f64::NAN; total()];
            shard.gather(&mut params);
            assert_close(&params, &expected, tolerance);
        }
    }
}

#[test]
fn muon_records_non_finite_and_skips_flagged_steps() {
    let rule = rule(AdjustLr::Original);
    let mut shard = Shard::new(&rule, DType::F32, 0, 1, 1);
    shard.scatter(&numbers(101, total()), false);
    let before = shard.contents();
    shard.set_factors(GradientFactors { finite: false, ..FACTORS });
    update(&rule, &mut shard, 1);
    assert_eq!(shard.contents(), before);
    let noted = |shard: &Shard| {
        let mut word = [0];
        shard
            .memory
            .read(Queue::Compute, Slice::whole(&shard.not_finite), HostSliceMut::I64(&mut word))
            .unwrap();
        word == [1]
    };
    shard.set_factors(FACTORS);
    update(&rule, &mut shard, 1);
    assert!(!noted(&shard));
    // One element of a matrix, which makes the whole matrix non-finite.
    let at = shard.pieces[2].offset + 1;
    let infinite = HostSlice::F64(&[f64::INFINITY]);
    shard.memory.write(Queue::Compute, infinite, SliceMut::new(&mut shard.gradient, at, 1)).unwrap();
    update(&rule, &mut shard, 2);
    assert!(noted(&shard));
    let params = &shard.contents()[0];
    let Piece { offset, len, .. } = shard.pieces[2];
    assert!(params[offset..offset + len].iter().all(|param| param.is_nan()));
}

#[test]
fn hidden_matrices_are_read_only_by_layers() {
    let mut spec = spec();
    assert!(Muon::hidden_matrices(&spec).is_empty(), "no block is of a layer");
    let block = |name: &str, params: &[usize], layer| BlockSpec {
        name: name.into(),
        params: params.iter().copied().map(ParamId).collect(),
        layer,
    };
    // A tied head, a vector, two matrices, and a matrix shared by a layer and the last block.
    spec.params[3].shape = vec![2, 3, 1];
    spec.blocks =
        vec![block("in", &[0], None), block("layer", &[1, 2, 3, 4], Some(0)), block("out", &[0, 4], None)];
    assert_eq!(Muon::hidden_matrices(&spec), [ParamId(2)].into());
}
