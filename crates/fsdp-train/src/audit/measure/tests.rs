use proptest::prelude::*;

use super::*;
use crate::audit::moments::Moments;
use crate::audit::ranks::Ranks;
use crate::audit::state::{Held, State, WEIGHT};
use crate::audit::testing;

const DECAY: f64 = 0.9;

/// Rows and columns of a matrix and of each expert's, a vector with as many elements as the matrix has rows, and the number of
/// experts.
#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    cols: usize,
    experts: usize,
}

const SHAPE: Shape = Shape { rows: 10, cols: 3, experts: 0 };

impl Shape {
    fn spec(self) -> ModelSpec {
        let Shape { rows, cols, experts } = self;
        let experts: Vec<String> =
            (0..experts).map(|expert| format!("mlp.experts.{expert}.w1.weight")).collect();
        let (matrix, vector) = ([rows, cols], [rows]);
        let mut params: Vec<(&str, &[usize])> = vec![("proj", &matrix), ("norm", &vector)];
        params.extend(experts.iter().map(|name| (&**name, &matrix[..])));
        testing::spec(&params)
    }
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
    let (mut around, mut measured) = (around(spec), Measured::new(spec, &Split::all(spec), clip));
    for (index, param) in spec.params.iter().enumerate() {
        let row_len = param.row_len().unwrap_or(1);
        let all = param.len() / row_len;
        for first in (0..all).step_by(piece) {
            let rows = first..all.min(first + piece);
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

/// The rows of a parameter that a rank has of it, as `torch.chunk` cuts rows: later ranks may have fewer, or none. Of a stack,
/// rows are whole experts.
fn rows_of(spec: &ModelSpec, index: usize, rows: usize, (split, rank): (Split, usize)) -> Range<usize> {
    let name = &spec.params[index].fqn;
    let expert = name.strip_prefix("mlp.experts.").filter(|_| split.has_stacks);
    let Some(expert) = expert.and_then(|rest| rest.split('.').next()?.parse::<usize>().ok()) else {
        let each = rows.div_ceil(split.ranks);
        return rows.min(rank * each)..rows.min((rank + 1) * each);
    };
    let experts = spec.params.iter().filter(|param| param.fqn.starts_with("mlp.experts.")).count();
    let chunks: Vec<Vec<usize>> = (0..experts)
        .collect::<Vec<_>>()
        .chunks(experts.div_ceil(split.ranks))
        .map(<[usize]>::to_vec)
        .collect();
    if chunks.get(rank).is_some_and(|own| own.contains(&expert)) { 0..rows } else { 0..0 }
}

proptest! {
    #[test]
    fn sums_of_pieces_are_those_of_the_whole_and_of_shards(
        rows in 1usize..20,
        cols in 1usize..4,
        experts in 0usize..7,
        piece in 1usize..20,
        clip in 0.1f64..1.0,
    ) {
        let spec = Shape { rows, cols, experts }.spec();
        let measured = measured(&spec, piece, clip);
        let forms = if experts > 0 { 2 } else { 1 };
        prop_assert_eq!(measured.shards.len(), forms * RANKS.len());
        for (index, param) in spec.params.iter().enumerate() {
            let row_len = param.row_len().unwrap_or(1);
            assert_squares(measured.sums[index], squares(0..rows, row_len, clip), &param.fqn);
            for (split, params) in &measured.shards {
                prop_assert_eq!(params[index].len(), split.ranks);
                for (rank, sums) in params[index].iter().enumerate() {
                    let own = rows_of(&spec, index, rows, (*split, rank));
                    let what = format!("{} on rank {rank}, {split:?}", param.fqn);
                    assert_squares(*sums, squares(own, row_len, clip), &what);
                }
            }
        }
    }
}

#[test]
fn clipping_is_by_the_norm_of_all_expected_gradients() {
    let spec = SHAPE.spec();
    let Shape { rows, cols, .. } = SHAPE;
    let all: f64 =
        spec.params.iter().map(|param| squares(0..rows, param.row_len().unwrap_or(1), 1.0)[1]).sum();
    let max = all.sqrt() / 3.0;
    let clipped = measured(&spec, 4, 1.0).clipped(Some(max));
    assert!((clipped.clip() - 1.0 / 3.0).abs() < 1e-6, "{}", clipped.clip());
    assert_squares(clipped.sums[0], squares(0..rows, cols, clipped.clip()), "proj");
    assert_squares(clipped.shards[0].1[0][1], squares(5..10, cols, clipped.clip()), "rank 1 of 2");
    assert_eq!(measured(&spec, 4, 1.0).clipped(Some(100.0 * max)).clip(), 1.0);
}
