//! Tests AdamW with 8-bit moments against a slow oracle, element by element in double precision.

use super::*;
use crate::quantized::CodeBook;

/// The parameter that is large enough for 8-bit moments.
const LARGE: usize = 4;

/// Returns the code of the nearest value of a code book.
fn nearest(book: &CodeBook, number: f64) -> u8 {
    let away = |code: &usize| (f64::from(book.values[*code]) - number).abs();
    (0..256).rev().min_by(|a, b| away(a).total_cmp(&away(b))).unwrap() as u8
}

/// Rounds a moment of a row in place; returns the largest magnitude of each block and the codes.
fn rounded(book: &CodeBook, row: &mut [f64]) -> (Vec<f64>, Vec<u8>) {
    let (mut largest, mut codes) = (Vec::new(), Vec::new());
    for block in row.chunks_mut(256) {
        let largest_magnitude =
            block.iter().fold(0.0, |largest_magnitude: f64, value| largest_magnitude.max(value.abs()));
        for value in block.iter_mut() {
            let code = nearest(book, *value / largest_magnitude);
            *value = f64::from(book.values[usize::from(code)]) * largest_magnitude;
            codes.push(code);
        }
        largest.push(largest_magnitude);
    }
    (largest, codes)
}

#[test]
fn adamw8bit_matches_adamw_with_moments_rounded_to_codes() {
    let adamw = AdamW { eps: 1e-3, groups: groups(0.1), ..AdamW::default() };
    let rule = Rule::new(AdamW8bit::new(adamw.clone(), &spec()));
    let mut shards = [Shard::new(&rule, DType::F64, 0, 1, 1)];
    let start: usize = SHAPES[..LARGE].iter().map(|shape| shape.iter().product::<usize>()).sum();
    let (mut p, mut m, mut v) = (numbers(1, total()), vec![0.0; total()], vec![0.0; total()]);
    for number in 1..=STEPS {
        step(&rule, &mut shards, number);
        let (gradient, lr) = (scaled(number), lr(number));
        for i in 0..total() {
            let GroupSettings { lr_scale, weight_decay, .. } = adamw.groups.of(ParamId(owners()[i]));
            let lr = lr * lr_scale;
            p[i] *= 1.0 - lr * weight_decay;
            m[i] = adamw.betas.0 * m[i] + (1.0 - adamw.betas.0) * gradient[i];
            v[i] = adamw.betas.1 * v[i] + (1.0 - adamw.betas.1) * gradient[i] * gradient[i];
            let correction = |beta: f64| 1.0 - beta.powi(number as i32);
            let denominator = v[i].sqrt() / correction(adamw.betas.1).sqrt() + adamw.eps;
            p[i] -= lr / correction(adamw.betas.0) * m[i] / denominator;
        }
        let mut expected = [const { (Vec::new(), Vec::new()) }; 2];
        let books = [CodeBook::signed(), CodeBook::unsigned()];
        for ((moment, book), (largest, codes)) in [&mut m, &mut v].into_iter().zip(books).zip(&mut expected) {
            for row in moment[start..].chunks_mut(SHAPES[LARGE][1]) {
                let found = rounded(book, row);
                largest.extend(found.0);
                codes.extend(found.1.into_iter().map(f64::from));
            }
        }
        let mut params = vec![f64::NAN; total()];
        shards[0].gather(&mut params);
        assert_close(&params, &p, 1e-13);
        let contents = shards[0].contents();
        let [_, mean, square, mean_codes, square_codes, mean_largest, square_largest] = &contents[..] else {
            panic!("parameters and six tensors of state");
        };
        assert_close(mean, &m[..start], 1e-13);
        assert_close(square, &v[..start], 1e-13);
        let [expected_mean, expected_square] = &expected;
        assert_close(mean_largest, &expected_mean.0, 1e-13);
        assert_close(square_largest, &expected_square.0, 1e-13);
        assert_eq!((mean_codes, square_codes), (&expected_mean.1, &expected_square.1));
    }
}

#[test]
fn only_large_matrices_have_8_bit_moments() {
    let shapes: [&[usize]; 6] = [&[64, 64], &[63, 65], &[4096], &[256, 16], &[400, 15], &[8, 8, 64]];
    let mut spec = spec();
    spec.params =
        shapes.iter().map(|shape| ParamSpec { shape: shape.to_vec(), ..spec.params[0].clone() }).collect();
    let rule = AdamW8bit::new(AdamW::default(), &spec);
    let found: Vec<_> = (0..shapes.len()).map(|param| rule.row_len(ParamId(param))).collect();
    assert_eq!(found, [Some(64), None, None, Some(16), None, Some(512)]);
}
