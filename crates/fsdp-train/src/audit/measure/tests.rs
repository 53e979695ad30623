use super::*;
use crate::audit::moments::Moments;
use crate::audit::ranks::Ranks;
use crate::audit::state::{Held, State, WEIGHT};
use crate::audit::testing;

const SPLITS: [Split; 3] = [
    Split { ranks: 2, has_stacks: false },
    Split { ranks: 3, has_stacks: false },
    Split { ranks: 16, has_stacks: false },
];
const DECAY: f64 = 0.9;
const ROWS: usize = 10;
const COLS: usize = 3;

fn spec() -> ModelSpec {
    testing::spec(&[("proj", &[ROWS, COLS]), ("norm", &[ROWS])])
}

/// The gradient that was used, and the expected one.
fn used(at: usize) -> f64 {
    (at as f64).sin()
}

fn expected(at: usize) -> f32 {
    (1.3 * at as f32).cos()
}

/// States whose first moments have taken up the used gradient.
fn around(spec: &ModelSpec) -> Around<'_> {
    let state = |moment: fn(usize) -> f64| {
        let mut held = Held::new();
        for (index, param) in spec.params.iter().enumerate() {
            held.insert((ParamId(index), WEIGHT), vec![0.5; param.len()]);
            held.insert((ParamId(index), "exp_avg"), (0..param.len()).map(moment).collect());
        }
        State::held(spec, held)
    };
    let before = |at: usize| 0.1 * at as f64;
    let after = |at: usize| DECAY * (0.1 * at as f64) + (1.0 - DECAY) * used(at);
    let moments = Moments { first: Some("exp_avg"), decay: DECAY, gain: 1.0 - DECAY, is_coupled: false };
    let zeros = vec![0.0; spec.params.len()];
    Around::open([state(before), state(after)], Ranks::alone(), moments, spec, [zeros.clone(), zeros], None)
        .unwrap()
}

/// Compares all gradients, given in pieces of so many rows.
fn measured(spec: &ModelSpec, piece: usize, clip: f64) -> Measured {
    let (mut around, mut measured) = (around(spec), Measured::new(spec, &SPLITS, clip));
    for (index, param) in spec.params.iter().enumerate() {
        let row_len = param.row_len().unwrap_or(1);
        for first in (0..ROWS).step_by(piece) {
            let rows = first..ROWS.min(first + piece);
            let values: Vec<f32> = (rows.start * row_len..rows.end * row_len).map(expected).collect();
            measured.add(&mut around, ParamId(index), rows, &values).unwrap();
        }
    }
    measured
}

/// The squares of the used and the expected gradient and of their difference, of some rows.
fn squares(rows: Range<usize>, row_len: usize, clip: f64) -> [f64; 3] {
    let elements = rows.start * row_len..rows.end * row_len;
    let square = |of: &dyn Fn(usize) -> f64| elements.clone().map(|at| of(at).powi(2)).sum::<f64>();
    let expected = |at| f64::from(expected(at));
    [square(&used), square(&expected), square(&|at| used(at) - clip * expected(at))]
}

fn assert_squares(sums: Sums, expected: [f64; 3], what: &str) {
    for (found, expected) in [sums.uu, sums.ee, sums.dd].into_iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-9 * expected.max(1e-3), "{what}: {found} {expected}");
    }
}

#[test]
fn sums_of_pieces_are_those_of_the_whole_and_of_shards() {
    let spec = spec();
    for (piece, clip) in [(1, 1.0), (3, 0.25), (ROWS, 1.0)] {
        let measured = measured(&spec, piece, clip);
        for (index, param) in spec.params.iter().enumerate() {
            let row_len = param.row_len().unwrap_or(1);
            assert_squares(measured.sums[index], squares(0..ROWS, row_len, clip), &param.fqn);
            for (split, params) in &measured.shards {
                // As `torch.chunk` cuts rows: later ranks may have fewer, or none.
                let each = ROWS.div_ceil(split.ranks);
                for (rank, sums) in params[index].iter().enumerate() {
                    let rows = ROWS.min(rank * each)..ROWS.min((rank + 1) * each);
                    let what = format!("{} on rank {rank} of {}", param.fqn, split.ranks);
                    assert_squares(*sums, squares(rows, row_len, clip), &what);
                }
            }
        }
    }
}

#[test]
fn clipping_is_by_the_norm_of_all_expected_gradients() {
    let spec = spec();
    let all: f64 =
        spec.params.iter().map(|param| squares(0..ROWS, param.row_len().unwrap_or(1), 1.0)[1]).sum();
    let max = all.sqrt() / 3.0;
    let clipped = measured(&spec, 4, 1.0).clipped(Some(max));
    assert!((clipped.clip() - 1.0 / 3.0).abs() < 1e-6, "{}", clipped.clip());
    assert_squares(clipped.sums[0], squares(0..ROWS, COLS, clipped.clip()), "proj");
    assert_squares(clipped.shards[0].1[0][1], squares(5..10, COLS, clipped.clip()), "rank 1 of 2");
    assert_eq!(measured(&spec, 4, 1.0).clipped(Some(100.0 * max)).clip(), 1.0);
}
